# SPDX-License-Identifier: Apache-2.0
"""The exchange of rows without barriers: every interleaving of a small model of it, and what breaks with fewer slots."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenspeed_plugin.kernels.comm import library

State = tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, ...], ...]]
"""For each rank: call, rows done in it and steps done of the row; for each rank the calls whose words its memory holds."""

BLANK = -1


class Model:
    """Ranks that make `calls` (rows of each), one row after another; a row's turn: write to each peer, blank each, read each.

    A word stands for all words of one source.
    """

    def __init__(self, ranks: int, slots: int, calls: tuple[int, ...]) -> None:
        self.ranks, self.slots, self.calls = ranks, slots, calls
        self.max_rows = max(calls)

    def count(self, call: int, row: int) -> int:
        """Which call of this row it is; every rank counts alike."""
        return sum(1 for rows in self.calls[:call] if rows > row)

    def place(self, count: int, source: int, row: int) -> int:
        return (count % self.slots * self.ranks + source) * self.max_rows + row

    def start(self) -> State:
        memory = (BLANK,) * (self.slots * self.ranks * self.max_rows)
        return tuple((0, 0, 0) for _ in range(self.ranks)), tuple(memory for _ in range(self.ranks))

    def steps(self, state: State) -> Iterator[tuple[State, str | None]]:
        """Every next state, with what is wrong about it."""
        at, memories = state
        for rank, (call, row, done) in enumerate(at):
            if call == len(self.calls):
                continue
            count = self.count(call, row)
            peers = [peer for peer in range(self.ranks) if peer != rank]
            peer, what = peers[done % len(peers)], done // len(peers)
            changed, problem = list(memories), None
            if what == 0:
                problem = self.change(changed, peer, self.place(count, rank, row), count, f"{rank} overwrites")
            elif what == 1:
                place = self.place(count + self.slots - 1, peer, row)
                if self.unread(at[rank], peers, peer, row, changed[rank][place]):
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

    def unread(self, at: tuple[int, int, int], peers: list[int], source: int, row: int, held: int) -> bool:
        """Whether the rank still needs the word of that call."""
        call, at_row, done = at
        if held == BLANK or held < self.count(call, row):
            return False
        return row > at_row or held > self.count(call, row) or done <= 2 * len(peers) + peers.index(source)

    def moved(self, at: tuple[tuple[int, int, int], ...], rank: int) -> tuple[tuple[int, int, int], ...]:
        call, row, done = at[rank]
        done += 1
        if done == 3 * (self.ranks - 1):
            row, done = row + 1, 0
        if row == self.calls[call]:
            call, row = call + 1, 0
        return (*at[:rank], (call, row, done), *at[rank + 1 :])

    def explore(self) -> str | None:
        """The first problem in any interleaving; None when all of them end."""
        seen, waiting = {self.start()}, [self.start()]
        while waiting:
            state = waiting.pop()
            following = list(self.steps(state))
            if not following and any(call < len(self.calls) for call, _, _ in state[0]):
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


@pytest.mark.parametrize("fewer", [1, 2])
@pytest.mark.parametrize(("ranks", "calls"), CASES)
def test_with_fewer_slots_a_row_is_lost(ranks: int, calls: tuple[int, ...], fewer: int) -> None:
    assert Model(ranks, slots_of_the_kernel() - fewer, calls).explore() is not None
