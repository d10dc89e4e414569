# SPDX-License-Identifier: Apache-2.0
"""Checks, outside the timed region, that a vLLM scheduler produced everything that an engine and a runner read.

Without them a scheduler could look cheap by returning less, or by returning objects that do their work later.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs


def _require_type(value: Any, expected: type, what: str) -> None:
    if type(value) is not expected:
        raise TypeError(f"{what} is a {type(value).__qualname__}, a runner reads a {expected.__qualname__}")


class PlanCheck:
    """Follows every request's block table and requires that it covers the tokens of each step."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._num_blocks: dict[str, int] = {}

    def verify(self, output: SchedulerOutput) -> None:
        """Raise TypeError for a lazy payload, RuntimeError for a table too short for its step."""
        _require_type(output, SchedulerOutput, "schedule()")
        _require_type(output.num_scheduled_tokens, dict, "num_scheduled_tokens")
        _require_type(output.scheduled_new_reqs, list, "scheduled_new_reqs")
        cached = output.scheduled_cached_reqs
        _require_type(cached, CachedRequestData, "scheduled_cached_reqs")
        for name in ("req_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens"):
            _require_type(getattr(cached, name), list, f"scheduled_cached_reqs.{name}")
            if len(getattr(cached, name)) != len(cached.req_ids):
                raise RuntimeError(f"scheduled_cached_reqs.{name} is not as long as req_ids")
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            _require_type(new, NewRequestData, "scheduled_new_reqs[i]")
            computed[new.req_id] = new.num_computed_tokens
            self._num_blocks[new.req_id] = len(new.block_ids[0])
        resumed = cached.resumed_req_ids
        for request_id, blocks, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            computed[request_id] = num_computed
            held = 0 if request_id in resumed else self._num_blocks[request_id]
            self._num_blocks[request_id] = held + (len(blocks[0]) if blocks is not None else 0)
        self._verify_coverage(output, computed)

    def forget(self, request_id: str) -> None:
        """Drop a finished request."""
        self._num_blocks.pop(request_id, None)

    def _verify_coverage(self, output: SchedulerOutput, computed: dict[str, int]) -> None:
        if len(computed) != len(output.num_scheduled_tokens):
            raise RuntimeError("new and cached requests are not the scheduled ones")
        total = 0
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            total += num_tokens
            capacity = self._num_blocks[request_id] * self._block_tokens
            if computed[request_id] + num_tokens > capacity:
                raise RuntimeError(f"{request_id}: {computed[request_id]}+{num_tokens} over {capacity} tokens")
        if total != output.total_num_scheduled_tokens:
            raise RuntimeError(f"total_num_scheduled_tokens {output.total_num_scheduled_tokens} is not {total}")


class OutputCheck:
    """Requires one `EngineCoreOutput` per emitted token, the finish reasons, and the step's statistics."""

    def verify(self, outputs: dict[int, EngineCoreOutputs], emitted: dict[str, int], finished: list[str]) -> None:
        """Raise TypeError for a lazy payload, RuntimeError for a token or finish that differs."""
        for engine_outputs in outputs.values():
            _require_type(engine_outputs, EngineCoreOutputs, "update_from_output()[i]")
            _require_type(engine_outputs.outputs, list, "EngineCoreOutputs.outputs")
        items = [item for engine_outputs in outputs.values() for item in engine_outputs.outputs]
        for item in items:
            _require_type(item, EngineCoreOutput, "EngineCoreOutputs.outputs[i]")
        returned = {item.request_id: item.new_token_ids for item in items}
        if returned != {request_id: [token] for request_id, token in emitted.items()}:
            wrong = [r for r in {*returned, *emitted} if returned.get(r) != [emitted.get(r)]]
            raise RuntimeError(f"tokens of {sorted(wrong)[:4]} differ from what the model emitted")
        if {item.request_id for item in items if item.finished} != set(finished):
            raise RuntimeError(f"finished requests differ from {sorted(finished)[:4]}")
        if not any(engine_outputs.scheduler_stats is not None for engine_outputs in outputs.values()):
            raise RuntimeError("no scheduler_stats in the outputs of a step")
