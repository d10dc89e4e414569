# SPDX-License-Identifier: Apache-2.0
"""The exchange of rows without barriers: every interleaving of a small model of it, and what breaks with fewer slots."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenspeed_plugin.kernels.comm import library

State = tuple[tuple[tuple[int, int], ...], tuple[tuple[int, ...], ...]]
"""For each rank: call and steps done in it; for each rank the calls whose words its memory holds."""
Step = tuple[str, int, int]
"""`write`, `blank` or `read`, of a row, to or from a peer."""

BLANK = -1


class Model:
    """Ranks that make `calls` (rows of each); a row is written to each peer, blanked for each and read from each.

    `ahead`: so many rows are written and blanked before the one in front of them is read. A word stands for all words of one source.
    """

    def __init__(self, ranks: int, slots: int, calls: tuple[int, ...], ahead: int = 0) -> None:
        self.ranks, self.slots, self.calls, self.ahead = ranks, slots, calls, ahead
        self.max_rows = max(calls)
        self.order = [[self.steps_of_call(rank, rows) for rows in calls] for rank in range(ranks)]

    def steps_of_call(self, rank: int, rows: int) -> list[Step]:
        peers = [peer for peer in range(self.ranks) if peer != rank]
        found: list[Step] = []
        sent = 0
        for row in range(rows):
            while sent < min(rows, row + 1 + self.ahead):
                found += [(what, sent, peer) for what in ("write", "blank") for peer in peers]
                sent += 1
            found += [("read", row, peer) for peer in peers]
        return found

    def count(self, call: int, row: int) -> int:
        """Which call of this row it is; every rank counts alike."""
        return sum(1 for rows in self.calls[:call] if rows > row)

    def place(self, count: int, source: int, row: int) -> int:
        return (count % self.slots * self.ranks + source) * self.max_rows + row

    def start(self) -> State:
        memory = (BLANK,) * (self.slots * self.ranks * self.max_rows)
        return tuple((0, 0) for _ in range(self.ranks)), tuple(memory for _ in range(self.ranks))

    def steps(self, state: State) -> Iterator[tuple[State, str | None]]:
        """Every next state, with what is wrong about it."""
        at, memories = state
        for rank, (call, done) in enumerate(at):
            if call == len(self.calls):
                continue
            what, row, peer = self.order[rank][call][done]
            count = self.count(call, row)
            changed, problem = list(memories), None
            if what == "write":
                problem = self.change(changed, peer, self.place(count, rank, row), count, f"{rank} overwrites")
            elif what == "blank":
                place = self.place(count + self.slots - 1, peer, row)
                if self.is_unread(rank, at[rank], row, peer, changed[rank][place]):
                    problem = f"{rank} makes blank what it has not read"
                changed[rank] = (*changed[rank][:place], BLANK, *changed[rank][place + 1 :])
            elif (held := changed[rank][self.place(count, peer, row)]) == BLANK:
                continue  # it waits
            elif held != count:
                problem = f"{rank} takes call {held} of row {row} for call {count}"
            yield (self.moved(at, rank), tuple(changed)), problem

    def change(self, memories: list[tuple[int, ...]], owner: int, place: int, count: int, what: str) -> str | None:
        """Write; only blank memory may be written."""
        held = memories[owner][place]
        memories[owner] = (*memories[owner][:place], count, *memories[owner][place + 1 :])
        return None if held == BLANK else f"{what} call {held} with call {count}"

    def is_unread(self, rank: int, at: tuple[int, int], row: int, source: int, held: int) -> bool:
        """Whether the rank still needs the word of that call."""
        call, done = at
        read_now = ("read", row, source) in self.order[rank][call][:done]
        return held != BLANK and held >= self.count(call, row) + read_now

    def moved(self, at: tuple[tuple[int, int], ...], rank: int) -> tuple[tuple[int, int], ...]:
        call, done = at[rank]
        done += 1
        if done == len(self.order[rank][call]):
            call, done = call + 1, 0
        return (*at[:rank], (call, done), *at[rank + 1 :])

    def explore(self) -> str | None:
        """The first problem in any interleaving; None when all of them end."""
        seen, waiting = {self.start()}, [self.start()]
        while waiting:
            state = waiting.pop()
            following = list(self.steps(state))
            if not following and any(call < len(self.calls) for call, _ in state[0]):
                return f"stuck at {state[0]}"
            for after, problem in following:
                if problem is not None:
                    return problem
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
        return None


def slots_of_the_kernel() -> int:
    text = (Path(library.SOURCES.folder) / "params.cuh").read_text()
    found = re.search(r"kSlots = (\d+);", text)
    assert found is not None
    return int(found.group(1))


CASES = (
    (2, (1, 1, 1, 1, 1)),
    (2, (1, 2, 1, 2, 2, 1)),
    (2, (2, 1, 1, 1, 2)),
    (3, (1, 1, 1)),
    (3, (1, 2, 1)),
)


@pytest.mark.parametrize(("ranks", "calls"), CASES)
def test_no_interleaving_loses_a_row_or_gets_stuck(ranks: int, calls: tuple[int, ...]) -> None:
    assert Model(ranks, slots_of_the_kernel(), calls).explore() is None


MANY = ((2, 2, 2), (2, 3, 1, 3), (3, 1, 2))
"""Calls of two ranks whose blocks send their next row before they read the one before, or that have one row, as small calls."""


@pytest.mark.parametrize("calls", MANY)
def test_rows_that_are_sent_ahead_are_not_lost_either(calls: tuple[int, ...]) -> None:
    assert Model(2, slots_of_the_kernel(), calls, ahead=1).explore() is None


@pytest.mark.parametrize(("slots", "calls"), [(1, MANY[0]), (2, MANY[0]), (2, MANY[1])])
def test_sent_ahead_into_fewer_slots_they_are_lost(slots: int, calls: tuple[int, ...]) -> None:
    assert Model(2, slots, calls, ahead=1).explore() is not None


@pytest.mark.parametrize("fewer", [1, 2])
@pytest.mark.parametrize(("ranks", "calls"), CASES)
def test_with_fewer_slots_a_row_is_lost(ranks: int, calls: tuple[int, ...], fewer: int) -> None:
    assert Model(ranks, slots_of_the_kernel() - fewer, calls).explore() is not None
