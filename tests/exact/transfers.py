# SPDX-License-Identifier: Apache-2.0
"""The worker side of the store connector: moves the slots of blocks between the exact worker's memory and the store."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import KVConnectorOutput

from exact.memory import NULL_BLOCK, ExactError
from exact.reference import extend
from exact.row import Input
from exact.store_connector import Job, Piece, StepJobs, StoreConnector

if TYPE_CHECKING:
    from exact.worker import ExactWorker

GARBAGE = -77


class Transfers:
    """Loads, saves and sends of one worker.

    A load destroys what its blocks hold as soon as it starts, because nobody knows when its writes land. So no step in flight may
    still use them, and nobody else may be given them before it is reported.

    Attributes:
        num_loaded, num_sent, num_failed: jobs that ended, and loads in which a block did not come.
    """

    def __init__(self, worker: ExactWorker, connector: StoreConnector) -> None:
        self._worker = worker
        self._connector = connector
        self._memory = worker.memory
        self._loads: list[Job] = []
        self._saves: list[Job] = []
        self._sends: list[Job] = []
        self._in_flight: deque[set[int]] = deque()
        self.num_loaded = self.num_sent = self.num_failed = 0

    # -- one step ----------------------------------------------------------------------------------------------------

    def start(self, jobs: StepJobs) -> KVConnectorOutput:
        """Before a step computes: starts its loads and ends those that are due."""
        output = KVConnectorOutput(finished_sending=set(), finished_recving=set(), kv_connector_worker_meta=[])
        for job in jobs.loads:
            self._begin_load(job)
        self._loads += jobs.loads
        self._saves += [job for job in jobs.saves if job.steps]
        self._sends += jobs.sends
        self._loads = self._due(self._loads, self._end_load, output)
        self._saves = self._due(self._saves, self._save, output)
        self._sends = self._due(self._sends, self._send, output)
        return output

    def finish(self, jobs: StepJobs, inputs: list[Input]) -> None:
        """After it has computed `inputs`: saves what it completed."""
        loading = {piece.block for job in self._loads for piece in job.pieces}
        used: set[int] = set()
        for item in inputs:
            row = item.row
            blocks = self._used_blocks(item)
            used |= blocks
            if blocks & loading:
                message = f"blocks {sorted(blocks & loading)} of a load in flight"
                self._worker.fault(ExactError("given_away", message, request_id=row.request_id))
        self._in_flight.append(used)
        for job in jobs.saves:
            if not job.steps:
                self._copy_out(job)

    def _used_blocks(self, item: Input) -> set[int]:
        """Blocks that a row reads or writes; those that a window has left behind may be anybody's."""
        used: set[int] = set()
        for group, spec in enumerate(self._worker.knobs.groups):
            low = spec.first_visible(item.start)
            size = self._memory.block_tokens[group]
            used.update(item.row.tables[group][low // size : -(-(item.start + len(item.tokens)) // size)])
        return used - {NULL_BLOCK}

    def settle(self) -> None:
        """The scheduler sees the oldest step's results: that step is in flight no more."""
        self._in_flight.popleft()

    def _due(self, jobs: list[Job], end: Any, output: KVConnectorOutput) -> list[Job]:
        for job in jobs:
            job.steps -= 1
            if job.steps < 0:
                end(job, output)
        return [job for job in jobs if job.steps >= 0]

    # -- loads -------------------------------------------------------------------------------------------------------

    def _begin_load(self, job: Job) -> None:
        blocks = {piece.block for piece in job.pieces}
        for used in self._in_flight:
            if job.steps and blocks & used:
                message = f"blocks {sorted(blocks & used)} are still used by a step in flight"
                self._worker.fault(ExactError("unordered_load", message, request_id=job.request_id))
        for piece in job.pieces:
            self._write(piece, [GARBAGE] * self._memory.block_tokens[piece.group])

    def _end_load(self, job: Job, output: KVConnectorOutput) -> None:
        self.num_loaded += 1
        options, dice = self._connector.options, self._connector.dice
        missing: set[int] = set()
        if dice.random() < options.fail_share:
            self.num_failed += 1
            first = dice.randrange(len(job.pieces))
            missing = {piece.block for piece in job.pieces[first:]}
            if options.fails_by_request and options.is_async:
                missing = {piece.block for piece in job.pieces}
                output.failed_recving.add(job.request_id)
            else:
                output.invalid_block_ids |= missing
        for piece in job.pieces:
            if piece.block not in missing:
                self._write(piece, self._connector.store[piece.group, piece.key])
        self._worker.poisoned |= missing if not options.is_async else set()
        if options.is_async:
            output.finished_recving.add(job.request_id)

    def _write(self, piece: Piece, values: list[int]) -> None:
        self._memory.write(piece.group, piece.block, 0, values)
        self._worker.poisoned.discard(piece.block)

    # -- saves and sends ---------------------------------------------------------------------------------------------

    def _save(self, job: Job, output: KVConnectorOutput) -> None:
        self._copy_out(job)
        output.kv_connector_worker_meta.extend(piece.block for piece in job.pieces)

    def _copy_out(self, job: Job) -> None:
        for piece in job.pieces:
            if piece.block not in self._worker.poisoned:
                slots = self._memory.slots(piece.group, piece.block)
                self._connector.store.setdefault((piece.group, piece.key), list(slots))

    def _send(self, job: Job, output: KVConnectorOutput) -> None:
        """The blocks of an ended request must still hold what it computed."""
        self.num_sent += 1
        output.finished_sending.add(job.request_id)
        values: list[int] = []
        extend(values, job.tokens, self._worker.seed_of(job.request_id))
        index_of: dict[int, int] = {}
        for piece in job.pieces:
            index = index_of[piece.group] = index_of.get(piece.group, -1) + 1
            size = self._memory.block_tokens[piece.group]
            right = values[index * size : (index + 1) * size]
            seen = self._memory.slots(piece.group, piece.block)[: len(right)]
            # The last token was sampled and never computed.
            whole = len(right) == size and (index + 1) * size < len(values)
            if piece.block != NULL_BLOCK and whole and seen != right:
                place = {"request_id": job.request_id, "block": piece.block, "group": piece.group}
                self._worker.fault(ExactError("sent_garbage", f"block {index} of an ended request changed", **place))
