# SPDX-License-Identifier: Apache-2.0
"""Device events on a clock of the test, which moves it on."""

from __future__ import annotations

CLOCK_MS = [0.0]


class Event:
    """Takes the place of `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.ms = CLOCK_MS[0]

    def elapsed_time(self, end: Event) -> float:
        return end.ms - self.ms
