# SPDX-License-Identifier: Apache-2.0
"""Drives a scheduler and the exact worker the way EngineCore does, and compares every output with ground truth."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scheduler_harness import Harness, make_harness
from scheduler_knobs import Knobs
from vllm.v1.request import RequestStatus

from exact.drafter import Drafter
from exact.ledger import Ledger
from exact.memory import ExactError
from exact.reference import DEFAULT_VOCAB
from exact.runners import V1Runner, V2Runner
from exact.worker import ExactWorker, StepResult
from exact.workload import BEFORE_SCHEDULE, BEFORE_UPDATE, Arrival, Chunk, Workload

STALL_TICKS = 64


@dataclass
class Report:
    """What a run amounted to."""

    ticks: int = 0
    steps: int = 0
    tokens_computed: int = 0
    tokens_delivered: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    requests: int = 0
    aborted: int = 0
    scheduler_ns: int = 0


class Driver:
    """Runs one workload to its end.

    Args:
        harness: the scheduler under test.
        workload: what clients do.
        draft_right: probability that a drafted token is right.
        worker: a worker to use instead of the one the knobs name (fault injection).
        wrap_plan: called with each SchedulerOutput before the worker sees it (fault injection).
    """

    def __init__(
        self,
        harness: Harness,
        workload: Workload,
        *,
        draft_right: float = 0.7,
        record: bool = False,
        wrap_plan: Callable[[Any], Any] | None = None,
        wrap_outputs: Callable[[Any], Any] | None = None,
        vocab: int = DEFAULT_VOCAB,
    ) -> None:
        self.harness = harness
        self.scheduler = harness.scheduler
        self.knobs = harness.knobs
        self.workload = workload
        self.report = Report()
        self.ledger = Ledger(harness, self.report, vocab)
        drafter = None
        if self.knobs.num_spec_tokens:
            drafter = Drafter(workload.seed or 0, draft_right, self.knobs.num_spec_tokens)
        runner = V1Runner if self.knobs.runner == "v1" else V2Runner
        self.worker: ExactWorker = runner(harness, self.ledger.seed_of, self.ledger.is_session, drafter, vocab, record)
        self._wrap_plan = wrap_plan
        self._wrap_outputs = wrap_outputs
        self._queue: deque[tuple[Any, StepResult]] = deque()
        self._pending = deque(sorted((a for a in workload.arrivals if a.after is None), key=lambda a: a.tick))
        self._followers: dict[str, list[Arrival]] = {}
        for arrival in workload.arrivals:
            if arrival.after is not None:
                self._followers.setdefault(arrival.after, []).append(arrival)
        self._due: dict[int, list[Arrival]] = {}
        self._chunks: dict[int, list[tuple[str, Chunk]]] = {}
        self._aborts: dict[tuple[int, int], list[str]] = {}
        self._resets = {reset.tick: reset for reset in workload.resets}
        self._idle_ticks = 0

    # -- a run -------------------------------------------------------------------------------------------------------

    def run(self, max_ticks: int = 100_000) -> Report:
        """Ticks until every request has ended and the scheduler is empty; checks what is left behind."""
        while not self.done:
            self.tick()
            if self.report.ticks > max_ticks:
                raise ExactError("endless", f"not done after {max_ticks} ticks: {self.ledger.open_ids}")
        self.check_end()
        return self.report

    @property
    def done(self) -> bool:
        """Nothing left to arrive, to schedule or in flight."""
        waiting = self._pending or self._due or self._queue or self._chunks
        return not waiting and not self.scheduler.has_requests()

    def tick(self) -> int:
        """Client actions of this tick, then one engine iteration; returns the number of tokens scheduled."""
        tick = self.report.ticks
        self._client_actions(tick)
        num_tokens = self._iterate(tick)
        self.report.ticks += 1
        self._note_progress(num_tokens)
        return num_tokens

    def add(self, arrival: Arrival) -> None:
        """Adds a request now."""
        self.report.requests += 1
        request = self.ledger.open(arrival)
        if arrival.abort_tick is not None:
            key = (self.report.ticks + max(arrival.abort_tick, 0), arrival.abort_phase)
            self._aborts.setdefault(key, []).append(arrival.request_id)
        for chunk in arrival.chunks:
            self._chunks.setdefault(self.report.ticks + chunk.tick, []).append((arrival.request_id, chunk))
        self._timed(self.scheduler.add_request, request)

    def update_session(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        """The client of a resumable session sends another chunk."""
        self._timed(self.scheduler.add_request, self.ledger.update(request_id, prompt, max_tokens))

    def close_session(self, request_id: str) -> None:
        """The client of a session says that no more comes."""
        self._timed(self.scheduler.add_request, self.ledger.close(request_id))

    def abort(self, request_id: str) -> None:
        """The client of a request disconnects."""
        if self.ledger.abort(request_id):
            self.report.aborted += 1
        self._timed(self.scheduler.finish_requests, request_id, RequestStatus.FINISHED_ABORTED)
        self._start_followers([request_id])

    def check_end(self) -> None:
        """Every request ended, nothing leaked."""
        self.ledger.check_all_ended()
        if self.worker.rows:
            raise ExactError("leak", f"the worker was never told of the end of {sorted(self.worker.rows)}")
        check_idle(self.harness)

    # -- parts of a tick ---------------------------------------------------------------------------------------------

    def _client_actions(self, tick: int) -> None:
        while self._pending and self._pending[0].tick <= tick:
            self.add(self._pending.popleft())
        for arrival in self._due.pop(tick, ()):
            self.add(arrival)
        for request_id, chunk in self._chunks.pop(tick, ()):
            if self.ledger.accounts[request_id].outcome is not None:
                continue  # its client hung up
            if chunk.prompt:
                self.update_session(request_id, list(chunk.prompt), chunk.max_tokens)
            else:
                self.close_session(request_id)
        self._abort_due(tick, BEFORE_SCHEDULE)
        reset = self._resets.pop(tick, None)
        if reset is not None and reset.encoder:
            self._timed(self.scheduler.reset_encoder_cache)
            self.worker.encoder.reset()
        elif reset is not None:
            self._timed(self.scheduler.reset_prefix_cache, reset.reset_running)

    def _abort_due(self, tick: int, phase: int) -> None:
        for request_id in self._aborts.pop((tick, phase), ()):
            self.abort(request_id)

    def _iterate(self, tick: int) -> int:
        """EngineCore's `step` (depth 1) or `step_with_batch_queue`."""
        depth = self.knobs.pipeline_depth
        num_tokens = 0
        if self.scheduler.has_requests():
            num_tokens = self._schedule()
            if len(self._queue) < depth and (num_tokens or self.scheduler.has_requests()):
                self._abort_due(tick, BEFORE_UPDATE)
                return num_tokens
        self._abort_due(tick, BEFORE_UPDATE)
        if self._queue:
            self._update()
        return num_tokens

    def _schedule(self) -> int:
        plan = self._timed(self.scheduler.schedule)
        if self._wrap_plan is not None:
            plan = self._wrap_plan(plan)
        self.report.preemptions += len(plan.preempted_req_ids or ())
        result = self.worker.execute(plan)
        self.ledger.scheduled(plan)
        self._queue.append((plan, result))
        if result.num_tokens:
            self.report.steps += 1
            self.report.tokens_computed += result.num_tokens
        return result.num_tokens

    def _update(self) -> None:
        plan, result = self._queue.popleft()
        self.worker.settle(result)
        outputs = self._timed(self.scheduler.update_from_output, plan, result.output)
        if self._wrap_outputs is not None:
            outputs = self._wrap_outputs(outputs)
        self._start_followers(self.ledger.deliver(outputs))
        if not self.knobs.is_async:
            drafted = self.worker.take_draft_token_ids()
            if drafted is not None and result.num_tokens:
                self._timed(self.scheduler.update_draft_token_ids, drafted)

    def _start_followers(self, ended: list[str]) -> None:
        for request_id in ended:
            for arrival in self._followers.pop(request_id, ()):
                self._due.setdefault(self.report.ticks + 1 + arrival.tick, []).append(arrival)

    def _note_progress(self, num_tokens: int) -> None:
        busy = num_tokens or self._queue or not self.ledger.has_work
        self._idle_ticks = 0 if busy else self._idle_ticks + 1
        if self._idle_ticks > STALL_TICKS:
            raise ExactError("stalled", f"{STALL_TICKS} ticks without a token, open: {self.ledger.open_ids}")

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        start = time.thread_time_ns()
        try:
            return call(*arguments)
        finally:
            self.report.scheduler_ns += time.thread_time_ns() - start


