# SPDX-License-Identifier: Apache-2.0
"""KV cache groups as vLLM itself plans them from layers of unequal pages, for the tests of faults 26 and 27."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from scheduler_harness import make_vllm_config
from scheduler_knobs import Group, Knobs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec

HEAD_BYTES = 2 * 128  # key and value of one head of 128 numbers, for each byte of the number


def attention(block_tokens: int, num_heads: int, dtype: torch.dtype = torch.bfloat16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_tokens, num_kv_heads=num_heads, head_size=128, dtype=dtype)


def state(block_tokens: int, num_bytes: int, page_bytes: int | None = None) -> MambaSpec:
    shapes, dtypes = ((num_bytes,),), (torch.uint8,)
    return MambaSpec(
        block_size=block_tokens, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align", page_size_padded=page_bytes
    )


def planned(
    layers: Mapping[str, KVCacheSpec], knobs: Knobs, *, pool_bytes: int | None = None, layout: str = "LBNHC"
) -> tuple[Knobs, KVCacheConfig]:
    """What vLLM makes of the layers, and the knobs with the groups that come out.

    Args:
        pool_bytes: decide the number of blocks; by default the knobs do.
        layout: how vLLM lays out its memory. Layers of unequal pages share a block only where its name begins with B.
    """
    vllm_config = make_vllm_config(knobs)
    vllm_config.cache_config.kv_cache_layout = layout
    groups = _planner()(vllm_config, dict(layers))
    if pool_bytes is not None:
        knobs = replace(knobs, num_blocks=pool_bytes // max(map(_block_bytes, groups)) - 1)
    shapes = tuple(Group(spec.block_size, keeps_state=isinstance(spec, MambaSpec)) for spec in map(_any_layer, groups))
    config = KVCacheConfig(num_blocks=knobs.num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups)
    return replace(knobs, groups=shapes), config


def _any_layer(group: KVCacheGroupSpec) -> KVCacheSpec:
    return next(iter(getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec}).values()))


def _block_bytes(group: KVCacheGroupSpec) -> int:
    spec = group.kv_cache_spec
    return spec.page_size_bytes * (1 if hasattr(spec, "kv_cache_specs") else len(group.layer_names))


def _planner() -> Any:
    """vLLM's `get_kv_cache_groups`, which moved between 0.32 and 0.33."""
    try:
        module = importlib.import_module("vllm.v1.core.kv_cache_planning")
    except ImportError:
        module = importlib.import_module("vllm.v1.core.kv_cache_utils")
    return module.get_kv_cache_groups
