# SPDX-License-Identifier: Apache-2.0
"""vLLM's two model runner protocols, as the exact worker follows them."""

from __future__ import annotations

from typing import Any

from exact.memory import ExactError
from exact.row import Flight, Input, Row
from exact.worker import ExactWorker

GARBAGE_TOKEN = 0


class V1Runner(ExactWorker):
    """Keeps preempted requests; a resumed one comes as cached, with its whole table and (async) all its tokens.

    Sampled tokens of a synchronous step are known to the host. With async scheduling the host row gets -1 for them and
    the next step takes the token from the device, for which the request must have run in the step just before.
    """

    def remove(self, plan: Any) -> None:
        for request_id in plan.finished_req_ids:
            self.forget(request_id)
        for request_id in plan.preempted_req_ids or ():
            if request_id in self.rows:
                self.checker.disown(self.rows[request_id])

    def add(self, new: Any) -> None:
        self.new_row(new, new.prompt_token_ids, self.check_unknown(new))

    def update(self, plan: Any) -> None:
        cached = plan.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            row = self.rows.get(request_id)
            if row is None:
                self.fault(ExactError("unknown_request", "scheduled as cached", request_id=request_id))
                continue
            resumed = request_id in cached.resumed_req_ids
            row.in_batch = row.last_step == self.step - 1 and not resumed
            num_outputs = cached.num_output_tokens[index]
            if self.knobs.is_async and row.in_batch:
                row.tokens.extend([-1] * row.num_draft_scheduled)
            del row.tokens[row.prompt_tokens + num_outputs :]
            if resumed:
                self._replace_tables(row, cached.new_block_ids[index])
            else:
                self.append_blocks(row, cached.new_block_ids[index])
            if not row.in_batch:
                self._recover_tokens(row, cached.all_token_ids.get(request_id), num_outputs)
            self._set_computed(row, cached.num_computed_tokens[index], resumed)

    def _replace_tables(self, row: Row, tables: Any) -> None:
        self.checker.disown(row)
        if tables is None:
            self.fault(ExactError("no_table", "resumed without blocks", request_id=row.request_id))
            return
        row.tables = [list(ids) for ids in tables]
        self.checker.own(row, 0)

    def _recover_tokens(self, row: Row, all_tokens: list[int] | None, num_outputs: int) -> None:
        if all_tokens is None:
            message = "not in the previous step and no all_token_ids"
            self.fault(ExactError("no_tokens", message, request_id=row.request_id))
            return
        if self.knobs.is_async and num_outputs > 0:
            row.tokens[row.prompt_tokens :] = all_tokens[-num_outputs:]
        if row.tokens != list(all_tokens):
            message = f"all_token_ids has {len(all_tokens)} tokens, the runner {len(row.tokens)}, or they differ"
            self.fault(ExactError("wrong_tokens", message, request_id=row.request_id))

    def _set_computed(self, row: Row, host_count: int, resumed: bool) -> None:
        if resumed:
            row.flight = Flight()
            row.rebuild(row.tokens[:host_count])
        elif host_count != len(row.values) + row.flight.num_rejected:
            truth = f"{len(row.values)} computed, {row.flight.num_rejected} rejected in flight"
            self.fault(ExactError("wrong_count", f"told {host_count}: {truth}", request_id=row.request_id))

    def make_input(self, plan: Any, request_id: str, count: int) -> Input:
        row = self.rows[request_id]
        start = len(row.values)
        drafts = plan.scheduled_spec_decode_tokens.get(request_id, ())
        self.check_drafts(row, drafts)
        known = row.tokens[start : start + count]
        samples = start + row.flight.num_rejected + count >= len(row.tokens)
        num_sure = count - len(drafts)
        if self.knobs.is_async and row.in_batch and row.device_tokens:
            known = [*known[: num_sure - 1], row.device_tokens[-1]]
            drafts = row.drafts[: len(drafts)]
        tokens = [*known[:num_sure], *(token if token >= 0 else GARBAGE_TOKEN for token in drafts)]
        if len(tokens) != count or min(tokens) < 0:
            message = f"positions {start}..{start + count - 1} read {tokens} with {len(drafts)} drafts"
            self.fault(ExactError("bad_input", message, request_id=request_id, position=start))
            tokens = [max(token, GARBAGE_TOKEN) for token in tokens] + [GARBAGE_TOKEN] * (count - len(tokens))
        row.num_draft_scheduled = len(drafts)
        return Input(row, start, tokens, len(drafts), samples)

    def after_sample(self, item: Input, sampled: list[int]) -> None:
        row = item.row
        row.device_tokens = sampled
        if sampled:
            row.tokens.extend([-1] if self.knobs.is_async else sampled)