def check_idle(harness: Harness) -> None:
    """Nothing runs, nothing waits, no block is held; `check_integrity()` when the scheduler has one."""
    scheduler = harness.scheduler
    counts = scheduler.get_request_counts()
    if counts != (0, 0) or scheduler.get_num_unfinished_requests():
        raise ExactError("leak", f"running and waiting requests when idle: {counts}")
    if scheduler.get_kv_cache_usage():
        raise ExactError("leak", f"KV usage {scheduler.get_kv_cache_usage()} when idle")
    check = getattr(scheduler, "check_integrity", None)
    if check is not None:
        check()
        return
    pool = scheduler.kv_cache_manager.block_pool
    if pool.get_num_free_blocks() != harness.knobs.num_blocks:
        raise ExactError("leak", f"{pool.get_num_free_blocks()} of {harness.knobs.num_blocks} blocks free when idle")


def run_scenario(scheduler_class: str | type, knobs: Knobs, workload: Workload, **options: Any) -> Report:
    """Builds the scheduler, runs the workload, checks everything."""
    max_ticks = options.pop("max_ticks", 100_000)
    driver = Driver(make_harness(scheduler_class, knobs), workload, **options)
    try:
        return driver.run(max_ticks)
    except Exception as error:
        error.add_note(f"scheduler {scheduler_class}, {knobs}, {workload}, tick {driver.report.ticks}")
        raise
