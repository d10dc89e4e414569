# SPDX-License-Identifier: Apache-2.0
"""Makes the traffic of a run out of a trace: how many sessions, how long, how fast; and traffic without a trace."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.agentic.loaders import TraceError, load
from benchmarks.agentic.trace import Prompt, Session, Trace, Turn

SYNTHETIC = "synthetic"


@dataclass(frozen=True)
class Shape:
    """Scaling of a trace.

    Args:
        num_sessions: 0 takes those of the trace; more than it has repeats them with content of their own.
        rate: recorded waits and starts are divided by it.
        length: prompts are multiplied by it, block by block, so that what is shared stays shared.
        output_length: the same for answers.
        most_gap_s: longer waits are cut to it.
        most_tokens: turns whose prompt and answer exceed it are left out.
        most_turns: 0 takes all.
        ramp_s: sessions start spread over it, each at a random turn of its own; 0 keeps recorded starts.
        seed: of all random choices.
    """

    num_sessions: int = 0
    rate: float = 1.0
    length: float = 1.0
    output_length: float = 1.0
    most_gap_s: float = 60.0
    most_tokens: int = 131_072
    most_turns: int = 0
    ramp_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rate", "length", "output_length", "most_tokens"):
            if not getattr(self, name) > 0:
                raise TraceError(f"{name} is {getattr(self, name)}; allowed: a number above 0")
        for name in ("num_sessions", "most_gap_s", "most_turns", "ramp_s", "seed"):
            if getattr(self, name) < 0:
                raise TraceError(f"{name} is {getattr(self, name)}; allowed: 0 or more")


def open_trace(source: str, shape: Shape) -> Trace:
    """Return the traffic that `source` (a path, or ``synthetic``) gives in this shape."""
    trace = synthetic(max(1, shape.num_sessions), shape.seed) if source == SYNTHETIC else load(source)
    return shaped(trace, shape)


def shaped(trace: Trace, shape: Shape) -> Trace:
    """Return `trace` in this shape. Raises TraceError when nothing of it is left."""
    random = np.random.default_rng(shape.seed)
    fitting_sessions = tuple(filter(None, (_fitting(session, shape) for session in trace.sessions)))
    if not fitting_sessions:
        raise TraceError(f"{trace.name}: no turn has at most {shape.most_tokens} tokens; allowed: a larger most_tokens")
    sessions = []
    for number, session in enumerate(_chosen(fitting_sessions, shape, random)):
        fitting = list(session.turns)
        start_s = session.start_s / shape.rate
        if shape.ramp_s > 0:
            start_s = float(random.uniform(0, shape.ramp_s))
            first = int(random.integers(0, max(1, len(fitting) // 2)))
            fitting = fitting[first:]
        fitting = fitting[: shape.most_turns or None]
        fitting[0] = replace(fitting[0], gap_s=0.0)
        sessions.append(Session(f"{session.name}.{number}", start_s, tuple(fitting)))
    sessions.sort(key=lambda session: session.start_s)
    return Trace(trace.name, tuple(sessions))


def _fitting(session: Session, shape: Shape) -> Session | None:
    """Return the session scaled, without turns that are too long; None when none is left."""
    scaled = (_scaled(turn, shape) for turn in session.turns)
    turns = tuple(turn for turn in scaled if turn.prompt.num_tokens + turn.output_tokens <= shape.most_tokens)
    return replace(session, turns=turns) if turns else None


def _chosen(sessions: tuple[Session, ...], shape: Shape, random: np.random.Generator) -> list[Session]:
    """Return the sessions to run; a copy beyond the first gets content of its own."""
    if not shape.num_sessions:
        return list(sessions)
    if all(len(session.turns) == 1 for session in sessions):
        return list(sessions[: shape.num_sessions])  # a log of requests: its beginning
    order = random.permutation(len(sessions))
    chosen = []
    for number in range(shape.num_sessions):
        copy, index = divmod(number, len(order))
        session = sessions[int(order[index])]
        chosen.append(_respaced(session, copy) if copy else session)
    return chosen


def _respaced(session: Session, copy: int) -> Session:
    def moved(turn: Turn) -> Turn:
        return replace(turn, prompt=replace(turn.prompt, space=turn.prompt.space + copy * 1_000_003))

    return replace(session, turns=tuple(moved(turn) for turn in session.turns))


def _scaled(turn: Turn, shape: Shape) -> Turn:
    prompt = turn.prompt
    block_tokens = max(1, round(prompt.block_tokens * shape.length)) if len(prompt.block_ids) else 1
    # Whole blocks scale alike, so the length follows the blocks that are really there.
    factor = block_tokens / prompt.block_tokens if len(prompt.block_ids) else shape.length
    num_tokens = max(1, round(prompt.num_tokens * factor))
    return Turn(
        min(turn.gap_s / shape.rate, shape.most_gap_s),
        replace(prompt, block_tokens=block_tokens, num_tokens=num_tokens),
        max(1, round(turn.output_tokens * shape.output_length)),
    )


def synthetic(num_sessions: int, seed: int = 0, num_turns: int = 12) -> Trace:
    """Return sessions behind one shared prefix of system prompt and tools, with growing histories of their own.

    Lengths are drawn around the medians of the public coding-agent trace, a tenth of its prompt lengths: the prefix has
    1,536 tokens, a turn adds 16 to 512, answers have 16 to 1,024, tools take 1 to 30 s.
    """
    random = np.random.default_rng(seed)
    block_tokens = 16
    num_shared = 1536 // block_tokens
    sessions = []
    for number in range(num_sessions):
        num_blocks = num_shared + int(random.integers(64, 256))
        turns = []
        for turn in range(num_turns):
            num_output = int(np.clip(random.lognormal(5.3, 0.8), 16, 1024))
            own = (np.arange(num_shared, num_blocks) + (number + 1) * 65_536).astype(np.uint32)
            ids = np.concatenate([np.arange(num_shared, dtype=np.uint32), own])
            prompt = Prompt(0, ids, block_tokens, num_blocks * block_tokens, number * num_turns + turn)
            gap_s = float(np.clip(random.lognormal(2.0, 1.0), 1.0, 30.0)) if turn else 0.0
            turns.append(Turn(gap_s, prompt, num_output))
            num_blocks += -(-num_output // block_tokens) + int(random.integers(1, 33))
        sessions.append(Session(f"synthetic{number}", 0.2 * number, tuple(turns)))
    return Trace(SYNTHETIC, tuple(sessions))
