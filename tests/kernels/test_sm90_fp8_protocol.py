# SPDX-License-Identifier: Apache-2.0
"""The barriers of the Hopper kernel for e4m3 caches of 32 and 64 rows (`turned.cuh`, `producer.cuh`), under random timings.

A model of the loading warp, the copy engine and the two warpgroups: whoever can go on is drawn at random. Nothing may stop,
and nothing may be overwritten before it is read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import pytest

Steps = Generator[Callable[[], bool], None, None]
HALVES, PROBS = ((0, 1), (2, 3)), 4
"""Blocks of the latent dims that a warpgroup multiplies; the block of rope dims, where a tile's P goes."""


class HazardError(Exception):
    """Something was read that is not what should be there."""


@dataclass
class Barrier:
    """An mbarrier: how many phases are complete."""

    expected: int
    arrived: int = 0
    phases: int = 0

    def arrive(self, count: int = 1) -> None:
        self.arrived += count
        assert self.arrived <= self.expected
        if self.arrived == self.expected:
            self.arrived, self.phases = 0, self.phases + 1

    def passed(self, parity: int) -> Callable[[], bool]:
        return lambda: self.phases & 1 != parity


@dataclass
class Ring:
    """The ring of units in shared memory; `items` counts the tiles of the requests that the block works on."""

    units: int
    items: list[int]
    whole_release: bool = False
    blocks: dict[tuple[int, int], object] = field(default_factory=dict)
    copies: list[Callable[[], None]] = field(default_factory=list)
    announced: list[int] = field(default_factory=lambda: [0, 0])
    finished: list[int] = field(default_factory=lambda: [0, 0])
    products: list[list[int]] = field(default_factory=lambda: [[], []])

    def __post_init__(self) -> None:
        self.full = [[Barrier(1), Barrier(1)] for _ in range(self.units)]
        self.empty = [[Barrier(4), Barrier(8)] for _ in range(self.units)]

    def phase(self, unit: int) -> int:
        return unit // self.units & 1

    def read(self, unit: int, block: int, expected: object) -> None:
        found = self.blocks.get((unit % self.units, block))
        if found != expected:
            raise HazardError(f"unit {unit}, block {block}: {found} instead of {expected}")

    def load(self) -> Steps:
        for unit in range(sum(self.items)):
            slot, owner = unit % self.units, unit & 1
            for part in range(2):
                awaited = part if self.units % 2 == 0 or self.whole_release else 1
                yield self.empty[slot][awaited].passed(self.phase(unit) ^ 1)
                blocks = HALVES[owner ^ part] + ((PROBS,) if part else ())
                self.copies.append(lambda s=slot, p=part, u=unit, b=blocks: self._land(s, p, u, b))  # type: ignore[misc]

    def _land(self, slot: int, part: int, unit: int, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            self.blocks[slot, block] = unit
        self.full[slot][part].arrive()

    def consume(self, group: int) -> Steps:
        unit = 0
        for number, tiles in enumerate(self.items):
            yield from self._multiply_tiles(group, unit, tiles)
            unit += tiles
            self.finished[group] += 1
            yield lambda n=number: min(self.finished) > n  # type: ignore[misc]

    def _multiply_tiles(self, group: int, unit: int, tiles: int) -> Steps:
        last = tiles - 1
        for t in range((group ^ unit) & 1, tiles, 2):
            yield from self._scores(group, unit + t)
            if t > 1:
                self._release(unit + t - 2, 1)
            if t > 0:
                yield from self._await_other(group)
            self.blocks[(unit + t) % self.units, PROBS] = ("P", unit + t)
            self.announced[group] += 1
            if self.announced[group] > 1:
                raise HazardError("announced twice")
            if t > 0:
                yield from self._values(group, unit + t - 1, -1)
            yield from self._values(group, unit + t, unit + t - 1 if t > 0 else -1)
        if (group ^ unit ^ last) & 1:
            yield from self._await_other(group)
            yield from self._values(group, unit + last, unit + last - 1 if last > 0 else -1)
        self._release(unit + last, 1)

    def _scores(self, group: int, unit: int) -> Steps:
        for part in range(2):
            yield self.full[unit % self.units][part].passed(self.phase(unit))
            for block in HALVES[group ^ part] + ((PROBS,) if part else ()):
                self.read(unit, block, unit)
        yield lambda: True
        for block in range(5):
            self.read(unit, block, unit)

    def _await_other(self, group: int) -> Steps:
        yield lambda: self.announced[1 - group] > 0
        self.announced[1 - group] -= 1

    def _values(self, group: int, unit: int, finished: int) -> Steps:
        owner = unit & 1 == group
        if not owner:
            yield self.full[unit % self.units][1].passed(self.phase(unit))
        for block in HALVES[group]:
            yield lambda: True
            self.read(unit, block, unit)
            self.read(unit, PROBS, ("P", unit))
            if finished >= 0 and block == HALVES[group][0]:
                self._release(finished, 1)
        if owner:
            self._release(unit, 0)
        yield lambda: True
        self.read(unit, PROBS, ("P", unit))
        self.products[group].append(unit)

    def _release(self, unit: int, part: int) -> None:
        self.empty[unit % self.units][part].arrive(4)


def run(ring: Ring, seed: int) -> None:
    """Steps through the model; raises where it stops or reads what it must not."""
    chance = random.Random(seed)
    threads = dict(enumerate((ring.load(), ring.consume(0), ring.consume(1))))
    waits: dict[int, Callable[[], bool]] = dict.fromkeys(threads, lambda: True)
    weights = [chance.random() + 0.05 for _ in range(4)]
    while threads or ring.copies:
        ready: list[int] = [name for name in threads if waits[name]()] + ([3] if ring.copies else [])
        if not ready:
            raise HazardError("stopped")
        name = chance.choices(ready, [weights[n] for n in ready])[0]
        if name == 3:
            ring.copies.pop(chance.randrange(len(ring.copies)))()
            continue
        try:
            waits[name] = next(threads[name])
        except StopIteration:
            del threads[name]
    tiles = list(range(sum(ring.items)))
    assert ring.products == [tiles, tiles]


ITEMS = ([1], [2], [3], [1, 1, 1], [2, 1, 5, 1, 4], [17], [12, 9], [3, 3, 8])


@pytest.mark.parametrize("units", [4, 5])
def test_nothing_stops_and_nothing_is_overwritten(units: int) -> None:
    for items in ITEMS:
        for seed in range(40):
            run(Ring(units, items), seed)


def fails(make: Callable[[], Ring]) -> bool:
    for seed in range(60):
        try:
            run(make(), seed)
        except (HazardError, AssertionError):
            return True
    return False


def test_the_model_finds_faults() -> None:
    assert fails(lambda: Ring(2, [17]))  # no unit left to load while three are in use
    assert fails(lambda: Ring(5, [17], whole_release=True))  # the early part is another half of the dims next time
