# SPDX-License-Identifier: Apache-2.0
"""Cores that only the engine that is measured runs on, while all other engines stay on the rest.

Many engines stand side by side. Their processes sleep between turns, but what still wakes in them, and where the measured one
is moved to meanwhile, lengthens steps that are shorter on the GPU than on the host.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

_SIBLINGS: Final = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_MAX_PASSES: Final = 5
"""Over an engine's threads: one that starts meanwhile has the cores of the one that started it."""
_CORES_OF_A_PROCESS: Final = 2
"""One for the thread that does the step and does not sleep while it waits, one for those that bring and take its messages.

Where two cores are threads of one physical core, there is one of those for each process.
"""


@dataclass(frozen=True)
class CoreShare:
    """Which cores whoever is measured has to itself, and which all others have.

    Attributes:
        own: of the one that is measured.
        rest: of all others.
    """

    own: frozenset[int]
    rest: frozenset[int]

    @classmethod
    def of(cls, num_cores: int, ranks: int) -> CoreShare:
        """Take so many of this process's cores, all threads of a physical core together as far as they go.

        Raises:
            ValueError: too few for an engine of so many ranks, or nothing would be left to the others.
        """
        allowed = os.sched_getaffinity(0)
        least = _CORES_OF_A_PROCESS * _processes_of_an_engine(ranks)
        if not least <= num_cores < len(allowed):
            raise ValueError(
                f"{num_cores} own cores, allowed: from {least}, {_CORES_OF_A_PROCESS} for each process of an engine, "
                f"to {len(allowed) - 1}, one less than there are"
            )
        own = [core for group in _physical_cores(allowed) for core in group][:num_cores]
        return cls(frozenset(own), frozenset(allowed - set(own)))

    def confine(self, pid: int) -> None:
        """Keep a process and all below it on the rest."""
        _move(pid, self.rest)

    @contextmanager
    def given_to(self, pid: int) -> Iterator[None]:
        """A process and all below it run on the own cores, and on the rest again afterwards."""
        _move(pid, self.own)
        try:
            yield
        finally:
            _move(pid, self.rest)


def _processes_of_an_engine(ranks: int) -> int:
    """Client and core; a single rank runs in the core, several have a process each."""
    return 2 + (ranks if ranks > 1 else 0)


def _physical_cores(allowed: Iterable[int]) -> list[list[int]]:
    """The cores in groups that share execution units; one each where the kernel does not say."""
    groups: dict[str, list[int]] = {}
    for core in sorted(allowed):
        try:
            siblings = Path(_SIBLINGS.format(core)).read_text().strip()
        except OSError:
            siblings = str(core)
        groups.setdefault(siblings, []).append(core)
    return list(groups.values())


def _move(pid: int, cores: frozenset[int]) -> None:
    """Every thread of a process and of all processes below it."""
    for _ in range(_MAX_PASSES):
        if not [thread for thread in _threads(pid) if _moved(thread, cores)]:
            return


def _moved(thread: int, cores: frozenset[int]) -> bool:
    """Whether it was elsewhere; one that has ended needs nothing."""
    with contextlib.suppress(ProcessLookupError):
        if os.sched_getaffinity(thread) != cores:
            os.sched_setaffinity(thread, cores)
            return True
    return False


def _threads(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        for process in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [thread.id for thread in process.threads()]
    return found
