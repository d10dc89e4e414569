# SPDX-License-Identifier: Apache-2.0
"""The cells of a full and of a quick run, and the bars that ours is held to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.control.figures import Figures
from benchmarks.report import Bar, MissingFigureError

BLOCKS = (16, 64, 128)

_SCALING = "decode:N=64,bs=16,ctx={ctx},steps=128"
BASE = _SCALING.format(ctx=4096) + ",waiting=128"
DOUBLED = {
    "context length": _SCALING.format(ctx=8192) + ",waiting=128",
    "pool size": BASE + ",pool=2",
    "waiting queue": _SCALING.format(ctx=4096) + ",waiting=256",
}
NOBODY_WAITS = _SCALING.format(ctx=4096)
LONG_WAIT = NOBODY_WAITS + ",long=4"

PRESSURE = "decode_pressure:N=128,bs=64,gen=1024,frac=0.93"
AGENTIC_PRESSURE = "agentic:S=64,bs=64,turns=3,frac=0.45"


def decode_cell(num_requests: int, block_tokens: int) -> str:
    """Return the steady-decode cell at 8K context."""
    steps = ",steps=128" if num_requests >= 1024 else ""
    return f"decode:N={num_requests},bs={block_tokens}{steps}"


def agentic_cell(block_tokens: int) -> str:
    """Return the agentic cell with a pool that holds everything."""
    return f"agentic:S=64,bs={block_tokens},turns=4"


FULL_CELLS = (
    *(decode_cell(256, block) for block in BLOCKS),
    *(decode_cell(1024, block) for block in (64, 128)),
    *(decode_cell(num, block) for num in (16, 64) for block in (64, 128)),
    *(agentic_cell(block) for block in BLOCKS),
    AGENTIC_PRESSURE,
    *(f"admit64k:bs={block}" for block in BLOCKS),
    PRESSURE,
    NOBODY_WAITS,
    LONG_WAIT,
    BASE,
    *DOUBLED.values(),
)
QUICK_CELLS = (decode_cell(256, 64), decode_cell(256, 128), "admit64k:bs=16", NOBODY_WAITS, LONG_WAIT)

INSTRUCTION_NOISE = 1.02
"""Counted twice, the same configuration stays within this ratio."""
CPU_TIME_NOISE = 1.3
"""Ratios of CPU time below this are read as equal on a shared machine; used where nothing counts instructions."""


@dataclass(frozen=True)
class CellBar:
    """A bar and the cells it needs."""

    cells: tuple[str, ...]
    bar: Bar


@dataclass(frozen=True)
class Contest:
    """Names of the systems that the bars compare."""

    ours: str = "ours"
    vllm: str = "vllm"
    tokenspeed: str = "tokenspeed"


def all_bars(figures: Figures, contest: Contest) -> list[CellBar]:
    """Return every bar; figures are read only when a bar is judged."""
    return [
        *_decode_bars(figures, contest),
        *_scale_bars(figures, contest),
        *_agentic_bars(figures, contest),
        *_admission_bars(figures, contest),
        *_pressure_bars(figures, contest),
        *_constant_cost_bars(figures, contest),
    ]


def _versus(figures: Figures, claim: str, cell: str, statistic: str, pair: tuple[str, str], limit: float) -> CellBar:
    ours, peer = pair
    bar = Bar(f"{cell}: {claim}", "<=", limit, lambda: figures.ratio(cell, statistic, ours, peer))
    return CellBar((cell,), bar)


def _decode_bars(figures: Figures, contest: Contest) -> Iterator[CellBar]:
    vllm = (contest.ours, contest.vllm)
    for block in BLOCKS:
        cell = decode_cell(256, block)
        third = Bar(
            f"{cell}: first bar, step p50 over vLLM's",
            "<",
            1 / 3,
            lambda cell=cell: figures.ratio(cell, "step_p50_us", *vllm),  # type: ignore[misc]
        )
        yield CellBar((cell,), third)
        yield _versus(figures, "step p50 over vLLM's", cell, "step_p50_us", vllm, 1 / 10)
        yield _versus(figures, "step p99 over vLLM's", cell, "step_p99_us", vllm, 1 / 5)
    pair = (contest.ours, contest.tokenspeed)
    cell = decode_cell(256, 128)
    yield _versus(figures, "step p50 over tokenspeed-scheduler's", cell, "step_p50_us", pair, 1 / 4)


def _scale_bars(figures: Figures, contest: Contest) -> Iterator[CellBar]:
    for block in (64, 128):
        large, small = decode_cell(1024, block), decode_cell(256, block)
        yield _versus(figures, "step p50 over vLLM's", large, "step_p50_us", (contest.ours, contest.vllm), 1 / 12)

        def per_request_ratio(large: str = large, small: str = small) -> float:
            at_1024 = figures.value(contest.ours, large, "step_p50_us") / 1024
            return at_1024 / (figures.value(contest.ours, small, "step_p50_us") / 256)

        claim = f"bs={block}: cost per request at N=1024 over N=256"
        yield CellBar((large, small), Bar(claim, "<=", 1.0, per_request_ratio))


def _agentic_bars(figures: Figures, contest: Contest) -> Iterator[CellBar]:
    pair = (contest.ours, contest.vllm)
    for block in BLOCKS:
        cell = agentic_cell(block)
        claim = "CPU seconds per 1k tokens over vLLM's"
        yield _versus(figures, claim, cell, "control_s_per_1k_tokens", pair, 1 / 5)

        def gained(cell: str = cell) -> float:
            return figures.value(contest.ours, cell, "hit_rate") - figures.value(contest.vllm, cell, "hit_rate")

        yield CellBar((cell,), Bar(f"{cell}: hit rate minus vLLM's", ">=", 0.0, gained))


def _admission_bars(figures: Figures, contest: Contest) -> Iterator[CellBar]:
    for phase in ("cold", "warm"):
        yield _versus(
            figures,
            f"{phase}, add + first plan over vLLM's",
            "admit64k:bs=16",
            f"{phase}_p50_us",
            (contest.ours, contest.vllm),
            1 / 6,
        )


def _pressure_bars(figures: Figures, contest: Contest) -> Iterator[CellBar]:
    pair = (contest.ours, contest.vllm)
    yield _versus(figures, "step p99 over vLLM's", PRESSURE, "step_p99_us", pair, 1 / 3)
    longest = Bar(
        f"{PRESSURE}: longest step of ours, ms",
        "<=",
        5.0,
        lambda: figures.value(contest.ours, PRESSURE, "step_max_us") / 1e3,
    )
    yield CellBar((PRESSURE,), longest)


def _constant_cost_bars(figures: Figures, contest: Contest) -> Iterator[CellBar]:
    yield _constant(figures, contest, "4 prompts of 64K wait for memory", NOBODY_WAITS, LONG_WAIT)
    for what, cell in DOUBLED.items():
        yield _constant(figures, contest, f"{what} doubled", BASE, cell)


def _constant(figures: Figures, contest: Contest, what: str, base: str, changed: str) -> CellBar:
    """Instructions decide where they were counted, CPU time elsewhere."""
    if figures.instructions:
        unit, limit = "instructions", INSTRUCTION_NOISE
    else:
        unit, limit = "CPU time", CPU_TIME_NOISE

    def ratio() -> float:
        if not figures.instructions:
            pair = [figures.value(contest.ours, cell, "step_p50_us") for cell in (changed, base)]
            return pair[0] / pair[1]
        if base not in figures.instructions or changed not in figures.instructions:
            raise MissingFigureError("instructions were not counted")
        return figures.instructions[changed] / figures.instructions[base]

    return CellBar((base, changed), Bar(f"{what}: {unit} per decode step, ratio", "<=", limit, ratio))
