# SPDX-License-Identifier: Apache-2.0
"""Ours and vLLM's KV cache in one process, by turns: both full of cached blocks, both asked the same."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from benchmarks.kvreplay.systems import kv_config
from tokenspeed_plugin.scheduler_fsm import _core

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


def _prompt(number: int, block_tokens: int) -> _core.PreparedPrompt:
    tokens = [(position * 7919 + number * 104729) % 50_000 for position in range(MATCH_TOKENS)]
    return _core.prepare_prompt(tokens=tokens, key_tokens=block_tokens)


def costs(block_tokens: int, reps: int) -> dict[str, float]:
    """Thread CPU time in microseconds, medians, and bytes; vLLM's with the prefix `stock_`.

    Args:
        block_tokens: tokens in a block.
        reps: how often each is timed.

    Returns:
        `match_us` (a cached prompt of 100K tokens), `cycle_us` (1,000 blocks taken, each out of cached content, and given back),
        `bytes_per_block` (ours as the core counts its tables; vLLM's as Python allocates, without the interpreter's own overhead).
    """
    ours, first = _filled(block_tokens)
    stock = _StockManager(first.keys, block_tokens)
    figures = {"bytes_per_block": ours.bytes_per_block, "stock_bytes_per_block": stock.bytes_per_block}
    for _ in range(2):  # the first round warms up
        figures["match_us"] = _median_us(lambda: ours.probe(first), reps)
        figures["stock_match_us"] = _median_us(stock.match, max(5, reps // 10))
        figures["cycle_us"] = _median_us(lambda: ours.cycle(CYCLE_BLOCKS * block_tokens), reps)
        figures["stock_cycle_us"] = _median_us(stock.cycle, reps)
    if ours.probe(first) != MATCH_TOKENS // block_tokens * block_tokens:
        msg = "the prompt that is matched is not cached as a whole"
        raise RuntimeError(msg)
    return figures


def _filled(block_tokens: int) -> tuple[_core.KvReplay, _core.PreparedPrompt]:
    """A pool full of cached blocks, and the prompt that is matched; cycles evict others before it."""
    num_blocks = _FILL_PROMPTS * (MATCH_TOKENS // block_tokens)
    replay = _core.KvReplay(config=kv_config(num_blocks + 1, block_tokens, _core.EvictionSpec()))
    first = _prompt(0, block_tokens)
    for number in range(_FILL_PROMPTS, -1, -1):
        prompt = first if number == 0 else _prompt(number, block_tokens)
        replay.serve(prompt, _core.Departure(num_prompt_tokens=MATCH_TOKENS, num_output_tokens=200))
    return replay, first


class _StockManager:
    """vLLM's KV cache manager, its block pool full of cached blocks."""

    def __init__(self, hashes: list[bytes], block_tokens: int) -> None:
        self._hashes = hashes
        num_blocks = _FILL_PROMPTS * len(hashes)
        keys = [[b"%d" % number + key[2:] for key in hashes] for number in range(10, 9 + _FILL_PROMPTS)]
        _stock_manager(2, block_tokens)  # imports what it needs
        tracemalloc.start()
        self._manager = _stock_manager(num_blocks + 1, block_tokens)
        self._pool = self._manager.block_pool
        for number in range(_FILL_PROMPTS):
            prompt = keys[number] if number < len(keys) else hashes
            blocks = self._pool.get_new_blocks(len(prompt))
            self._pool.cache_full_blocks(SimpleNamespace(block_hashes=prompt), blocks, 0, len(prompt), block_tokens, 0)
            self._pool.free_blocks(reversed(blocks))
        del blocks
        self.bytes_per_block = tracemalloc.get_traced_memory()[0] / num_blocks
        tracemalloc.stop()
        # One more token, because the last one is never matched.
        self._request = SimpleNamespace(
            request_id="prompt",
            num_tokens=len(hashes) * block_tokens + 1,
            block_hashes=hashes,
            skip_reading_prefix_cache=False,
            num_preemptions=0,
        )
        if self.match() != len(hashes) * block_tokens:
            msg = "vLLM's manager does not find the cached prompt"
            raise RuntimeError(msg)

    def match(self) -> int:
        return int(self._manager.get_computed_blocks(self._request)[1])

    def cycle(self) -> None:
        self._pool.free_blocks(reversed(self._pool.get_new_blocks(CYCLE_BLOCKS)))


def _stock_manager(num_blocks: int, block_tokens: int) -> Any:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=64, dtype=torch.float16)
    config = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return KVCacheManager(
        config,
        max_model_len=2 * MATCH_TOKENS,
        scheduler_block_size=block_tokens,
        hash_block_size=block_tokens,
    )
