# SPDX-License-Identifier: Apache-2.0
"""The barriers of the Blackwell decode kernel in a model of its warps and engines, over random timings.

Copy engine and tensor cores finish some time after they were asked; tensor cores work in order. Each process below waits
and arrives where its warp does (loading.py, products.py, softmax.py), for the depths of the layouts. Nothing may stop,
and nobody may overwrite what somebody has yet to read.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_plugin.kernels.mla.sm100.arithmetic import ring_phase, ring_slot
from tokenspeed_plugin.kernels.mla.sm100.layout import LATENT_SLOTS_OF_TILE, DecodeLayout

PARTS = LATENT_SLOTS_OF_TILE
Process = Iterator[Callable[[], bool]]


class StoppedError(AssertionError):
    """Nobody can go on."""


class Barrier:
    """An mbarrier with one arrival per phase: waiting on a parity ends when the phase of that parity is over."""

    def __init__(self) -> None:
        self.phase = 0

    def arrive(self) -> None:
        self.phase += 1

    def over(self, parity: int) -> Callable[[], bool]:
        return lambda: self.phase & 1 != parity


class Model:
    """One block that works through items of some tiles each."""

    def __init__(self, layout: DecodeLayout, items: list[int], seed: int) -> None:
        self.layout, self.items, self.chance = layout, items, random.Random(seed)
        self.barriers = {name: [Barrier() for _ in range(n)] for name, n in layout.barrier_counts.items()}
        self.memory: dict[tuple[str, int], object] = {}
        self.readers: dict[tuple[str, int], int] = {}  # how often what lies there is yet to be read
        self.asked: deque[Callable[[], None]] = deque()
        self.copies: list[Callable[[], None]] = []

    def barrier(self, name: str, index: int = 0) -> Barrier:
        return self.barriers[name][index]

    def put(self, place: tuple[str, int], what: object, readers: int) -> None:
        assert self.readers.get(place, 0) == 0, (
            f"{place} is overwritten with {what} while it holds {self.memory[place]}"
        )
        self.memory[place], self.readers[place] = what, readers

    def take(self, place: tuple[str, int], what: object) -> None:
        assert self.memory.get(place) == what, f"{place} holds {self.memory.get(place)}, not {what}"
        assert self.readers[place] > 0
        self.readers[place] -= 1

    def run(self) -> None:
        processes = [self.load_kv(), self.load_queries(), self.products(), self.soften()]
        waiting = {number: (process, next(process)) for number, process in enumerate(processes)}
        # Some are much slower than others, in each run others.
        speeds = [self.chance.choice([1, 100]) for _ in range(len(processes) + 2)]
        while waiting:
            ready = [number for number, (_, condition) in waiting.items() if condition()]
            ready += [len(processes)] * bool(self.asked) + [len(processes) + 1] * bool(self.copies)
            if not ready:
                raise StoppedError(f"{len(waiting)} processes wait for each other")
            (number,) = self.chance.choices(ready, [speeds[number] for number in ready])
            if number == len(processes):
                self.asked.popleft()()
            elif number > len(processes):
                self.copies.pop(self.chance.randrange(len(self.copies)))()
            else:
                self.step(waiting, number)

    def step(self, waiting: dict[int, tuple[Process, Callable[[], bool]]], number: int) -> None:
        process, _ = waiting[number]
        following = next(process, None)
        if following is None:
            del waiting[number]
        else:
            waiting[number] = (process, following)

    # ---- warps ----------------------------------------------------------------------------------------------------------

    def load_kv(self) -> Process:
        for index in range(sum(self.items)):
            for part in range(PARTS):
                filling = index * PARTS + part
                slot, phase = (f(filling, self.layout.latent_slots) for f in (ring_slot, ring_phase))
                yield self.barrier("latent empty", slot).over(phase ^ 1)
                self.copy(("latent", slot), (index, part), 2, self.barrier("latent full", slot))
            slot, phase = (f(index, self.layout.rope_slots) for f in (ring_slot, ring_phase))
            yield self.barrier("rope empty", slot).over(phase ^ 1)
            self.copy(("rope", slot), index, 1, self.barrier("rope full", slot))

    def copy(self, place: tuple[str, int], what: object, readers: int, full: Barrier) -> None:
        self.put(place, None, 0)  # from here on it may be overwritten

        def arrived() -> None:
            self.put(place, what, readers)
            full.arrive()

        self.copies.append(arrived)

    def load_queries(self) -> Process:
        for item, tiles in enumerate(self.items):
            yield self.barrier("query empty").over((item & 1) ^ 1)
            self.put(("query", 0), item, tiles)
            self.barrier("query full").arrive()

    def products(self) -> Process:
        index = 0
        for item, count in enumerate(self.items):
            yield self.barrier("query full").over(item & 1)
            for number in range(count + 1):
                if number < count:
                    yield from self.multiply_scores(item, index + number)
                else:
                    self.asked.append(self.barrier("query empty").arrive)
                if number > 0:
                    before = index + number - 1
                    yield self.barrier("probabilities full").over(before & 1)
                    self.multiply_values(item, before, number > 1)
            index += count

    def multiply_scores(self, item: int, index: int) -> Process:
        buffer = index % self.layout.score_buffers
        for part in range(PARTS):
            filling = index * PARTS + part
            slot, phase = (f(filling, self.layout.latent_slots) for f in (ring_slot, ring_phase))
            yield self.barrier("latent full", slot).over(phase)
            self.asked.append(lambda slot=slot, part=part: self.take(("latent", slot), (index, part)))
        slot, phase = (f(index, self.layout.rope_slots) for f in (ring_slot, ring_phase))
        yield self.barrier("rope full", slot).over(phase)
        self.asked.append(lambda: self.take(("rope", slot), index))
        self.asked.append(lambda: self.take(("query", 0), item))
        self.asked.append(lambda: self.put(("scores", buffer), index, 1))
        self.asked.append(self.barrier("rope empty", slot).arrive)
        self.asked.append(self.barrier("scores full", buffer).arrive)

    def multiply_values(self, item: int, index: int, add: bool) -> None:
        for part in range(PARTS):
            slot = ring_slot(index * PARTS + part, self.layout.latent_slots)
            self.asked.append(lambda slot=slot, part=part: self.take(("latent", slot), (index, part)))
            self.asked.append(self.barrier("latent empty", slot).arrive)
        self.asked.append(lambda: self.take(("probabilities", 0), index))
        if not add:
            self.asked.append(lambda: self.put(("output", 0), item, 1))
        self.asked.append(self.barrier("values done").arrive)

    def soften(self) -> Process:
        index = 0
        for item, count in enumerate(self.items):
            for _ in range(count):
                buffer = index % self.layout.score_buffers
                yield self.barrier("scores full", buffer).over((index // self.layout.score_buffers) & 1)
                self.take(("scores", buffer), index)
                yield self.barrier("values done").over((index & 1) ^ 1)
                self.put(("probabilities", 0), index, 1)
                self.barrier("probabilities full").arrive()
                index += 1
            yield self.barrier("values done").over((index - 1) & 1)
            self.take(("output", 0), item)


@pytest.mark.parametrize(("rows", "element"), [(16, "bfloat16"), (64, "bfloat16"), (32, "float8_e4m3fn")])
@settings(max_examples=60, deadline=None)
@given(items=st.lists(st.integers(1, 6), min_size=1, max_size=5), seed=st.integers(0, 1 << 30))
def test_it_neither_stops_nor_overwrites(rows: int, element: str, items: list[int], seed: int) -> None:
    model = Model(DecodeLayout.fitted(rows, element), items, seed)
    model.run()
    assert not any(model.readers.values())


@pytest.mark.parametrize("change", [{"latent_slots": 7}, {"latent_slots": 4}, {"latent_slots": 5, "rope_slots": 1}])
def test_a_ring_of_less_than_two_tiles_stops(change: dict[str, int]) -> None:
    """Which is why the layout refuses it."""
    layout = replace(DecodeLayout.fitted(64, "bfloat16"), **change)
    with pytest.raises(StoppedError, match="processes wait for each other"):
        Model(layout, [3, 2], 0).run()


def test_the_model_sees_scores_that_are_overwritten() -> None:
    """With one buffer the scores of the next tile would replace those that the softmax has yet to read."""
    layout = replace(DecodeLayout.fitted(64, "bfloat16"), score_buffers=1)
    runs = [Model(layout, [4], seed) for seed in range(50)]
    with pytest.raises(AssertionError, match=r"\('scores', 0\) is overwritten"):
        [model.run() for model in runs]
