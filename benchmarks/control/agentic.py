# SPDX-License-Identifier: Apache-2.0
"""Closed-loop agentic sessions: every turn sends the whole history again, tools answer after a while."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.control.driver import Driver, PlaneFactory, settle
from benchmarks.control.steps import OtherThreadsClock, StepLog, summarize
from benchmarks.control.tokens import mixed_hash, stream_tokens
from benchmarks.control.workloads import BUDGET_TOKENS, Result, blocks_for

SHARED_TOKENS = 8192
"""System prompt and tools, the same for every session."""
TURN_PROMPT_TOKENS = 300
TURN_OUTPUT_TOKENS = 150
MAX_CONTEXT_TOKENS = 65_536
MAX_TOOL_STEPS = 60

_LIMIT, _FRESH, _RENEWED, _DELAY = 1, 2, 3, 4  # salts of the random choices


@dataclass(frozen=True)
class AgenticShape:
    """`num_sessions` sessions for `num_turns` measured turns each, after one warm turn each."""

    num_sessions: int = 64
    block_tokens: int = 64
    num_turns: int = 4
    pool_share: float = 1.0
    """Pool size as a share of what all sessions at their longest need."""


@dataclass
class _Session:
    """One session; its own tokens follow the shared prefix."""

    session: int
    prompt_tokens: int
    limit_tokens: int
    own: list[int] = field(repr=False)
    turn: int = 0


def _new_session(session: int, fresh: bool) -> _Session:
    """Fresh sessions start at 16K to 56K tokens, those that replace a full one just above the shared prefix."""
    limit = 32_768 + mixed_hash(_LIMIT, session) % (MAX_CONTEXT_TOKENS - 32_768 + 1)
    if fresh:
        prompt = 16_384 + mixed_hash(_FRESH, session) % (57_344 - 16_384)
        limit = max(limit, prompt + 4 * (TURN_PROMPT_TOKENS + TURN_OUTPUT_TOKENS))
    else:
        prompt = SHARED_TOKENS + 1024 + mixed_hash(_RENEWED, session) % 1024
    own = stream_tokens(10 + session, SHARED_TOKENS, MAX_CONTEXT_TOKENS + 1024)
    return _Session(session, prompt, min(limit, MAX_CONTEXT_TOKENS), own)


class SessionLoop:
    """Runs the sessions over a driver, one engine step at a time."""

    def __init__(self, driver: Driver, num_sessions: int) -> None:
        self.driver = driver
        self.num_finished_turns = 0
        self._shared = stream_tokens(0, 0, SHARED_TOKENS)
        self._num_created = num_sessions
        self._step = 0
        self._num_idle = 0
        self._due: dict[int, list[_Session]] = {}
        self._running: dict[str, _Session] = {}
        driver.on_finish = self._finish
        for session in range(num_sessions):
            self._launch(_new_session(session, fresh=True))

    def run_turns(self, num_turns: int) -> None:
        """Step until `num_turns` more turns have finished."""
        target = self.num_finished_turns + num_turns
        while self.num_finished_turns < target:
            self._step += 1
            for session in self._due.pop(self._step, ()):
                self._launch(session)
            if self.driver.live:
                self._num_idle = 0 if self.driver.step() else self._num_idle + 1
                if self._num_idle > 3000:
                    raise RuntimeError(f"{self.driver.plane.name}: agentic sessions stalled")

    def _launch(self, session: _Session) -> None:
        request_id = f"s{session.session:05d}.{session.turn:04d}"
        split = session.prompt_tokens - SHARED_TOKENS
        self._running[request_id] = session
        output = session.own[split : split + TURN_OUTPUT_TOKENS]
        self.driver.add(request_id, self._shared + session.own[:split], output, TURN_OUTPUT_TOKENS)

    def _finish(self, request_id: str) -> None:
        session = self._running.pop(request_id)
        self.num_finished_turns += 1
        session.prompt_tokens += TURN_OUTPUT_TOKENS + TURN_PROMPT_TOKENS
        session.turn += 1
        if session.prompt_tokens + TURN_OUTPUT_TOKENS > session.limit_tokens:
            session = _new_session(self._num_created, fresh=False)
            self._num_created += 1
        delay = mixed_hash(_DELAY, session.session, session.turn) % MAX_TOOL_STEPS
        self._due.setdefault(self._step + 1 + delay, []).append(session)


def agentic(make: PlaneFactory, shape: AgenticShape) -> Result:
    """Steps, CPU seconds per 1,000 output tokens and hit rate of agentic traffic."""
    per_session = blocks_for(MAX_CONTEXT_TOKENS, shape.block_tokens)
    plane = make(
        block_tokens=shape.block_tokens,
        num_blocks=int((shape.num_sessions * per_session + 64) * shape.pool_share),
        max_requests=shape.num_sessions,
        budget_tokens=BUDGET_TOKENS,
    )
    settle()
    driver = Driver(plane)
    loop = SessionLoop(driver, shape.num_sessions)
    loop.run_turns(shape.num_sessions)
    cached, prompts, preempted = driver.cached_tokens, driver.prompt_tokens, plane.num_preemptions
    driver.log = StepLog()
    others = OtherThreadsClock()
    loop.run_turns(shape.num_sessions * shape.num_turns)
    others_us = others.elapsed_ns() / 1e3 / len(driver.log.steps)
    result: Result = {**summarize(driver.log), "other_threads_us_per_step": others_us}
    result["hit_rate"] = (driver.cached_tokens - cached) / max(1, driver.prompt_tokens - prompts)
    result["mean_prompt_tokens"] = (driver.prompt_tokens - prompts) / max(1, len(driver.log.adds_ns))
    result["preemptions"] = plane.num_preemptions - preempted
    return result
