# SPDX-License-Identifier: Apache-2.0
"""What the pool's operations cost: ours and vLLM's block pool in one process, by turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

from benchmarks.kvreplay.systems import kv_config
from tokenspeed_plugin.scheduler_fsm import _core

POOL_BLOCKS = 200_000
MATCH_TOKENS = 100_000
CYCLE_BLOCKS = 1000
_FILL_PROMPTS = 20


def _median_us(action: Callable[[], object], reps: int) -> float:
    times = []
    for _ in range(reps):
        start = time.thread_time_ns()
        action()
        times.append((time.thread_time_ns() - start) / 1000.0)
    return statistics.median(times)


def _prompt(number: int, num_tokens: int, block_tokens: int) -> _core.PreparedPrompt:
    tokens = [(position * 7919 + number * 104729) % 50_000 for position in range(num_tokens)]
    return _core.prepare_prompt(tokens=tokens, key_tokens=block_tokens)


def costs(block_tokens: int, reps: int) -> dict[str, float]:
    """Thread CPU time in microseconds, medians, and bytes.

    Args:
        block_tokens: tokens in a block.
        reps: how often each is timed.

    Returns:
        `match_us` (a cached prompt of 100K tokens), `cycle_us` (1,000 blocks taken, each out of cached content, and given back),
        `bytes_per_block`; and with the prefix `stock_` the two times for vLLM.
    """
    ours, first = _filled(block_tokens)
    stock = _StockPool(first.keys)
    figures = {"bytes_per_block": ours.bytes_per_block}
    for _ in range(2):  # the first round warms up
        figures["match_us"] = _median_us(lambda: ours.probe(first), reps)
        figures["stock_match_us"] = _median_us(stock.match, reps)
        figures["cycle_us"] = _median_us(lambda: ours.cycle(CYCLE_BLOCKS * block_tokens), reps)
        figures["stock_cycle_us"] = _median_us(stock.cycle, reps)
    return figures


def _filled(block_tokens: int) -> tuple[_core.KvReplay, _core.PreparedPrompt]:
    """A pool full of cached blocks, and the prompt that was used last."""
    num_blocks = _FILL_PROMPTS * (MATCH_TOKENS // block_tokens)
    replay = _core.KvReplay(config=kv_config(num_blocks + 1, block_tokens, _core.EvictionSpec()))
    first = _prompt(0, MATCH_TOKENS, block_tokens)
    for number in range(_FILL_PROMPTS, -1, -1):
        prompt = first if number == 0 else _prompt(number, MATCH_TOKENS, block_tokens)
        replay.serve(prompt, _core.Departure(num_prompt_tokens=MATCH_TOKENS, num_output_tokens=200))
    return replay, first


class _StockPool:
    """vLLM's block pool, full of cached blocks."""

    def __init__(self, hashes: list[bytes]) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self._hashes = hashes
        num_blocks = _FILL_PROMPTS * len(hashes)
        self._pool = BlockPool(num_blocks + 1, True, 1)
        for number in range(_FILL_PROMPTS):
            keys = hashes if number == _FILL_PROMPTS - 1 else [b"%d" % number + key for key in hashes]
            blocks = self._pool.get_new_blocks(len(keys))
            self._pool.cache_full_blocks(SimpleNamespace(block_hashes=keys), blocks, 0, len(keys), 1, 0)
            self._pool.free_blocks(reversed(blocks))

    def match(self) -> int:
        num_hits = 0
        for block_hash in self._hashes:
            if self._pool.get_cached_block(block_hash, [0]) is None:
                break
            num_hits += 1
        return num_hits

    def cycle(self) -> None:
        self._pool.free_blocks(reversed(self._pool.get_new_blocks(CYCLE_BLOCKS)))
