# SPDX-License-Identifier: Apache-2.0
"""Drafters of the EAGLE kind share cached blocks: what they keep of a token depends on the token behind it.

So a block is only fit for another request when the token behind the block is the same there. vLLM 0.32 gives up the last block of
every match; since 0.33 the key of a block names the token behind it.
"""

from __future__ import annotations

from typing import Any

import pytest
from exact.timeline import Timeline
from exact.workload import words
from scheduler_harness import class_of, make_vllm_config
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix

BLOCK = 4
SCHEDULERS = ("vllm", "tokenspeed")
KNOBS = Knobs(groups=(Group(BLOCK),), num_spec_tokens=2, draft_method="eagle3", budget_tokens=64)
LOOKS_AHEAD = getattr(make_vllm_config(KNOBS), "num_hash_lookahead_tokens", 0) > 0


class DrafterMemory(Timeline):
    """Remembers which token stood behind the last token of each block when a drafter wrote it, and checks every block adopted."""

    def __init__(self, scheduler: str, knobs: Knobs) -> None:
        super().__init__(scheduler, knobs)
        self._behind: dict[int, int] = {}
        self._tables: dict[str, list[int]] = {}
        self.num_adopted = 0
        note_plan, self._wrap_plan = self._wrap_plan, None

        def look(plan: Any) -> Any:
            assert note_plan is not None
            self._adopt(plan)
            self._write(plan)
            return note_plan(plan)

        self._wrap_plan = look

    def _token(self, request_id: str, position: int) -> int:
        account = self.ledger.accounts[request_id]
        return [*account.prompt, *account.answer.tokens, -1][position]

    def _adopt(self, plan: Any) -> None:
        for new in plan.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
            for index in range(new.num_computed_tokens // BLOCK):
                self.num_adopted += 1
                behind = self._behind[new.block_ids[0][index]]
                assert behind == self._token(new.req_id, (index + 1) * BLOCK), f"{new.req_id}, block {index}"
        cached = plan.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            self._tables[request_id] += [] if blocks is None else blocks[0]

    def _write(self, plan: Any) -> None:
        cached = plan.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, count in plan.num_scheduled_tokens.items():
            num_true = len(self.ledger.accounts[request_id].prompt) + len(
                self.ledger.accounts[request_id].answer.tokens
            )
            for position in range(starts[request_id], min(starts[request_id] + count, num_true)):
                if position % BLOCK == BLOCK - 1:
                    self._behind[self._tables[request_id][position // BLOCK]] = self._token(request_id, position + 1)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_are_adopted_only_when_the_same_token_follows(scheduler: str, depth: int) -> None:
    knobs = Knobs(**{**vars(KNOBS), "pipeline_depth": depth})
    run = DrafterMemory(scheduler, knobs)
    shared = words(1, 16)
    run.submit("first", [*shared, *words(2, 9)], 12)
    run.finish()
    for number in range(6):
        run.submit(f"other{number}", [*shared, *words(10 + number, 6)], 4)
    run.submit("same", [*shared, *words(2, 9)], 4)
    run.submit("longer", [*shared, *words(2, 9), *run.ledger.accounts["first"].answer.tokens, *words(3, 5)], 4)
    run.finish()
    assert {run.cached[f"other{number}"] for number in range(6)} == {12}, "another token stands behind the fourth block"
    assert run.cached["same"] == (24 if LOOKS_AHEAD else 20)
    assert run.cached["longer"] > run.cached["same"], "answers are found, too"
    assert run.num_adopted > 20


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_prompt_that_ends_with_its_block_waits_for_the_token_behind_it(scheduler: str) -> None:
    run = DrafterMemory(scheduler, KNOBS)
    run.submit("whole", words(4, 16), 2)
    run.finish()
    run.submit("again", words(4, 16), 2)
    run.submit("another", [*words(4, 16), *words(5, 3)], 2)
    run.finish()
    assert run.cached["again"] == (12 if LOOKS_AHEAD else 8)
    assert run.cached["another"] == 12


def test_other_drafters_share_blocks_as_without_drafts() -> None:
    run = Timeline("tokenspeed", Knobs(groups=(Group(BLOCK),), num_spec_tokens=2))
    assert class_of("tokenspeed", run.knobs).endswith("TokenSpeedScheduler")
    shared = words(1, 16)
    run.submit("first", [*shared, *words(2, 9)], 2)
    run.finish()
    run.submit("other", [*shared, *words(7, 6)], 2)
    run.finish()
    assert run.cached["other"] == 16
