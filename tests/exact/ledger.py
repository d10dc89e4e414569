# SPDX-License-Identifier: Apache-2.0
"""Books of what each request was owed and what it got: every token once, in order, with the right end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from scheduler_harness import Harness

from exact.memory import ExactError
from exact.reference import Answer
from exact.workload import Arrival

if TYPE_CHECKING:
    from exact.driver import Report


@dataclass
class Account:
    """One request's side of the books.

    A resumable session is answered chunk by chunk: `updates` are chunks that its client has sent and that wait for the
    end of the one before, `is_waiting` says that it has nothing to do, `is_closing` that no more chunks come.
    """

    arrival: Arrival
    answer: Answer | None
    prompt: list[int]
    num_delivered: int = 0
    updates: deque[tuple[list[int], int]] = field(default_factory=deque)
    is_waiting: bool = False
    is_closing: bool = False
    outcome: str | None = None
    was_scheduled: bool = False


class Ledger:
    """Compares EngineCoreOutputs with ground truth.

    Args:
        harness: makes the requests.
        report: counters to fill.
        vocab: vocabulary of the reference.
    """

    def __init__(self, harness: Harness, report: Report, vocab: int) -> None:
        self._harness = harness
        self._report = report
        self._vocab = vocab
        self.accounts: dict[str, Account] = {}
        self.open_ids: set[str] = set()
        # Loads fail under the policy that ends their requests.
        self.may_fail = bool(harness.knobs.connector_options.get("fail_share")) and (
            harness.knobs.load_failure_policy == "fail"
        )

    def seed_of(self, request_id: str) -> int:
        """Context seed of a request, for the worker."""
        return self.accounts[request_id].arrival.seed

    def is_session(self, request_id: str) -> bool:
        """Whether a request may be sent to the worker again as new."""
        return bool(self.accounts[request_id].arrival.extra.get("resumable"))

    def open(self, arrival: Arrival) -> Any:
        """Opens an account; returns the vLLM Request."""
        max_model_len = self._harness.knobs.max_model_len
        answerable = not arrival.pooling and len(arrival.prompt) < max_model_len and not arrival.refused
        answer = arrival.answer(max_model_len, self._vocab) if answerable else None
        self.accounts[arrival.request_id] = Account(arrival, answer, arrival.prompt)
        self.open_ids.add(arrival.request_id)
        if arrival.pooling:
            return self._harness.make_pooling_request(arrival.request_id, arrival.prompt)
        return self._make_request(arrival)

    def update(self, request_id: str, prompt: list[int], max_tokens: int) -> Any:
        """The client of a session sends another chunk; returns the Request that carries it."""
        account = self.accounts[request_id]
        account.updates.append((prompt, max_tokens))
        if account.is_waiting:
            self._next_chunk(account)
        return self._make_request(replace(account.arrival, prompt=prompt, max_tokens=max_tokens))

    def close(self, request_id: str) -> Any:
        """The client of a session says that no more comes; returns the Request that says so."""
        account = self.accounts[request_id]
        account.is_closing = True
        if account.is_waiting:
            account.outcome = "closed"
            self.open_ids.discard(request_id)
        return self._make_request(replace(account.arrival, extra={}))

    def _next_chunk(self, account: Account) -> None:
        prompt, max_tokens = account.updates.popleft()
        assert account.answer is not None
        account.prompt = [*account.prompt, *account.answer.tokens[:-1], *prompt]
        account.arrival = replace(account.arrival, prompt=account.prompt, max_tokens=max_tokens)
        account.answer = account.arrival.answer(self._harness.knobs.max_model_len, self._vocab)
        account.num_delivered = 0
        account.is_waiting = False

    def _make_request(self, arrival: Arrival) -> Any:
        return self._harness.make_request(
            arrival.request_id,
            arrival.prompt,
            arrival.max_tokens,
            eos_token_id=arrival.eos_token_id,
            stop_token_ids=arrival.stop_token_ids,
            min_tokens=arrival.min_tokens,
            priority=arrival.priority,
            arrival_time=float(len(self.accounts)),
            cache_salt=arrival.cache_salt,
            lora_id=arrival.lora_id,
            images=arrival.images,
            **arrival.extra,
        )

    def scheduled(self, plan: Any) -> None:
        """No request runs after its end was delivered or its client had gone."""
        for request_id in plan.num_scheduled_tokens:
            account = self.accounts.get(request_id)
            if account is None or account.outcome is not None:
                outcome = account.outcome if account else "never added"
                raise ExactError("ghost", f"scheduled after its end ({outcome})", request_id=request_id)
            account.was_scheduled = True

    def deliver(self, outputs: dict[int, Any]) -> list[str]:
        """Books one update's outputs; returns the requests that ended."""
        ended = []
        seen: set[str] = set()
        for batch in outputs.values():
            for output in batch.outputs:
                if output.request_id in seen:
                    raise ExactError("doubled", "two outputs in one update", request_id=output.request_id)
                seen.add(output.request_id)
                if self._book(output):
                    ended.append(output.request_id)
        return ended

    def abort(self, request_id: str) -> bool:
        """Closes an account from the client's side; whether it was open."""
        account = self.accounts.get(request_id)
        if account is None or account.outcome is not None:
            return False
        account.outcome = "abort"
        self.open_ids.discard(request_id)
        return True

    @property
    def has_work(self) -> bool:
        """Whether some client waits for tokens."""
        return any(not self.accounts[request_id].is_waiting for request_id in self.open_ids)

    def check_all_ended(self) -> None:
        """No client still waits."""
        if self.open_ids:
            raise ExactError("lost", f"never ended: {sorted(self.open_ids)}")

    def _book(self, output: Any) -> bool:
        request_id = output.request_id
        account = self.accounts.get(request_id)
        if account is None or account.outcome is not None:
            outcome = account.outcome if account else "never added"
            raise ExactError("late_output", f"output {output} after {outcome}", request_id=request_id)
        self._book_prefill(output, account)
        reason = None if output.finish_reason is None else str(output.finish_reason)
        if account.answer is None:
            self._book_tokenless(output, account, reason)
        else:
            self._book_tokens(output, account, reason)
        if reason is None:
            return False
        goes_on = account.updates or not account.is_closing
        if self.is_session(request_id) and not account.arrival.refused and goes_on:
            account.is_waiting = True
            if account.updates:
                self._next_chunk(account)
            return False
        account.outcome = reason
        self.open_ids.discard(request_id)
        return True

    def _book_prefill(self, output: Any, account: Account) -> None:
        stats = output.prefill_stats
        if stats is None:
            if account.num_delivered == 0 and output.new_token_ids and not self.is_session(output.request_id):
                raise ExactError("stats", "first output without prefill_stats", request_id=output.request_id)
            return
        num_prompt, num_cached = stats.num_prompt_tokens, stats.num_cached_tokens
        knobs = self._harness.knobs
        limit = num_prompt - 1 if knobs.prefix_caching or knobs.connector else 0
        if knobs.connector_options.get("whole_prompt"):
            limit = num_prompt
        if output.new_token_ids and (num_prompt != len(account.arrival.prompt) or not 0 <= num_cached <= limit):
            raise ExactError("stats", f"prefill_stats {stats}", request_id=output.request_id)
        self._report.prompt_tokens += num_prompt
        self._report.cached_tokens += num_cached

    def _book_tokenless(self, output: Any, account: Account, reason: str | None) -> None:
        wanted = "error" if account.arrival.refused else "stop"
        pooled = output.pooling_output is not None
        if output.new_token_ids or reason != wanted or pooled != (wanted == "stop"):
            raise ExactError("wrong_end", f"output {output}, wanted end {wanted}", request_id=output.request_id)

    def _book_tokens(self, output: Any, account: Account, reason: str | None) -> None:
        answer = account.answer
        assert answer is not None
        first = account.num_delivered
        account.num_delivered = end = first + len(output.new_token_ids)
        self._report.tokens_delivered += len(output.new_token_ids)
        right = list(answer.tokens[first:end])
        if output.new_token_ids != right:
            message = f"output tokens {first}..: got {output.new_token_ids}, must be {right}"
            raise ExactError("wrong_token", message, request_id=output.request_id, position=first)
        complete = end == len(answer.tokens)
        wanted = answer.finish_reason if complete else None
        if reason == "length" and not complete and self._fills_pool(account):
            return
        if reason == "error" and not output.new_token_ids and self.may_fail:
            return
        if reason != wanted or (complete and output.stop_reason != answer.stop_reason):
            message = f"ends with {reason}/{output.stop_reason}, must be {wanted}/{answer.stop_reason}"
            raise ExactError("wrong_end", message, request_id=output.request_id)

    def _fills_pool(self, account: Account) -> bool:
        """Whether one more token would not fit into the whole pool: then a request may end early."""
        knobs = self._harness.knobs
        num_tokens = len(account.arrival.prompt) + account.num_delivered + 1 + knobs.num_spec_tokens
        full = [group for group in knobs.groups if group.window_tokens is None]
        most = [-(-num_tokens // group.block_tokens) for group in full]
        needed = sum(min(count, 2) if group.keeps_state else count for count, group in zip(most, full, strict=True))
        return needed >= knobs.num_blocks - len(knobs.groups) + 1
