# SPDX-License-Identifier: Apache-2.0
"""The exchange of rows without barriers: every interleaving of a small model of it, and what breaks with one slot less."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenspeed_plugin.kernels.comm import library

State = tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, ...], ...]]
"""For each rank: call, rows done in it and words read or written of the row; for each rank the epochs in its staging memory."""


class Model:
    """Ranks that make `calls` (rows of each), one row after another; a row's turn: write to each peer, then read each peer.

    A word is one packet of one source. `epoch_bits` words of the epoch wrap.
    """

    def __init__(
        self, ranks: int, slots: int, calls: tuple[int, ...], first_epoch: int = 0, epochs: int = 1 << 32
    ) -> None:
        self.ranks, self.slots, self.calls, self.epochs = ranks, slots, calls, epochs
        self.first_epoch = first_epoch
        self.max_rows = max(calls)

    def epoch(self, call: int, row: int) -> int:
        """Which call of this row it is; every rank counts alike."""
        return (self.first_epoch + sum(1 for rows in self.calls[: call + 1] if rows > row)) % self.epochs

    def place(self, epoch: int, source: int, row: int) -> int:
        return (epoch % self.slots * self.ranks + source) * self.max_rows + row

    def start(self) -> State:
        stale = [(self.first_epoch - slot) % self.epochs for slot in range(self.slots)] if self.first_epoch else []
        memory = [0] * (self.slots * self.ranks * self.max_rows)
        for epoch in stale:
            for source in range(self.ranks):
                for row in range(self.max_rows):
                    memory[self.place(epoch, source, row)] = epoch
        return tuple((0, 0, 0) for _ in range(self.ranks)), tuple(tuple(memory) for _ in range(self.ranks))

    def steps(self, state: State) -> Iterator[tuple[State, str | None]]:
        """Every next state, with what is wrong about it."""
        at, memories = state
        for rank, (call, row, done) in enumerate(at):
            if call == len(self.calls):
                continue
            epoch = self.epoch(call, row)
            peers = [peer for peer in range(self.ranks) if peer != rank]
            changed, problem = list(memories), None
            if done < len(peers):
                peer = peers[done]
                place = self.place(epoch, rank, row)
                if self.unread(at, peer, rank, row, memories[peer][place]):
                    problem = f"rank {rank} overwrites call {memories[peer][place]} of row {row} before {peer} read it"
                changed[peer] = (*memories[peer][:place], epoch, *memories[peer][place + 1 :])
            elif memories[rank][self.place(epoch, peers[done - len(peers)], row)] != epoch:
                continue  # it waits
            yield (self.moved(at, rank), tuple(changed)), problem

    def unread(self, at: tuple[tuple[int, int, int], ...], reader: int, source: int, row: int, epoch: int) -> bool:
        """Whether the reader still needs the word of that epoch."""
        call, at_row, done = at[reader]
        peers = [peer for peer in range(self.ranks) if peer != reader]
        for later in range(call, len(self.calls)):
            if row < self.calls[later] and self.epoch(later, row) == epoch:
                if later > call or row > at_row:
                    return True
                return row == at_row and done <= len(peers) + peers.index(source)
        return False

    def moved(self, at: tuple[tuple[int, int, int], ...], rank: int) -> tuple[tuple[int, int, int], ...]:
        call, row, done = at[rank]
        done += 1
        if done == 2 * (self.ranks - 1):
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


@pytest.mark.parametrize(("ranks", "calls"), CASES)
def test_with_one_slot_a_fast_rank_overwrites_what_a_slow_one_needs(ranks: int, calls: tuple[int, ...]) -> None:
    found = Model(ranks, slots_of_the_kernel() - 1, calls).explore()
    assert found is not None
    assert "overwrites" in found


def test_the_count_of_calls_may_wrap() -> None:
    assert Model(2, slots_of_the_kernel(), (1, 1, 1, 1, 1), first_epoch=5, epochs=8).explore() is None
