# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.tokenspeed.mla_append`: the fused append as torch.compile and CUDA graphs see it.

The operation finds its layer by name, because a graph can hold no object, and the step's cache and slots in vLLM's forward
context. It changes `q`, which nothing but the attention behind it reads, and what it returns is what that attention takes: so
the write is always in front of the read.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.library import Library

from tokenspeed_plugin.host.append_names import get_attention_context

NAME: Final = "mla_append"
KERNEL: Final = "tokenspeed_append"
"""Attribute of vLLM's attention layer that holds the solution."""
_SCHEMA: Final = (
    f"{NAME}(Tensor(a!) q, Tensor latent, Tensor positions, Tensor? norm_weight, float epsilon, Tensor rope_table,"
    " bool interleaved, str layer) -> (Tensor, Tensor)"
)
_PROFILED_PAGE_TOKENS = 16


def mla_append(
    q: torch.Tensor,
    latent: torch.Tensor,
    positions: torch.Tensor,
    norm_weight: torch.Tensor | None,
    epsilon: float,
    rope_table: torch.Tensor,
    interleaved: bool,
    layer: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate `q` in place and append the new tokens of a layer; normed latents and rotated keys.

    Operands are those of `mla_append_reference`; `layer` is vLLM's name of the attention layer. Without a cache, as in a
    profile run, nothing is written.
    """
    normed, key = torch.ops.tokenspeed.mla_append(
        q, latent, positions, norm_weight, epsilon, rope_table, interleaved, layer
    )
    return normed, key


def _run(
    q: torch.Tensor,
    latent: torch.Tensor,
    positions: torch.Tensor,
    norm_weight: torch.Tensor | None,
    epsilon: float,
    rope_table: torch.Tensor,
    interleaved: bool,
    layer: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    _, attention, bound, slots = get_attention_context(layer)
    is_quantised = attention.kv_cache_dtype.startswith("fp8")
    kv_cache = _cache(bound, slots, latent, is_quantised)
    normed, key = getattr(attention, KERNEL)(
        q,
        latent,
        positions,
        norm_weight,
        epsilon,
        rope_table,
        kv_cache,
        positions[:0] if slots is None else slots.flatten(),
        interleaved=interleaved,
        kv_scale=attention._k_scale if is_quantised else None,
    )
    return normed, key


def _cache(bound: torch.Tensor, slots: Any, latent: torch.Tensor, is_quantised: bool) -> torch.Tensor:
    """The layer's cache; before there is one, a page of the same kind, so that a kernel is compiled for it in the profile run."""
    dtype = torch.float8_e4m3fn if is_quantised else latent.dtype
    if slots is None or bound.numel() == 0:
        return torch.empty(1, _PROFILED_PAGE_TOKENS, latent.shape[1], dtype=dtype, device=latent.device)
    return bound.view(dtype) if is_quantised else bound


def _shapes(
    q: torch.Tensor,  # noqa: ARG001 - the operation's signature
    latent: torch.Tensor,
    positions: torch.Tensor,  # noqa: ARG001
    norm_weight: torch.Tensor | None,  # noqa: ARG001
    epsilon: float,  # noqa: ARG001
    rope_table: torch.Tensor,
    *_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, rope_dims = latent.shape[0], rope_table.shape[1]
    return latent.new_empty(tokens, latent.shape[1] - rope_dims), latent.new_empty(tokens, rope_dims)


_library = Library("tokenspeed", "FRAGMENT")
_library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_library.impl(NAME, _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"tokenspeed::{NAME}", _shapes, lib=_library)
