# SPDX-License-Identifier: Apache-2.0
"""Caches that a trace is replayed against: vLLM's block pool and the C++ one under its policies."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from benchmarks.kvreplay.trace import Trace, Turn
from tokenspeed_plugin.scheduler_fsm import _core

# A client's forecast of its return is off by a factor whose logarithm has this standard deviation: two thirds of the forecasts
# lie between 0.6 and 1.6 times the truth.
FORECAST_ERROR = 0.5
# One turn in ten comes without a hint, and one end in ten is not announced.
HINTED_SHARE = 0.9
HINT_SEED = 7

Hinter = Callable[[Turn], _core.SessionHints]


def no_hints(_: Turn) -> _core.SessionHints:
    """What a client says that says nothing, not even the name of its session."""
    return _core.SessionHints()


def perfect_hints(turn: Turn) -> _core.SessionHints:
    """When exactly the session's next request arrives, or that there is none."""
    if math.isinf(turn.return_in_s):
        return _core.SessionHints(session=str(turn.session), ends=True)
    return _core.SessionHints(session=str(turn.session), return_in_s=turn.return_in_s)


def agent_hints(seed: int = HINT_SEED) -> Hinter:
    """What an agent framework knows: a forecast with errors, most ends, and sometimes nothing but the session's name."""
    chance = random.Random(seed)

    def hints(turn: Turn) -> _core.SessionHints:
        session = str(turn.session)
        factor = math.exp(chance.gauss(0.0, FORECAST_ERROR))
        if chance.random() >= HINTED_SHARE:
            return _core.SessionHints(session=session)
        if math.isinf(turn.return_in_s):
            return _core.SessionHints(session=session, ends=True)
        return _core.SessionHints(session=session, return_in_s=turn.return_in_s * factor)

    return hints


def prepared(trace: Trace) -> list[_core.PreparedPrompt]:
    """The trace's prompts, keyed. A block counts as one token, whose id is the block's number: the C++ objects cannot tell."""
    return [_core.prepare_prompt(tokens=turn.blocks.tolist(), key_tokens=1) for turn in trace.turns]


def kv_config(num_blocks: int, block_tokens: int, eviction: _core.EvictionSpec) -> _core.KvConfig:
    """One group of full attention."""
    config = _core.KvConfig()
    config.num_blocks = num_blocks
    config.key_tokens = block_tokens
    config.eviction = eviction
    config.groups = [_core.GroupSpec(name="full", block_tokens=block_tokens, retention=_core.Retention.FULL)]
    return config


def flat_recomputed(
    trace: Trace,
    prompts: Sequence[_core.PreparedPrompt],
    capacity_blocks: int,
    eviction: _core.EvictionSpec,
    hinter: Hinter = no_hints,
) -> int:
    """Blocks computed again by the C++ manager; it is checked for integrity at the end."""
    replay = _core.KvReplay(config=kv_config(capacity_blocks + 1, 1, eviction))
    num_recomputed = 0
    for turn, prompt in zip(trace.turns, prompts, strict=True):
        hints = hinter(turn)
        if len(turn.blocks) == 0:
            continue
        replay.set_time(turn.arrival_s)
        departure = _core.Departure(
            num_prompt_tokens=turn.num_prompt_tokens, num_output_tokens=turn.num_output_tokens, hints=hints
        )
        num_recomputed += turn.num_seen - replay.serve(prompt, departure)
    replay.check_integrity()
    return num_recomputed


def stock_recomputed(trace: Trace, capacity_blocks: int) -> int:
    """Blocks computed again by vLLM's block pool, used as vLLM's manager of full attention uses it."""
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(capacity_blocks + 1, True, 1)
    num_recomputed = 0
    for turn in trace.turns:
        hashes = [number.to_bytes(32, "little") for number in turn.blocks.tolist()]
        blocks = []
        for block_hash in hashes:
            found = pool.get_cached_block(block_hash, [0])
            if found is None:
                break
            blocks += found
        num_hits = len(blocks)
        pool.touch(blocks)
        blocks += pool.get_new_blocks(len(hashes) - num_hits)
        pool.cache_full_blocks(SimpleNamespace(block_hashes=hashes), blocks, num_hits, len(hashes), 1, 0)
        pool.free_blocks(reversed(blocks))
        num_recomputed += turn.num_seen - num_hits
    return num_recomputed
