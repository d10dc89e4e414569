# SPDX-License-Identifier: Apache-2.0
"""Index arithmetic of the prefill kernel, for the compiler's integers and for Python's."""

from __future__ import annotations

from typing import Any

from tokenspeed_plugin.kernels.mla.sm100.arithmetic import swizzled
from tokenspeed_plugin.kernels.mla.sm100.layout import SWIZZLE_ROW_BYTES
from tokenspeed_plugin.kernels.mla.sm100.prefill.layout import BLOCK_DIMS, ELEMENT_BYTES, KV_TILE, QUERY_TILE

UNIT_BYTES = 16


def visible_tokens(row: Any, query_tokens: Any, kv_tokens: Any, causal: bool) -> Any:
    """KV tokens that a query token of a request sees: all up to its own, the last query token all of them."""
    return kv_tokens - query_tokens + 1 + row if causal else kv_tokens


def tiles_upto(tokens: Any) -> Any:
    """KV tiles that hold the first `tokens` tokens; there may be none."""
    return (tokens + KV_TILE - 1) // KV_TILE


def probability_offset(row: Any, unit: Any) -> Any:
    """Byte of a 16-byte unit of a row of probabilities: blocks of [rows][64 tokens], the K-major operand of the output."""
    per_row = BLOCK_DIMS * ELEMENT_BYTES // UNIT_BYTES
    block = unit // per_row * (QUERY_TILE * SWIZZLE_ROW_BYTES)
    return block + swizzled(row * SWIZZLE_ROW_BYTES + unit % per_row * UNIT_BYTES, SWIZZLE_ROW_BYTES)
