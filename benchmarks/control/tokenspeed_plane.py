# SPDX-License-Identifier: Apache-2.0
"""Plane: tokenspeed-scheduler 0.1.42, driven through its own Python binding."""

from __future__ import annotations

import importlib
import os
from typing import Any

from benchmarks.control.driver import PlannedStep, Scheduled, UpdateCost
from benchmarks.control.steps import clock_from_environment

os.environ.setdefault("SPDLOG_LEVEL", "off")

ts: Any = importlib.import_module("tokenspeed_scheduler")  # reads SPDLOG_LEVEL once, when it is loaded
_clock_ns = clock_from_environment()


def _scheduler(block_tokens: int, num_blocks: int, max_requests: int, budget_tokens: int) -> Any:
    config = ts.SchedulerConfig()
    config.prefix_granularity = block_tokens
    config.max_scheduled_tokens = budget_tokens
    config.max_batch_size = max_requests
    config.num_device_pages = num_blocks + 1  # page 0 is the null page
    config.num_host_pages = 0
    config.disable_l2_cache = True
    config.disable_prefix_cache = False
    config.enable_l3_storage = False
    config.enable_mixed_prefill_decode = True
    config.decode_input_tokens = 1
    config.overlap_schedule_depth = 0
    config.num_snapshot_pages = 1  # never retracts: it reserves prompt + max_new_tokens at admission
    config.max_retracted_requests = 0
    config.cache_groups = [
        ts.CacheGroupConfig(
            group_id="full",
            block_granularity=block_tokens,
            total_pages=config.num_device_pages,
            attn_kind=ts.AttnKind.Full,
        )
    ]
    return ts.Scheduler(config)


class TokenSpeedPlane:
    """Times plan, the reading of what a runtime needs, the building of events, and advance."""

    name = "tokenspeed-scheduler-0.1.42"
    depth = 1
    num_preemptions = 0

    def __init__(self, *, block_tokens: int, num_blocks: int, max_requests: int, budget_tokens: int) -> None:
        self._scheduler = _scheduler(block_tokens, num_blocks, max_requests, budget_tokens)
        self._planned_before: set[str] = set()
        self._unfinished_chunks: list[str] = []

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> int:
        """Submit a request; return the nanoseconds taken."""
        start = _clock_ns()
        spec = ts.RequestSpec()
        spec.request_id = request_id
        spec.tokens = prompt
        spec.max_new_tokens = max_tokens
        self._scheduler.submit_requests([spec])
        return _clock_ns() - start

    def plan(self) -> PlannedStep:
        """Plan a step and read from it what a runtime needs: ids, lengths, slots, tables, pages to zero."""
        start = _clock_ns()
        plan = self._scheduler.next_execution_plan()
        planned = _clock_ns()
        forward = plan.forward
        operation = forward[0] if forward else None
        if operation is not None:
            request_ids = operation.request_ids
            lengths = operation.input_lengths
            num_extends = operation.num_extends()
            _ = operation.request_pool_indices, operation.block_tables_arrays(), plan.pages_to_zero
            targets, prefixes = operation.prefill_lengths, operation.extend_prefix_lens
            _ = operation.input_ids if num_extends else None
        extracted = _clock_ns()
        if plan.aborts:
            raise RuntimeError(f"{self.name} aborted {[abort.request_id for abort in plan.aborts]}")
        scheduled: list[Scheduled] = []
        num_prefill = 0
        if operation is not None:
            for index, request_id in enumerate(request_ids):
                length, emits, cached = lengths[index], True, -1
                if index < num_extends:
                    emits = prefixes[index] + length >= targets[index]
                    cached = -1 if request_id in self._planned_before else prefixes[index]
                    self._planned_before.add(request_id)
                    num_prefill += length
                scheduled.append(Scheduled(request_id, length, emits, cached))
        self._unfinished_chunks = [item.request_id for item in scheduled if not item.emits]
        return PlannedStep(scheduled, num_prefill, planned - start, extracted - planned)

    def update(self, emitted: dict[str, int], finished: list[str]) -> UpdateCost:
        """Build the step's events and advance; an unfinished chunk needs an empty result, or pages leak."""
        last = set(finished)
        extend_result, finish = ts.ForwardEvent.ExtendResult, ts.ForwardEvent.Finish
        start = _clock_ns()
        events = ts.ExecutionEvent()
        for request_id in self._unfinished_chunks:
            event = extend_result()
            event.request_id = request_id
            event.tokens = []
            events.add_event(event)
        for request_id, token in emitted.items():
            event = extend_result()
            event.request_id = request_id
            event.tokens = [token]
            events.add_event(event)
            if request_id in last:
                end = finish()
                end.request_id = request_id
                events.add_event(end)
        built = _clock_ns()
        self._scheduler.advance(events)
        advanced = _clock_ns()
        self._planned_before -= last
        return UpdateCost(built - start, advanced - built)
