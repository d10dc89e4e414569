# SPDX-License-Identifier: Apache-2.0
"""What torch's generator on a CUDA GPU draws, calculated on the host: Philox 4x32-10 and how torch deals its words to threads.

Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). Checked with torch 2.11 on an H200.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK_THREADS = 256
Words = npt.NDArray[np.uint64]
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(counter: tuple[Any, Any, Any, Any], seed: int) -> tuple[Words, Words, Words, Words]:
    """Four words of 32 bits per counter; `counter` is of four words, each a number or an array."""
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (second >> _HALF) ^ c1 ^ np.uint64(key[0]), second & _LOW
        c2, c3 = (first >> _HALF) ^ c3 ^ np.uint64(key[1]), first & _LOW
        key = [(word + step) & 0xFFFFFFFF for word, step in zip(key, _KEY_STEPS, strict=True)]
    return c0, c1, c2, c3


class CudaGenerator:
    """`torch.Generator("cuda")` with a seed, for the calls below; they advance it as torch's do."""

    def __init__(self, seed: int, multiprocessors: int, blocks_per_multiprocessor: int = 8) -> None:
        self.seed = seed
        self.offset = 0
        self._max_blocks = multiprocessors * blocks_per_multiprocessor

    def randn(self, count: int) -> npt.NDArray[np.float32]:
        """`torch.randn` of so many float32 values."""
        threads = self._threads(count)
        steps = -(-count // (4 * threads))
        values = np.empty((steps, 4, threads), np.float32)
        for step in range(steps):
            words = self._words(threads, step)
            values[step] = (*_normal_pair(*words[:2]), *_normal_pair(*words[2:]))
        self.offset += 4 * steps
        return values.reshape(-1)[:count]

    def randperm(self, count: int) -> npt.NDArray[np.int64]:
        """`torch.randperm`: the order of random keys.

        Raises:
            ValueError: keys are equal, which torch settles with more random numbers.
        """
        bits = int(np.ceil(np.log2(count - (6 * count * count + 1) / (12 * np.log(0.9)))))
        words = self._words(self._threads(count), 0)
        drawn = [(high << _HALF | low) % _LOW for high, low in (words[:2], words[2:])]
        keys = (np.concatenate(drawn)[:count] + np.uint64(2**31)) & np.uint64(2**bits - 1)
        if len(np.unique(keys)) < count:
            raise ValueError(f"randperm({count}) with seed {self.seed}: equal keys, allowed: different ones")
        self.offset += 4 + -(-count // 4) * 4
        return np.argsort(keys)

    def _threads(self, count: int) -> int:
        return BLOCK_THREADS * min(self._max_blocks, -(-count // BLOCK_THREADS))

    def _words(self, threads: int, step: int) -> tuple[Words, Words, Words, Words]:
        return philox((self.offset // 4 + step, 0, np.arange(threads), 0), self.seed)


def _normal_pair(first: Words, second: Words) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Box and Muller's transform, in float32."""
    unit, turn = np.float32(2.3283064e-10), np.float32(2.3283064e-10 * 6.2831855)
    radius = np.sqrt(np.float32(-2) * np.log(first.astype(np.float32) * unit + unit / 2))
    angle = second.astype(np.float32) * turn + turn / 2
    return np.sin(angle) * radius, np.cos(angle) * radius
