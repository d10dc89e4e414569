# SPDX-License-Identifier: Apache-2.0
"""States (Mamba, GDN, KDA) in the exact worker: a running hash in one block, moved between columns as vLLM's workers move it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exact.memory import NULL_BLOCK, ExactError
from exact.row import Input, Row

if TYPE_CHECKING:
    from exact.worker import ExactWorker


class States:
    """Reads the state behind the tokens computed so far from their last column and leaves it behind in that of the step's end.

    Args:
        worker: whose rows and memory it works on.
    """

    def __init__(self, worker: ExactWorker) -> None:
        self.groups = [index for index, group in enumerate(worker.knobs.groups) if group.keeps_state]
        self._worker = worker
        # By request: the tokens behind which its last step left its states.
        self._ends: dict[str, int] = {}

    def move(self, plan: Any, inputs: list[Input]) -> None:
        """Before a step computes: into the column of its last token, where that is another."""
        self._forget(plan)
        for item in inputs:
            row, end = item.row, item.start + len(item.tokens)
            start = self._ends.get(row.request_id, item.start)
            self._ends[row.request_id] = end
            for group in self.groups if start else ():
                source, target = self._block(row, group, start), self._block(row, group, end)
                if source != target:
                    self._worker.memory.copy(source, target)

    def advance(self, inputs: list[Input]) -> None:
        """Checks what the step went on from, and takes its tokens in."""
        memory = self._worker.memory
        for item in inputs:
            row = item.row
            for group in self.groups:
                block = self._block(row, group, len(row.values))
                if item.start:
                    seen, right = memory.slots(group, block), [row.values[item.start - 1]]
                    if seen != right:
                        self._worker.wrong_read(row, group, block, item.start - 1, seen, right)
                memory.write_state(group, block, row.values[-1])

    def _forget(self, plan: Any) -> None:
        """Where the states of a request lie, as vLLM's V1 runner does; its V2 runner also does so for each new row."""
        resumed = plan.scheduled_cached_reqs.resumed_req_ids
        new = [new.req_id for new in plan.scheduled_new_reqs] if self._worker.knobs.runner == "v2" else []
        for request_id in {*plan.finished_req_ids, *(plan.preempted_req_ids or ()), *resumed, *new}:
            self._ends.pop(request_id, None)

    def _block(self, row: Row, group: int, num_tokens: int) -> int:
        index = (num_tokens - 1) // self._worker.memory.block_tokens[group]
        table = row.tables[group]
        if index < len(table) and table[index] != NULL_BLOCK:
            return table[index]
        place = {"request_id": row.request_id, "position": num_tokens - 1, "group": group}
        self._worker.fault(ExactError("no_state", f"no block for the state behind {num_tokens} tokens", **place))
        return NULL_BLOCK
