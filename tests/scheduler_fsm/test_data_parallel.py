# SPDX-License-Identifier: Apache-2.0
"""vLLM's own loop for data-parallel ranks (`DPEngineCoreProc`), one rank a thread, over our scheduler and the exact worker.

All ranks of an expert-parallel model must run a forward pass in the same steps: a rank without work runs dummy passes until all are
done, and then all stop together (a *wave*).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
from exact.driver import Driver
from exact.workload import Arrival, Workload, words
from scheduler_harness import OURS, Harness, make_harness
from scheduler_knobs import Knobs
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc, EngineShutdownState

pytestmark = pytest.mark.host_matrix

DUMMY = frozenset({"dummy"})
TIMEOUT_S = 60.0


class Agreement:
    """What the ranks' all-reduce computes: whether any of them has work left."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=TIMEOUT_S)
        self._votes = [False] * num_ranks

    def any_has_work(self, rank: int, has_work: bool) -> bool:
        self._votes[rank] = has_work
        self._barrier.wait()
        result = any(self._votes)
        self._barrier.wait()
        return result

    def break_up(self) -> None:
        self._barrier.abort()


class Executor:
    """The exact worker behind the calls that the loop makes; remembers what each pass ran."""

    is_sleeping = False

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.passes: list[frozenset[str]] = []

    def execute_model(self, plan: Any, non_block: bool) -> Future[Any]:
        assert non_block
        result = self._driver.worker.execute(plan)
        self._driver.ledger.scheduled(plan)
        if result.num_tokens:
            self.passes.append(frozenset(plan.num_scheduled_tokens))
        self._driver.worker.settle(result)
        done: Future[Any] = Future()
        done.set_result(result.output)
        return done

    def execute_dummy_batch(self) -> None:
        self.passes.append(DUMMY)


class Rank(DPEngineCoreProc):
    """One rank: vLLM's loop, without its sockets, its process group and its model."""

    def __init__(self, rank: int, agreement: Agreement, harness: Harness, interval_steps: int) -> None:
        self.driver = Driver(harness, Workload([]))
        self.model_executor = Executor(self.driver)
        self.agreement = agreement
        self.vllm_config = harness.vllm_config
        self.scheduler = harness.scheduler
        self.step_fn = self.step
        self.dp_rank = self.engine_index = rank
        self.input_queue, self.output_queue, self.aborts_queue = queue.Queue(), queue.Queue(), queue.Queue()
        self.shutdown_state = EngineShutdownState.RUNNING
        self.prefill_schedule_interval = interval_steps
        self.last_counts = (0, 0)
        self.step_counter = self.current_wave = 0
        self.has_coordinator = self.publish_dp_lb_stats = self.process_input_queue_block = True
        self.engines_running = self.pending_pause = self.ignore_start_dp_wave = self.reject_new_requests = False
        self.async_scheduling = self.check_for_draft_tokens = self.log_stats = self.enable_fault_tolerance = False
        self.batch_queue = self.eep_scaling_state = None
        self._idle_state_callbacks: list[Any] = []
        self._weight_version = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.run_busy_loop()
        except SystemExit:
            return
        except BaseException as error:  # handed to the test
            self.error = error
            self.agreement.break_up()

    def _handle_client_request(self, request_type: Any, request: Any) -> None:
        if request_type is None:
            raise SystemExit
        super()._handle_client_request(request_type, request)

    def _has_global_unfinished_reqs(self, local_unfinished: bool) -> bool:
        self.step_counter += 1
        return self.agreement.any_has_work(self.dp_rank, local_unfinished)

    def add(self, request_id: str, num_prompt_tokens: int, max_tokens: int) -> None:
        seed = sum(map(ord, request_id))
        request = self.driver.ledger.open(Arrival(0, request_id, words(seed, num_prompt_tokens), max_tokens))
        self.input_queue.put((EngineCoreRequestType.ADD, (request, 0)))


