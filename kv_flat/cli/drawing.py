# SPDX-License-Identifier: Apache-2.0
"""The picture of a pool: every block where it lies, whose blocks they are, and states over time."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from tokenspeed_plugin.kv_flat.kv_map import STATES, Snapshot

_FREE, _CACHED, _PINNED, _IN_USE = range(len(STATES))
# How much of a session's colour a block shows: the rest is white.
_STRENGTH = {_CACHED: 0.35, _PINNED: 0.65, _IN_USE: 1.0}
_STATE_GREYS = {_FREE: "#ffffff", _CACHED: "#c8c8c8", _PINNED: "#8f8f8f", _IN_USE: "#4d4d4d"}
_NOBODY = (0.45, 0.45, 0.45)
_MOST_ROWS = 24


@dataclass(frozen=True)
class Holding:
    """Blocks of one session that begin with one prefix.

    Attributes:
        session: number; 0: not known.
        prefix: beginning of the key of its first block; 0: none can be hit yet.
        num_by_state: blocks, in the order of STATES.
        num_shared: of these, in use by several requests.
    """

    session: int
    prefix: int
    num_by_state: tuple[int, ...]
    num_shared: int


def holdings_of(snapshot: Snapshot) -> list[Holding]:
    """Who holds what, most blocks first. Blocks with one run and state of use belong together; their head names the prefix."""
    columns = snapshot.columns
    used = np.flatnonzero(columns["state"] != _FREE)
    order = used[np.lexsort((columns["depth"][used], columns["run"][used], columns["state"][used] == _IN_USE))]
    is_new = np.ones(len(order), dtype=bool)
    runs, in_use = columns["run"][order], columns["state"][order] == _IN_USE
    is_new[1:] = (runs[1:] != runs[:-1]) | (in_use[1:] != in_use[:-1])
    sums: dict[tuple[int, int], NDArray[Any]] = {}
    for blocks in np.split(order, np.flatnonzero(is_new)[1:]) if len(order) else []:
        name = int(columns["session"][blocks[0]]), int(columns["key"][blocks[0]])
        counts = np.bincount(columns["state"][blocks], minlength=len(STATES))
        shared = np.count_nonzero(columns["owners"][blocks] > 1)
        sums[name] = sums.get(name, np.zeros(len(STATES) + 1, dtype=int)) + np.append(counts, shared)
    found = [Holding(*name, tuple(int(n) for n in total[:-1]), int(total[-1])) for name, total in sums.items()]
    return sorted(found, key=lambda holding: (-sum(holding.num_by_state), holding.session, holding.prefix))


def draw(snapshots: Sequence[Snapshot], path: Path) -> None:
    """Draw the last snapshot, and above one also how states changed, in the form that the path's suffix names."""
    figure = Figure(figsize=(11, 9 if len(snapshots) > 1 else 7), layout="constrained")
    heights = [4, 2] if len(snapshots) > 1 else [1]
    axes = figure.subplots(len(heights), 2, height_ratios=heights, squeeze=False)
    last = snapshots[-1]
    _draw_pool(axes[0][0], last)
    _draw_holdings(axes[0][1], last, holdings_of(last))
    if len(snapshots) > 1:
        below = axes[1][0].get_gridspec()
        for axis in axes[1]:
            axis.remove()
        _draw_history(figure.add_subplot(below[1, :]), snapshots)
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


def colour_of(session: int) -> tuple[float, float, float]:
    """A colour for a session, the same in every picture."""
    if session == 0:
        return _NOBODY
    golden = (session % 1_000_003) * 0.618033988749895 % 1.0
    return colorsys.hsv_to_rgb(golden, 0.75, 0.8)


def _draw_pool(axis: Any, snapshot: Snapshot) -> None:
    side = math.ceil(math.sqrt(snapshot.num_blocks))
    cells = np.ones((side * side, 3))
    sessions, numbers = np.unique(snapshot.columns["session"], return_inverse=True)
    colours = np.array([colour_of(int(session)) for session in sessions])[numbers]
    strength = np.array([_STRENGTH.get(state, 0.0) for state in range(len(STATES))])[snapshot.columns["state"]]
    cells[: snapshot.num_blocks] = 1.0 - (1.0 - colours) * strength[:, None]
    axis.imshow(cells.reshape(side, side, 3), interpolation="nearest")
    axis.set_title(f"{snapshot.num_blocks:,} blocks by number, {side} in a row")
    axis.set_xticks([])
    axis.set_yticks([])
    shades = [Patch(facecolor=_STATE_GREYS[i], edgecolor="#888888", label=_label(i)) for i in range(len(STATES))]
    axis.legend(handles=shades, loc="upper center", bbox_to_anchor=(0.5, -0.01), ncols=len(STATES), frameon=False)


def _draw_holdings(axis: Any, snapshot: Snapshot, holdings: list[Holding]) -> None:
    shown = holdings[:_MOST_ROWS]
    for row, holding in enumerate(shown):
        left = 0
        for state, strength in _STRENGTH.items():
            colour = tuple(1.0 - (1.0 - part) * strength for part in colour_of(holding.session))
            axis.barh(row, holding.num_by_state[state], left=left, color=colour, edgecolor="#666666", linewidth=0.4)
            left += holding.num_by_state[state]
        if holding.num_shared:
            axis.text(left, row, f" {holding.num_shared} shared", va="center", fontsize=7)
    axis.set_yticks(range(len(shown)), [_name(snapshot, holding) for holding in shown], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("blocks")
    more = f", {len(holdings) - len(shown)} smaller ones not shown" if len(holdings) > len(shown) else ""
    axis.set_title(f"by session and prefix{more}")


def _name(snapshot: Snapshot, holding: Holding) -> str:
    session = snapshot.session_names.get(holding.session, f"session {holding.session % 0xFFFF:04x}")
    prefix = f"{holding.prefix:08x}" if holding.prefix else "new"
    return f"{session if holding.session else 'no session'} / {prefix}"


def _draw_history(axis: Any, snapshots: Sequence[Snapshot]) -> None:
    seconds = [shot.time_s - snapshots[0].time_s for shot in snapshots]
    counts = [
        [shot.num_by_state()[STATES[state]] for shot in snapshots] for state in (_IN_USE, _PINNED, _CACHED, _FREE)
    ]
    colours = [_STATE_GREYS[state] for state in (_IN_USE, _PINNED, _CACHED, _FREE)]
    axis.stackplot(seconds, counts, colors=colours, edgecolor="#888888", linewidth=0.4)
    axis.set_xlabel("seconds")
    axis.set_ylabel("blocks")
    axis.margins(0)


def _label(state: int) -> str:
    return STATES[state].replace("_", " ")