class V2Runner(ExactWorker):
    """Forgets a preempted request; a resumed one comes as new with `prefill_token_ids`.

    The device counts computed tokens itself and keeps the last sampled token and the drafts, so the numbers and draft
    ids of the scheduler are only checked against it.
    """

    def remove(self, plan: Any) -> None:
        for request_id in plan.finished_req_ids | (plan.preempted_req_ids or set()):
            self.forget(request_id)

    def add(self, new: Any) -> None:
        if new.prefill_token_ids is None:
            self.fault(ExactError("no_tokens", "new request without prefill_token_ids", request_id=new.req_id))
            return
        row = self.new_row(new, new.prefill_token_ids, self.check_unknown(new))
        row.drafts = [GARBAGE_TOKEN] * self.knobs.num_spec_tokens
        if len(row.tokens) < row.prompt_tokens:
            self.fault(ExactError("wrong_tokens", "prefill shorter than the prompt", request_id=new.req_id))

    def update(self, plan: Any) -> None:
        cached = plan.scheduled_cached_reqs
        for request_id, host_count, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            row = self.rows.get(request_id)
            if row is None:
                self.fault(ExactError("unknown_request", "scheduled as cached", request_id=request_id))
                continue
            self.append_blocks(row, blocks)
            if host_count != len(row.values) + row.flight.num_rejected:
                truth = f"{len(row.values)} computed, {row.flight.num_rejected} rejected in flight"
                self.fault(ExactError("wrong_count", f"told {host_count}: {truth}", request_id=request_id))

    def make_input(self, plan: Any, request_id: str, count: int) -> Input:
        row = self.rows[request_id]
        start, prefill_tokens = len(row.values), len(row.tokens)
        told = plan.scheduled_spec_decode_tokens.get(request_id, ())
        num_sure = count - len(told)
        end = start + count
        tokens = row.tokens[start:end]
        if end > prefill_tokens:
            if start + num_sure - 1 >= prefill_tokens:
                self._check_cadence(row)
                tokens.append(row.device_tokens[-1] if row.device_tokens else -1)
            tokens.extend(row.drafts[: len(told)])
        self.check_drafts(row, told)
        if len(tokens) != count or min(tokens) < 0:
            message = f"positions {start}..{end - 1} read {tokens} with {len(told)} drafts"
            self.fault(ExactError("bad_input", message, request_id=request_id, position=start))
            tokens = [max(token, GARBAGE_TOKEN) for token in tokens[:count]]
            tokens += [GARBAGE_TOKEN] * (count - len(tokens))
        return Input(row, start, tokens, len(told), end >= prefill_tokens)

    def after_sample(self, item: Input, sampled: list[int]) -> None:
        if sampled:
            item.row.device_tokens = sampled
            item.row.sampled_step = self.step

    def _check_cadence(self, row: Row) -> None:
        """A sampled token reaches the first pipeline stage only `pp_size` steps later."""
        if 0 < self.step - row.sampled_step < self.knobs.pp_size:
            message = f"decoded {self.step - row.sampled_step} steps after sampling, {self.knobs.pp_size} stages"
            self.fault(ExactError("cadence", message, request_id=row.request_id))
