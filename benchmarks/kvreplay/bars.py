# SPDX-License-Identifier: Apache-2.0
"""The bars of the flat KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.report import Bar, MissingFigureError

POOL_SHARES = (0.10, 0.25, 0.50)
MIN_GAP_CLOSED = {0.10: 0.10, 0.50: 0.40}
MIN_GAP_CLOSED_WITH_HINTS = {0.10: 0.60, 0.25: 0.60}
MAX_WORSE_CODING = 1.02
MAX_WORSE_MOONCAKE = 1.01


@dataclass
class Cell:
    """Blocks computed again that had been computed before, by system, of one trace, seed and pool."""

    trace: str
    seed: int
    pool_share: float
    num_recomputed: dict[str, int] = field(default_factory=dict)

    def figure(self, system: str) -> int:
        """Raises MissingFigureError when the system did not run."""
        if system not in self.num_recomputed:
            msg = f"{system} did not run on {self.trace}"
            raise MissingFigureError(msg)
        return self.num_recomputed[system]

    def ratio(self, system: str) -> float:
        """Recomputed blocks against LRU's."""
        return self.figure(system) / max(1, self.figure("lru"))


def gap_closed(cells: list[Cell], system: str) -> float:
    """Share of what separates LRU from the optimum that the system gains, over all cells together."""
    if not cells:
        msg = "no such cell"
        raise MissingFigureError(msg)
    lru = sum(cell.figure("lru") for cell in cells)
    optimum = sum(cell.figure("belady") for cell in cells)
    ours = sum(cell.figure(system) for cell in cells)
    return (lru - ours) / max(1, lru - optimum)


def _worst(cells: list[Cell], system: str) -> float:
    if not cells:
        msg = "no such cell"
        raise MissingFigureError(msg)
    return max(cell.ratio(system) for cell in cells)


def all_bars(cells: list[Cell]) -> list[Bar]:
    """Every bar."""
    coding = [cell for cell in cells if cell.trace == "coding-agent"]
    chat = [cell for cell in cells if cell.trace != "coding-agent"]
    bars = [
        Bar(
            f"coding-agent, {name}: worst cell against LRU",
            "<=",
            MAX_WORSE_CODING,
            lambda system=system: _worst(coding, system),
        )
        for name, system in (("no hints", "ours"), ("hints", "ours_hints"))
    ]
    for name, system, limits in (
        ("no hints", "ours", MIN_GAP_CLOSED),
        ("hints", "ours_hints", MIN_GAP_CLOSED_WITH_HINTS),
    ):
        for share, limit in limits.items():
            at_share = [cell for cell in coding if cell.pool_share == share]
            claim = f"coding-agent, {name}, pool {share:.0%}: gap to the optimum closed"
            bars.append(Bar(claim, ">=", limit, lambda at_share=at_share, system=system: gap_closed(at_share, system)))
    for trace in ("mooncake-conversation", "mooncake-synthetic"):
        of_trace = [cell for cell in chat if cell.trace == trace]
        bars.append(
            Bar(
                f"{trace}: worst cell against LRU",
                "<=",
                MAX_WORSE_MOONCAKE,
                lambda of_trace=of_trace: _worst(of_trace, "ours"),
            )
        )
    return bars
