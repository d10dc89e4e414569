# SPDX-License-Identifier: Apache-2.0
"""Latent caches that an engine can have under our backends, and what follows from the type of their elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from tokenspeed_plugin.kernels.mla.solutions import BF16, FP8
from tokenspeed_plugin.kernels.registry import Signature


@dataclass(frozen=True)
class LatentCache:
    """One kind of cache.

    Attributes:
        formats: of decode's operands.
        stored: as vLLM's description of the cache has it; e4m3 lies there as bytes.
        host_solution: what vLLM takes for it on Hopper by itself, and what a batch goes to that our kernel does not take.
        host_backend: vLLM's name of that.
    """

    formats: Signature
    stored: torch.dtype
    host_solution: str
    host_backend: str


BF16_CACHE: Final = LatentCache(BF16, torch.bfloat16, "flashattn3", "FLASH_ATTN_MLA")
E4M3_CACHE: Final = LatentCache(FP8, torch.uint8, "flashmla", "FLASHMLA")
_BY_NAME: Final = {"auto": BF16_CACHE, "bfloat16": BF16_CACHE, "fp8": E4M3_CACHE, "fp8_e4m3": E4M3_CACHE}
CACHE_DTYPES: Final = tuple(_BY_NAME)
"""vLLM's names of the caches that are served, for models of bfloat16."""


def latent_cache(cache_dtype: str) -> LatentCache:
    """The cache that vLLM calls `cache_dtype`.

    Raises:
        ValueError: none of ours.
    """
    if cache_dtype not in _BY_NAME:
        raise ValueError(f"--kv-cache-dtype {cache_dtype}, allowed: {', '.join(CACHE_DTYPES)}")
    return _BY_NAME[cache_dtype]
