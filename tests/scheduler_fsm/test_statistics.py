# SPDX-License-Identifier: Apache-2.0
"""Statistics have vLLM's names and vLLM's meaning: the same traffic gives the same numbers under both schedulers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from exact.timeline import Timeline
from exact.workload import words
from scheduler_knobs import Group, Knobs
from vllm.v1.metrics.stats import PrefillStats, PrefixCacheStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats
from vllm.v1.utils import compute_iteration_details

pytestmark = pytest.mark.host_matrix
BOTH = ("vllm", "tokenspeed")

CORE = "filled by the scheduler"
CONNECTOR = "filled with KV or encoder-cache connectors only"
ENGINE = "filled by EngineCore"
FRONT_END = "filled by vLLM's front end, from events"
SOURCES = {
    "num_running_reqs": CORE,
    "num_waiting_reqs": CORE,
    "num_skipped_waiting_reqs": CORE,
    "num_kv_fetch_reqs_by_stage": CONNECTOR,
    "step_counter": ENGINE,
    "current_wave": ENGINE,
    "kv_cache_usage": CORE,
    "iteration_details": ENGINE,
    "prefix_cache_stats": CORE,
    "connector_prefix_cache_stats": CONNECTOR,
    "kv_cache_eviction_events": CORE,
    "spec_decoding_stats": CORE,
    "kv_connector_stats": CONNECTOR,
    "ec_connector_stats": CONNECTOR,
    "waiting_lora_adapters": FRONT_END,
    "running_lora_adapters": FRONT_END,
    "cudagraph_stats": CORE,
    "perf_stats": CORE,
}


class Recorded(Timeline):
    """Keeps every report and every output."""

    def __init__(self, scheduler: str, knobs: Knobs) -> None:
        self.reports: list[Any] = []
        self.outputs: list[Any] = []
        super().__init__(scheduler, knobs)

    def _note_outputs(self, outputs: Any) -> Any:
        for batch in outputs.values():
            self.outputs.extend(batch.outputs)
            if batch.scheduler_stats is not None:
                self.reports.append(batch.scheduler_stats)
        return super()._note_outputs(outputs)

    def total(self, name: str, kind: type) -> dict[str, Any]:
        """A part of all reports, added up field by field."""
        parts = [part for report in self.reports if (part := getattr(report, name)) is not None]
        sums: dict[str, Any] = {}
        for field in dataclasses.fields(kind):
            values = [getattr(part, field.name) for part in parts]
            if values and isinstance(values[0], list):
                sums[field.name] = [sum(column) for column in zip(*values, strict=True)]
            elif values and isinstance(values[0], int):
                sums[field.name] = sum(values)
        return sums


def conversation(scheduler: str, **knobs: Any) -> Recorded:
    """Three turns of one conversation, one after the other, in a pool that holds them."""
    run = Recorded(scheduler, Knobs(**({"groups": (Group(4),), "num_blocks": 60} | knobs)))
    prompt = words(3, 21)
    for turn in range(3):
        arrival = run.submit(f"turn{turn}", prompt, 9)
        run.finish()
        prompt = prompt + list(arrival.answer(512).tokens) + words(10 + turn, 6)
    return run


def test_every_field_has_a_known_source() -> None:
    assert set(SOURCES) == {field.name for field in dataclasses.fields(SchedulerStats)}


@pytest.mark.parametrize("knobs", [{}, {"groups": (Group(8), Group(8, 16))}, {"prefix_caching": False}])
def test_prefix_cache_and_prefill_statistics_are_those_of_vllm(knobs: dict[str, Any]) -> None:
    stock, ours = (conversation(scheduler, **knobs) for scheduler in BOTH)
    assert ours.total("prefix_cache_stats", PrefixCacheStats) == stock.total("prefix_cache_stats", PrefixCacheStats)
    prefills = [[dataclasses.asdict(o.prefill_stats) for o in run.outputs if o.prefill_stats] for run in (stock, ours)]
    assert set(prefills[0][0]) == {field.name for field in dataclasses.fields(PrefillStats)}
    assert prefills[1] == prefills[0]


def test_request_and_memory_gauges_are_those_of_vllm() -> None:
    stock, ours = (conversation(scheduler) for scheduler in BOTH)
    names = ("num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs", "kv_cache_usage")
    gauges = [[[round(getattr(report, name), 9) for name in names] for report in run.reports] for run in (stock, ours)]
    assert gauges[1] == gauges[0]


def test_speculation_statistics_are_those_of_vllm() -> None:
    stock, ours = (conversation(scheduler, num_spec_tokens=3) for scheduler in BOTH)
    totals = [run.total("spec_decoding_stats", SpecDecodingStats) for run in (stock, ours)]
    totals = [{key: value for key, value in total.items() if key != "num_spec_tokens"} for total in totals]
    assert totals[0]["num_accepted_tokens"] > 0
    assert totals[1] == totals[0]


@pytest.mark.parametrize("level", ["summary", "detailed"])
def test_speculation_metrics_of_a_request_come_with_its_last_output(level: str) -> None:
    knobs = {"num_spec_tokens": 3, "observability": {"per_request_spec_decode_metrics": level}}
    stock, ours = (conversation(scheduler, **knobs) for scheduler in BOTH)
    metrics = [[output.spec_decode_metrics for output in run.outputs] for run in (stock, ours)]
    assert sum(metrics[0][-1].histogram) > 0
    assert metrics[1] == metrics[0]
    assert bool(metrics[1][-1].per_step_accepted) == (level == "detailed")


def test_what_nobody_asked_for_is_not_there() -> None:
    run = conversation("tokenspeed", num_spec_tokens=3)
    assert all(output.spec_decode_metrics is None for output in run.outputs)
    assert all(report.kv_cache_eviction_events == [] and report.perf_stats is None for report in run.reports)


def lives(scheduler: str) -> list[Any]:
    """Prompts that fill the pool, one of them three times in a row."""
    knobs = Knobs(
        groups=(Group(4),), num_blocks=8, observability={"kv_cache_metrics": True, "kv_cache_metrics_sample": 1.0}
    )
    run = Recorded(scheduler, knobs)
    for number, stream in enumerate([1, 1, 1, 2, 3]):
        run.submit(f"r{number}", words(stream, 32), 1)
        run.finish()
    return [event for report in run.reports for event in report.kv_cache_eviction_events]


def test_lives_of_blocks_are_those_of_vllm() -> None:
    stock, ours = (lives(scheduler) for scheduler in BOTH)
    assert sorted(len(life.reuse_gaps_seconds) for life in ours) == sorted(
        len(life.reuse_gaps_seconds) for life in stock
    )
    assert max(len(life.reuse_gaps_seconds) for life in ours) == 1
    assert all(type(life) is type(stock[0]) for life in ours)
    for life in ours:
        assert life.lifetime_seconds >= life.idle_seconds >= 0
        assert sum(life.reuse_gaps_seconds) <= life.lifetime_seconds


def test_flops_are_estimated_from_our_plans_as_from_those_of_vllm() -> None:
    stock, ours = (conversation(scheduler, observability={"enable_mfu_metrics": True}) for scheduler in BOTH)
    figures = [[dataclasses.asdict(report.perf_stats) for report in run.reports] for run in (stock, ours)]
    for steps in figures:
        for step in steps:
            step.pop("debug_stats", None)
    assert figures[1][0]["num_flops_per_gpu"] > 0
    assert figures[1] == figures[0]


def test_iterations_are_counted_from_our_plans_as_from_those_of_vllm() -> None:
    details = {"observability": {"enable_logging_iteration_details": True}}
    stock, ours = (conversation(scheduler, **details) for scheduler in BOTH)
    counts = [[compute_iteration_details(plan) for plan in run.plans] for run in (stock, ours)]
    assert counts[1] == counts[0]
