# SPDX-License-Identifier: Apache-2.0
"""Token streams that any language can rebuild: a pure function of (stream, position).

``token = splitmix64((stream << 32) + position) % VOCABULARY_TOKENS + FIRST_TOKEN``
(splitmix64: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FIRST_TOKEN = 1000
VOCABULARY_TOKENS = 120_000

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


def splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return one splitmix64 output per state, element by element (uint64 in, uint64 out)."""
    with np.errstate(over="ignore"):
        mixed = state + _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_A
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_B
        return mixed ^ (mixed >> np.uint64(31))


def stream_tokens(stream: int, first: int, last: int) -> list[int]:
    """Return the tokens of `stream` at positions ``first <= position < last`` as Python ints."""
    base = np.uint64(stream) << np.uint64(32)
    values = splitmix64(base + np.arange(first, last, dtype=np.uint64))
    tokens = (values % np.uint64(VOCABULARY_TOKENS)).astype(np.int64) + FIRST_TOKEN
    result: list[int] = tokens.tolist()
    return result


def mixed_hash(*keys: int) -> int:
    """Fold non-negative integers into one 64-bit value; drives every random choice of a workload."""
    state = np.array([12345], dtype=np.uint64)
    for key in keys:
        state = splitmix64(state ^ np.uint64(key))
    return int(state[0])
