# SPDX-License-Identifier: Apache-2.0
"""The exact worker proper: runs one SchedulerOutput on KV memory that stores context values.

A step runs as on a device: blocks are zeroed, then copied, then every request writes the KV of its tokens, then every
request reads what its block tables let it see. The next token is a function of all that was read: as long as each slot
holds the value that belongs to this request and position, it equals `reference.next_token`; any other content is
reported as an `ExactError` with its place, or (`record=True`) recorded and mixed into the token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from scheduler_harness import Harness
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from exact.checks import OutputChecker
from exact.drafter import Drafter
from exact.images import EncoderMemory, masks, spliced
from exact.memory import NULL_BLOCK, ExactError, KvMemory
from exact.reference import DEFAULT_VOCAB, chain, describe, extend, next_token
from exact.row import Flight, Input, Row
from exact.states import States
from exact.store_connector import StoreConnector
from exact.transfers import Transfers


@dataclass
class StepResult:
    """What one step hands back: the runner's output, and what the worker must remember until it is delivered."""

    output: ModelRunnerOutput
    rejected: list[tuple[Flight, int]]
    num_tokens: int


class ExactWorker:
    """Base of both runner protocols; subclasses say how requests arrive and where input tokens come from.

    Args:
        harness: the scheduler's surroundings; only its knobs and cache configuration are read.
        seed_of: seed of a request's context (adapter and salt), by request id.
        is_session: whether a request is a resumable session, by request id.
        drafter: proposes draft tokens when speculative tokens are on.
        record: collect faults instead of raising the first one.
    """

    def __init__(
        self,
        harness: Harness,
        seed_of: Callable[[str], int],
        is_session: Callable[[str], bool],
        drafter: Drafter | None = None,
        vocab: int = DEFAULT_VOCAB,
        record: bool = False,
    ) -> None:
        self.knobs = harness.knobs
        self.vllm_config = harness.vllm_config
        self.states = States(self)
        self.memory = KvMemory(self.knobs.num_blocks + 1, [group.block_tokens for group in self.knobs.groups])
        self._attention_groups = [(i, g.block_tokens) for i, g in enumerate(self.knobs.groups) if not g.keeps_state]
        self.encoder = EncoderMemory(
            self.knobs.encoder_step_embeds,
            self.knobs.encoder_cache_embeds,
            split_inputs=not self.knobs.scheduler.get("disable_chunked_mm_input"),
        )
        self.rows: dict[str, Row] = {}
        self.step = 0
        self.faults: list[ExactError] = []
        self.record = record
        self.vocab = vocab
        self.drafter = drafter
        self.seed_of = seed_of
        self.is_session = is_session
        self.checker = OutputChecker(self, harness)
        self._drafted: DraftTokenIds | None = None
        # Blocks whose content is not what it should be: a load failed, or something was computed from one.
        self.poisoned: set[int] = set()
        connector = harness.scheduler.connector
        self.transfers = Transfers(self, connector) if isinstance(connector, StoreConnector) else None

    # -- one step ----------------------------------------------------------------------------------------------------

    def execute(self, plan: Any) -> StepResult:
        """Runs a SchedulerOutput and returns what the model runner would."""
        self.step += 1
        self.checker.check_shape(plan)
        self.remove(plan)
        for new in plan.scheduled_new_reqs:
            self.add(new)
        self.update(plan)
        self.checker.check_tables(plan)
        self._prepare_memory(plan)
        for error in self.encoder.prepare(plan, self.rows):
            self.fault(error)
        jobs = plan.kv_connector_metadata
        transferred = None if self.transfers is None else self.transfers.start(jobs)
        inputs = [self.make_input(plan, request_id, count) for request_id, count in plan.num_scheduled_tokens.items()]
        self.states.move(plan, inputs)
        for item in inputs:
            self._write(item)
        self.states.advance(inputs)
        self.checker.check_owners()
        result = self._finish_step(inputs)
        if self.transfers is not None:
            self.transfers.finish(jobs, inputs)
            result.output.kv_connector_output = transferred
        return result

    def settle(self, result: StepResult) -> None:
        """The scheduler is about to see this step's output."""
        for flight, count in result.rejected:
            flight.num_rejected -= count
        if self.transfers is not None:
            self.transfers.settle()

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Drafts proposed after the last step, for a scheduler that is not asynchronous."""
        drafted, self._drafted = self._drafted, None
        return drafted

    def fault(self, error: ExactError) -> None:
        """Raises or records."""
        self.faults.append(error)
        if not self.record:
            raise error

    # -- the runner protocol -----------------------------------------------------------------------------------------

    def remove(self, plan: Any) -> None:
        raise NotImplementedError

    def add(self, new: Any) -> None:
        raise NotImplementedError

    def update(self, plan: Any) -> None:
        raise NotImplementedError

    def make_input(self, plan: Any, request_id: str, count: int) -> Input:
        raise NotImplementedError

    def after_sample(self, item: Input, sampled: list[int]) -> None:
        raise NotImplementedError

    def new_row(self, new: Any, tokens: list[int], kept_blocks: Collection[int]) -> Row:
        """A row from NewRequestData; `tokens` are all tokens known of it."""
        params = new.sampling_params
        row = Row(
            request_id=new.req_id,
            seed=self.seed_of(new.req_id),
            prompt_tokens=len(new.prompt_token_ids),
            tokens=list(tokens),
            tables=[list(ids) for ids in new.block_ids],
            sampling_params=params,
            pooling=new.pooling_params is not None,
            lora_id=new.lora_request.lora_int_id if new.lora_request is not None else 0,
            images=masks(new.mm_features),
        )
        row.rebuild(tokens[: new.num_computed_tokens])
        row.kept_blocks = kept_blocks
        self.rows[new.req_id] = row
        self.checker.own(row, 0)
        return row

    def forget(self, request_id: str) -> None:
        """Drops a request that ended or lost its place."""
        row = self.rows.pop(request_id, None)
        if row is not None:
            self.checker.disown(row)

    def check_unknown(self, new: Any) -> set[int]:
        """A new request has no state here; only a resumable session is sent again as new while it has: its blocks."""
        held: set[int] = set()
        if new.req_id in self.rows:
            if not self.is_session(new.req_id):
                message = "sent as new, never finished or preempted"
                self.fault(ExactError("known_request", message, request_id=new.req_id))
            held.update(*self.rows[new.req_id].tables)
            self.forget(new.req_id)
        return held

    def check_drafts(self, row: Row, told: Any) -> None:
        """Draft ids of the scheduler are placeholders or what the drafter proposed."""
        if any(given not in (-1, held) for given, held in zip(told, row.drafts, strict=False)):
            message = f"told {list(told)}, proposed {row.drafts}"
            self.fault(ExactError("wrong_draft", message, request_id=row.request_id))

    def append_blocks(self, row: Row, new_block_ids: Any) -> None:
        """Appends to the tables of a row that keeps its blocks."""
        if new_block_ids is None:
            return
        lengths = [len(table) for table in row.tables]
        for table, ids in zip(row.tables, new_block_ids, strict=True):
            table.extend(ids)
        self.checker.own(row, lengths)

    # -- memory ------------------------------------------------------------------------------------------------------

    def _prepare_memory(self, plan: Any) -> None:
        for block in plan.new_block_ids_to_zero or ():
            self.memory.zero(block)
        for pair in plan.kv_cache_block_copies or ():
            self.memory.copy(*self.checker.copy_ends(pair))

    def _write(self, item: Input) -> None:
        row = item.row
        values = row.values
        if len(values) < item.start:
            self.fault(ExactError("gap", f"starts at {item.start}, computed {len(values)}", request_id=row.request_id))
        del values[item.start :]
        extend(values, self._embedded(item), row.seed)
        end = len(values)
        for group, block_tokens in self._attention_groups:
            table = row.tables[group]
            position = item.start
            while position < end:
                index, offset = divmod(position, block_tokens)
                stop = min(end, position + block_tokens - offset)
                if index >= len(table) or table[index] == NULL_BLOCK:
                    what = "table too short" if index >= len(table) else "write to the null block"
                    place = {"request_id": row.request_id, "position": position, "group": group}
                    self.fault(ExactError("no_slot", what, **place))
                    break
                if offset == 0:
                    self.poisoned.discard(table[index])
                self.memory.write(group, table[index], offset, values[position:stop])
                position = stop

    def _embedded(self, item: Input) -> list[int]:
        """The input with the embeddings of its images, as far as the encoder has computed them."""
        images = item.row.images
        if not images:
            return item.tokens
        for error in self.encoder.missing(images, item.start, item.start + len(item.tokens)):
            self.fault(error)
        present = [image for image in images if image.identifier in self.encoder.outputs]
        return spliced(item.tokens, present, item.start)

    def _read(self, item: Input) -> int:
        """Compares all that the request can see with what it must be; returns 0 or a hash of a wrong content."""
        row = item.row
        values = row.values
        end = len(values)
        wrong = 0
        for group, block_tokens in self._attention_groups:
            low = self.knobs.groups[group].first_visible(item.start)
            slots_of, table = self.memory.slots, row.tables[group]
            for index in range(low // block_tokens, (end + block_tokens - 1) // block_tokens):
                first = max(low, index * block_tokens)
                last = min(end, (index + 1) * block_tokens)
                block = table[index] if index < len(table) else NULL_BLOCK
                base = index * block_tokens
                if block in self.poisoned:
                    # No fault: what it samples is garbage, and the books see whether that is delivered.
                    wrong = wrong * 31 + 1
                    continue
                seen = slots_of(group, block)[first - base : last - base]
                if seen != values[first:last]:
                    self.wrong_read(row, group, block, first, seen, values[first:last])
                    wrong = wrong * 31 + hash(tuple(seen)) + 1
        if wrong:
            for group, block_tokens in enumerate(self.memory.block_tokens):
                self.poisoned.update(row.tables[group][item.start // block_tokens : -(-end // block_tokens)])
            self.poisoned.discard(NULL_BLOCK)
        return wrong

    def wrong_read(self, row: Row, group: int, block: int, first: int, seen: list[int], right: list[int]) -> None:
        """Reports the first slot from position `first` on that does not hold what it must."""
        padded = seen + [0] * (len(right) - len(seen))
        offset = next(i for i, (a, b) in enumerate(zip(padded, right, strict=True)) if a != b)
        message = f"slot holds {describe(padded[offset])}, must hold {describe(right[offset])}"
        place = {"request_id": row.request_id, "position": first + offset, "block": block, "group": group}
        self.fault(ExactError("wrong_read", message, **place))

    # -- sampling ----------------------------------------------------------------------------------------------------

    def _finish_step(self, inputs: list[Input]) -> StepResult:
        sampled_ids: list[list[int]] = []
        pooled: list[torch.Tensor | None] = []
        rejected: list[tuple[Flight, int]] = []
        for item in inputs:
            row = item.row
            wrong = self._read(item)
            sampled = self._sample(item, wrong) if item.samples and not row.pooling else []
            if row.pooling:
                pooled.append(torch.tensor([float(row.values[-1] % 9973)]) if item.samples else None)
            lost = item.num_drafts + 1 - len(sampled) if sampled else 0
            if lost:
                del row.values[len(row.values) - lost :]
                row.flight.num_rejected += lost
                rejected.append((row.flight, lost))
            self.after_sample(item, sampled)
            row.last_step = self.step
            sampled_ids.append(sampled)
        self._propose(inputs)
        request_ids = [item.row.request_id for item in inputs]
        output = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled_ids if not self.knobs.pooling else [],
            pooler_output=pooled,
        )
        return StepResult(output, rejected, sum(len(item.tokens) for item in inputs))

    def _sample(self, item: Input, wrong: int) -> list[int]:
        """Target tokens after the last sure position and after each draft, up to the first wrong draft."""
        row = item.row
        values, tokens = row.values, item.tokens
        sampled: list[int] = []
        for back in range(item.num_drafts, -1, -1):
            position = len(values) - 1 - back
            value = chain(values[position], position, wrong % 1009) if wrong else values[position]
            token = next_token(value, row.forbidden(position), self.vocab)
            sampled.append(token)
            if back and tokens[len(tokens) - back] != token:
                break
        return sampled

    def _propose(self, inputs: list[Input]) -> None:
        if self.drafter is None or not self.knobs.num_spec_tokens:
            return
        for item in inputs:
            row = item.row
            row.drafts = self.drafter.propose(row, item.samples, self.knobs.is_async, self.vocab)
        if inputs:
            ids = [item.row.request_id for item in inputs]
            self._drafted = DraftTokenIds(ids, [list(item.row.drafts) for item in inputs])
