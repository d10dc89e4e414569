# SPDX-License-Identifier: Apache-2.0
"""Structural checks on each SchedulerOutput: shape, budgets, table entries, zeroing, and who owns which block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scheduler_harness import Harness

from exact.memory import NULL_BLOCK, ExactError
from exact.row import Row

if TYPE_CHECKING:
    from exact.worker import ExactWorker


class OutputChecker:
    """Checks what no single request's tokens would show.

    A block belongs to one request, or to several that computed the same tokens at the same place of the same group.
    Blocks that a sliding window has left behind belong to nobody.
    """

    def __init__(self, worker: ExactWorker, harness: Harness) -> None:
        self._worker = worker
        self._knobs = harness.knobs
        config = harness.vllm_config.scheduler_config
        self._budget_tokens = config.max_num_scheduled_tokens or config.max_num_batched_tokens
        self._needs_zeroing = harness.kv_cache_config.needs_kv_cache_zeroing
        self._owners: dict[int, list[tuple[Row, int, int]]] = {}
        self._new: list[tuple[Row, int, int, int]] = []
        self._copies: set[int] = set()

    # -- shape -------------------------------------------------------------------------------------------------------

    def check_shape(self, plan: Any) -> None:
        """Ids, counts and columns agree with each other and with the budgets."""
        counts = plan.num_scheduled_tokens
        new_ids = [new.req_id for new in plan.scheduled_new_reqs]
        cached = plan.scheduled_cached_reqs
        columns = {len(cached.req_ids), len(cached.new_block_ids), len(cached.num_computed_tokens)}
        columns.add(len(cached.num_output_tokens))
        ids = [*new_ids, *cached.req_ids]
        rules = {
            "total differs from the sum": sum(counts.values()) == plan.total_num_scheduled_tokens,
            "budget exceeded": plan.total_num_scheduled_tokens <= self._budget_tokens,
            "too many requests": len(counts) <= self._knobs.max_num_seqs,
            "a request scheduled with no token": min(counts.values(), default=1) > 0,
            "a request twice or both new and cached": len(ids) == len(set(ids)),
            "scheduled ids differ from the data sent": set(ids) == set(counts),
            "columns of different length": len(columns) == 1,
            "resumed ids that are not cached": set(cached.resumed_req_ids) <= set(cached.req_ids),
            "resumed as cached under the V2 protocol": self._knobs.runner == "v1" or not cached.resumed_req_ids,
            "a finished request is cached": not (plan.finished_req_ids & set(cached.req_ids)),
            "drafts of an unscheduled request": set(plan.scheduled_spec_decode_tokens) <= set(counts),
        }
        for message, holds in rules.items():
            if not holds:
                self._worker.fault(ExactError("shape", f"{message}: {plan}"))
        self._check_ids(plan)
        self._check_drafts(plan)

    def _check_ids(self, plan: Any) -> None:
        lists = [(new.req_id, ids) for new in plan.scheduled_new_reqs for ids in _token_lists(new)]
        lists += list(plan.scheduled_cached_reqs.all_token_ids.items())
        lists += zip(plan.scheduled_cached_reqs.req_ids, plan.scheduled_cached_reqs.new_token_ids, strict=False)
        for request_id, ids in lists:
            if ids and min(ids) < 0:
                where = {"request_id": request_id, "position": next(i for i, token in enumerate(ids) if token < 0)}
                self._worker.fault(ExactError("negative_token", "placeholder handed to the worker", **where))

    def _check_drafts(self, plan: Any) -> None:
        for request_id, drafts in plan.scheduled_spec_decode_tokens.items():
            if not 0 < len(drafts) <= self._knobs.num_spec_tokens or plan.num_scheduled_tokens[request_id] <= len(
                drafts
            ):
                message = f"{len(drafts)} drafts in {plan.num_scheduled_tokens[request_id]} tokens"
                self._worker.fault(ExactError("draft_count", message, request_id=request_id))

    # -- tables ------------------------------------------------------------------------------------------------------

    def own(self, row: Row, lengths: Sequence[int] | int) -> None:
        """Notes the table entries of a row from `lengths` (per group) on."""
        for group, table in enumerate(row.tables):
            if group in self._worker.states.groups:
                continue  # what stands in them is checked when a step goes on from it
            start = lengths if isinstance(lengths, int) else lengths[group]
            for index in range(start, len(table)):
                self._new.append((row, group, index, table[index]))

    def disown(self, row: Row) -> None:
        """Forgets all table entries of a row."""
        for table in row.tables:
            for block in table:
                owners = self._owners.get(block)
                if owners:
                    owners[:] = [owner for owner in owners if owner[0] is not row]
                    if not owners:
                        del self._owners[block]

    def copy_ends(self, pair: Any) -> tuple[int, int]:
        """Source and target of a KVCacheBlockCopy, checked."""
        source, target = pair.src_block_id, pair.dst_block_id
        for block in (source, target):
            if not 0 < block < self._knobs.num_blocks + 1:
                self._worker.fault(ExactError("block_range", "copy of a block out of range", block=block))
        return source, target

    def check_tables(self, plan: Any) -> None:
        """Range, null blocks and zeroing of the entries that came with this step; adapters in the batch."""
        adapters = {
            row.lora_id for name in plan.num_scheduled_tokens if (row := self._worker.rows.get(name)) is not None
        }
        if len(adapters - {0}) > self._knobs.num_lora_adapters:
            self._worker.fault(ExactError("adapters", f"{sorted(adapters)}, at most {self._knobs.num_lora_adapters}"))
        zeroed = set(plan.new_block_ids_to_zero or ())
        filled = zeroed | {self.copy_ends(pair)[1] for pair in plan.kv_cache_block_copies or ()}
        if zeroed and not self._needs_zeroing:
            self._worker.fault(ExactError("zeroing", f"zeroes {sorted(zeroed)} though nothing asks for it"))
        for row, group, index, block in self._new:
            place = {"request_id": row.request_id, "block": block, "group": group}
            block_tokens = self._worker.memory.block_tokens[group]
            first, last = index * block_tokens, (index + 1) * block_tokens
            place["position"] = first
            if not 0 <= block <= self._knobs.num_blocks:
                self._worker.fault(ExactError("block_range", "block id out of range", **place))
            elif block == NULL_BLOCK and last > self._visible_from(row, group):
                self._worker.fault(ExactError("null_block", "null block where the request can see", **place))
            elif (
                self._needs_zeroing and block not in filled and first >= len(row.values) and not _is_filled(row, block)
            ):
                self._worker.fault(ExactError("zeroing", "new block is not zeroed", **place))

    def _visible_from(self, row: Row, group: int) -> int:
        return self._knobs.groups[group].first_visible(len(row.values))

    # -- owners ------------------------------------------------------------------------------------------------------

    def check_owners(self) -> None:
        """After the writes of a step: each new table entry is exclusive, or shared by requests of equal content."""
        for row, group, index, block in self._new:
            if block == NULL_BLOCK or not 0 <= block <= self._knobs.num_blocks:
                continue
            owners = self._owners.setdefault(block, [])
            for other, other_group, other_index in list(owners):
                if not self._sees(other, other_group, other_index):
                    owners.remove((other, other_group, other_index))
                elif not self._same_content((row, group, index), (other, other_group, other_index)):
                    message = f"also block {other_index} of {other.request_id} in group {other_group}"
                    place = {"request_id": row.request_id, "block": block, "group": group}
                    position = index * self._worker.memory.block_tokens[group]
                    self._worker.fault(ExactError("shared_block", message, position=position, **place))
            owners.append((row, group, index))
        self._new.clear()

    def _sees(self, row: Row, group: int, index: int) -> bool:
        return (index + 1) * self._worker.memory.block_tokens[group] > self._visible_from(row, group)

    def _same_content(self, one: tuple[Row, int, int], other: tuple[Row, int, int]) -> bool:
        if one[1:] != other[1:]:
            return False
        last = (one[2] + 1) * self._worker.memory.block_tokens[one[1]] - 1
        values, others = one[0].values, other[0].values
        return last < len(values) and last < len(others) and values[last] == others[last]


def _is_filled(row: Row, block: int) -> bool:
    return block == NULL_BLOCK or block in row.kept_blocks


def _token_lists(new: Any) -> list[list[int]]:
    return [ids for ids in (new.prompt_token_ids, new.prefill_token_ids) if ids is not None]
