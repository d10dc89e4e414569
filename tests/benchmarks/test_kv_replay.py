# SPDX-License-Identifier: Apache-2.0
"""The replay benchmark counts what it says: small traces whose figures can be worked out another way."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import random

import numpy as np
import pytest

from benchmarks.kv_replay import cells_of
from benchmarks.kvreplay import systems
from benchmarks.kvreplay.bars import Cell, all_bars, gap_closed
from benchmarks.kvreplay.optimum import Optimum
from benchmarks.kvreplay.trace import Trace, Turn, coding_agent, mooncake
from tokenspeed_plugin.scheduler_fsm import _core


def trace_of(prompts: list[list[int]], sessions: list[int] | None = None) -> Trace:
    """A request a second; equal leading numbers are equal prefixes."""
    numbers: dict[tuple[int, ...], int] = {}
    seen: set[int] = set()
    turns = []
    sessions = sessions or [-1] * len(prompts)
    for second, (prompt, session) in enumerate(zip(prompts, sessions, strict=True)):
        blocks = [numbers.setdefault(tuple(prompt[: end + 1]), len(numbers)) for end in range(len(prompt))]
        later = [other for other in range(second + 1, len(prompts)) if sessions[other] == session >= 0]
        turns.append(
            Turn(
                arrival_s=float(second),
                session=session,
                blocks=np.array(blocks, dtype=np.int32),
                num_prompt_tokens=len(prompt) * 128,
                num_output_tokens=10,
                return_in_s=float(later[0] - second) if later else math.inf,
                num_seen=len(seen & set(blocks)),
            )
        )
        seen |= set(blocks)
    return Trace("made-up", 128, len(numbers), turns)


def random_trace(seed: int) -> Trace:
    chance = random.Random(seed)
    histories = [[chance.randrange(2)] for _ in range(4)]
    prompts, sessions = [], []
    for _ in range(30):
        session = chance.randrange(4)
        history = histories[session]
        if chance.random() < 0.2:
            del history[chance.randrange(1, len(history) + 1) :]
        history += [chance.randrange(1000) for _ in range(chance.randrange(1, 3))]
        del history[7:]
        prompts.append(list(history))
        sessions.append(session)
    return trace_of(prompts, sessions)


def exhaustive_optimum(trace: Trace, capacity: int) -> int:
    """Fewest recomputed blocks over every choice of what to keep after each request."""
    best = {frozenset(): 0}
    for turn in trace.turns:
        needed = turn.blocks.tolist()
        after: dict[frozenset[int], int] = {}
        for cached, cost in best.items():
            hits = sum(1 for _ in itertools.takewhile(cached.__contains__, needed))
            total = cost + turn.num_seen - hits
            others = cached - set(needed)
            room = capacity - len(needed)
            for kept in itertools.combinations(sorted(others), min(room, len(others))):
                state = frozenset(kept) | frozenset(needed)
                after[state] = min(total, after.get(state, total))
        best = after
    return min(best.values())


def test_the_optimum_is_what_trying_everything_finds() -> None:
    for seed in range(12):
        chance = random.Random(seed)
        prompts = [[chance.randrange(2) for _ in range(chance.randrange(1, 4))] for _ in range(9)]
        trace = trace_of(prompts)
        for capacity in (3, 4, 6):
            assert Optimum(trace).num_recomputed_blocks(capacity) == exhaustive_optimum(trace, capacity)


@pytest.mark.parametrize("seed", range(5))
def test_nobody_beats_the_optimum_and_lru_is_what_vllm_does(seed: int) -> None:
    trace = random_trace(seed)
    for cell in cells_of(trace, seed, (0.3, 0.5, 1.0), with_stock=True):
        figures = cell.num_recomputed
        assert figures["stock"] == figures["lru"]
        assert min(figures.values()) == figures["belady"]
        if cell.pool_share == 1.0:
            assert set(figures.values()) == {0}


def test_hints_say_who_returns() -> None:
    # Three sessions take turns; the pool holds two of them, and only one of them ever comes back.
    prompts = [[1, 2], [3, 4], [5, 6], [1, 2, 7]]
    trace = trace_of(prompts, [0, 1, 2, 0])
    prompts_ready = systems.prepared(trace)

    def run(eviction, hinter=systems.no_hints):
        return systems.flat_recomputed(trace, prompts_ready, 4, eviction, hinter)

    assert run(_core.EvictionSpec(name="lru")) == 2
    assert run(_core.EvictionSpec(), systems.perfect_hints) == 0


def test_traces_are_read_block_by_block(tmp_path) -> None:
    folder = tmp_path / "coding-agent"
    folder.mkdir()
    requests = [
        {"t": 0.0, "in": 300, "out": 5, "hash_ids": [1, 2, 3, 4, 5]},
        {"t": 9.0, "in": 320, "out": 6, "hash_ids": [1, 2, 3, 6, 7]},
    ]
    (folder / "a.json.gz").write_bytes(gzip.compress(json.dumps({"requests": requests}).encode()))
    trace = coding_agent(tmp_path, 128, seed=1)
    first, second = trace.turns
    assert (first.blocks.tolist(), second.blocks.tolist()) == ([0, 1], [0, 2])
    assert (first.return_in_s, second.return_in_s) == (9.0, math.inf)
    assert (second.num_seen, second.num_prompt_tokens, second.num_output_tokens) == (1, 320, 6)
    with pytest.raises(ValueError, match="block_tokens is 96; the coding-agent traces allow multiples of 64"):
        coding_agent(tmp_path, 96, seed=1)

    rows = [{"timestamp": 500, "input_length": 1100, "output_length": 7, "hash_ids": [0, 4, 5]}]
    (tmp_path / "mooncake_synthetic_trace.jsonl.gz").write_bytes(gzip.compress(json.dumps(rows[0]).encode()))
    (turn,) = mooncake(tmp_path, "synthetic").turns
    assert (turn.arrival_s, turn.session, turn.blocks.tolist()) == (0.5, -1, [0, 1])


def cell(trace: str, share: float, **num_recomputed: int) -> Cell:
    return Cell(trace, 1, share, dict(num_recomputed))


def test_bars_are_missed_by_figures_that_miss_them() -> None:
    def met(factor: float, closed: float) -> dict[str, bool]:
        cells = [
            cell(
                "coding-agent",
                share,
                lru=1000,
                belady=0,
                ours=int(1000 * (1 - closed)),
                ours_hints=int(1000 * (1 - closed)),
            )
            for share in (0.10, 0.25, 0.50)
        ]
        cells += [
            cell(f"mooncake-{kind}", 0.1, lru=1000, belady=0, ours=int(1000 * factor))
            for kind in ("synthetic", "conversation")
        ]
        return {bar.claim: bar.judge().met for bar in all_bars(cells)}

    assert all(met(1.0, 0.6).values())
    assert not any(met(1.02, -0.03).values())
    assert not any(bar.judge().met for bar in all_bars([]))


def test_the_gap_is_closed_by_all_seeds_together() -> None:
    cells = [cell("t", 0.1, lru=100, belady=0, ours=50), cell("t", 0.1, lru=300, belady=100, ours=300)]
    assert gap_closed(cells, "ours") == pytest.approx(50 / 300)
