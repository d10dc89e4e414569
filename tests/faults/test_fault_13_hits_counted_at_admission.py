# SPDX-License-Identifier: Apache-2.0
"""Fault 13 (vllm #43736, #25780): hits are counted at each lookup, and recomputation counts as hits."""

from __future__ import annotations

from typing import Any

import pytest
from exact.relaxed import relaxed
from exact.timeline import Timeline
from exact.workload import words
from hypothesis import given
from hypothesis import strategies as st
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix


class CountingTimeline(Timeline):
    """Adds up the prefix cache statistics that the scheduler hands out."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.cache_counts: dict[str, int] = {}

    def _note_outputs(self, outputs: Any) -> Any:
        for batch in outputs.values():
            if batch.scheduler_stats is not None:
                for name in (
                    "requests",
                    "queries",
                    "hits",
                    "preempted_requests",
                    "preempted_queries",
                    "preempted_hits",
                ):
                    value = getattr(batch.scheduler_stats.prefix_cache_stats, name)
                    self.cache_counts[name] = self.cache_counts.get(name, 0) + value
        return super()._note_outputs(outputs)


@pytest.mark.parametrize(("runner", "depth"), [("v1", 1), ("v1", 2), ("v2", 1), ("v2", 2)])
def test_a_request_that_waits_counts_once(scheduler: str, runner: str, depth: int) -> None:
    knobs = Knobs(groups=(Group(4),), num_blocks=11, budget_tokens=64, runner=runner, pipeline_depth=depth)
    run = CountingTimeline(scheduler, knobs)
    shared = words(1, 12)
    run.submit("r0", shared + words(2, 1), 24)
    run.ticks(3)
    run.submit("r2", shared + words(3, 29), 2)
    run.ticks(10)
    assert "r2" not in run.computed, "r2 waits for memory"
    run.finish()
    assert run.cached["r2"] == 12
    assert run.cache_counts["requests"] == 2
    assert run.cache_counts["queries"] == 13 + 41
    assert run.cache_counts["hits"] == 12
    assert run.cache_counts["preempted_requests"] == 0


@pytest.mark.parametrize(("runner", "depth"), [("v1", 1), ("v1", 2), ("v2", 1), ("v2", 2)])
def test_recomputation_has_its_own_counter(scheduler: str, runner: str, depth: int) -> None:
    knobs = Knobs(groups=(Group(4),), num_blocks=12, budget_tokens=64, runner=runner, pipeline_depth=depth)
    run = CountingTimeline(scheduler, knobs)
    run.submit("r1", 17, 14)
    run.submit("r3", 13, 14)
    run.finish()
    num_preempted = sum(run.preempted.values())
    assert num_preempted > 0
    assert run.cache_counts["requests"] == 2
    assert run.cache_counts["queries"] == 17 + 13
    assert run.cache_counts["hits"] == 0
    assert run.cache_counts["preempted_requests"] == num_preempted


@relaxed
@given(
    prompts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=8),
    num_blocks=st.integers(11, 30),
    gap=st.integers(0, 4),
)
def test_each_request_is_counted_once_whatever_it_goes_through(
    scheduler: str, prompts: list[tuple[int, int, int]], num_blocks: int, gap: int
) -> None:
    run = CountingTimeline(scheduler, Knobs(groups=(Group(4),), num_blocks=num_blocks, budget_tokens=64))
    for number, (stream, length, output) in enumerate(prompts):
        run.submit(f"r{number}", words(stream, length), output)
        run.ticks(gap)
    run.finish()
    assert run.cache_counts["requests"] == len(prompts)
    assert run.cache_counts["queries"] == sum(length for _, length, _ in prompts)
    assert run.cache_counts["hits"] <= run.cache_counts["queries"]
    assert run.cache_counts["preempted_requests"] == sum(run.preempted.values())
    if not run.preempted:
        assert run.cache_counts["hits"] == sum(run.cached.values())