class Ranks(list[Rank]):
    """The ranks, and what a front end and the coordinator do with their outputs."""

    def deliver_until_the_wave_ends(self) -> dict[str, list[Any]]:
        """Books all outputs until rank 0 says that the wave is over; returns what came beside tokens, by kind."""
        seen: dict[str, list[Any]] = {"counts": [], "finished": [], "wave_complete": []}
        while not seen["wave_complete"]:
            self._take(self[0], seen, block=True)
        for rank in self[1:]:
            while not rank.output_queue.empty():
                self._take(rank, seen, block=False)
        for rank in self:
            rank.driver.ledger.check_all_ended()
        return seen

    def _take(self, rank: Rank, seen: dict[str, list[Any]], block: bool) -> None:
        if rank.error is not None:
            raise rank.error
        client, outputs = rank.output_queue.get(block=block, timeout=TIMEOUT_S)
        if outputs.wave_complete is not None:
            seen["wave_complete"].append(outputs.wave_complete)
        if client == -1 and outputs.scheduler_stats is not None:
            counts = outputs.scheduler_stats
            seen["counts"].append((rank.dp_rank, counts.num_running_reqs, counts.num_waiting_reqs))
        seen["finished"] += sorted(outputs.finished_requests or ())
        if client >= 0:
            rank.driver.ledger.deliver({client: outputs})


@contextmanager
def two_ranks(knobs: Knobs, interval_steps: int = 1) -> Iterator[Ranks]:
    agreement = Agreement(2)
    ranks = Ranks(
        Rank(number, agreement, make_harness(OURS, knobs, include_finished_set=True), interval_steps)
        for number in range(2)
    )
    threads = [threading.Thread(target=rank.run, daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    yield ranks
    for rank, thread in zip(ranks, threads, strict=True):
        rank.input_queue.put((None, None))
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
        assert rank.error is None


def start_wave(ranks: Ranks) -> None:
    """The coordinator wakes the other ranks when a request comes to an idle one."""
    for rank in ranks:
        rank.input_queue.put((EngineCoreRequestType.START_DP_WAVE, (rank.current_wave, -1)))


def test_an_idle_rank_runs_a_dummy_pass_beside_every_pass_of_the_other() -> None:
    with two_ranks(Knobs(num_blocks=16, budget_tokens=8)) as ranks:
        for number in range(4):
            ranks[0].add(f"r{number}", 20, 12)
        start_wave(ranks)
        seen = ranks.deliver_until_the_wave_ends()
        busy, idle = (rank.model_executor.passes for rank in ranks)
    assert seen["wave_complete"] == [0]
    assert sorted(seen["finished"]) == ["r0", "r1", "r2", "r3"], "front ends learn who ended, to weigh the ranks"
    assert set(idle) == {DUMMY}
    assert len(idle) == len(busy), "every pass of one rank has one of the other"
    assert any(waiting > 0 for _, _, waiting in seen["counts"])
    assert (0, 0, 0) in seen["counts"]
    assert all(rank == 0 for rank, *_ in seen["counts"])


def test_the_next_wave_wakes_both_and_the_rank_that_ends_first_goes_on_with_dummies() -> None:
    with two_ranks(Knobs()) as ranks:
        for wave in range(2):
            ranks[0].add(f"short{wave}", 5, 3)
            ranks[1].add(f"long{wave}", 5, 20)
            start_wave(ranks)
            assert ranks.deliver_until_the_wave_ends()["wave_complete"] == [wave]
        first, second = (rank.model_executor.passes for rank in ranks)
    assert len(first) == len(second)
    assert first.count(DUMMY) > second.count(DUMMY)
    assert first.index(DUMMY) == first.index(frozenset({"short0"})) + 3


def test_prefills_of_all_ranks_start_in_the_same_steps() -> None:
    """`prefill_schedule_interval` of 4: while decodes run, a prompt that arrives between waits for the next common step."""
    interval_steps = 4
    with two_ranks(Knobs(), interval_steps) as ranks:
        for rank in ranks:
            rank.add(f"decode{rank.dp_rank}", 5, 60)
        start_wave(ranks)
        for rank in ranks:
            # The loop takes requests in between two steps, whichever: the steps they start in are what is checked.
            for number in range(3):
                rank.add(f"late{rank.dp_rank}{number}", 5, 2)
        ranks.deliver_until_the_wave_ends()
    for rank in ranks:
        passes = rank.model_executor.passes
        starts = {
            next(step for step, ran in enumerate(passes) if f"late{rank.dp_rank}{number}" in ran) for number in range(3)
        }
        assert all(step % interval_steps == 0 for step in starts)
