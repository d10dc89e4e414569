# SPDX-License-Identifier: Apache-2.0
"""Rates per user, as far as they are Python: the clock that steps are measured by, and the profile they start from."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tokenspeed_plugin.host.log import logger as named_logger
from tokenspeed_plugin.scheduler_fsm.step_profile import ProfileFile

if TYPE_CHECKING:
    from tokenspeed_plugin.scheduler_fsm._core import Core
    from tokenspeed_plugin.scheduler_fsm.statistics import Statistics

logger = named_logger(__name__)

_REPORT_EVERY_S = 60.0


class PaceClock:
    """The clock that steps are measured by, in seconds; once a minute it logs what was measured, and keeps the profile."""

    def __init__(
        self, core: "Core", clock_s: Callable[[], float] = time.perf_counter, profile: ProfileFile | None = None
    ) -> None:
        self.clock_s = clock_s
        self._core = core
        self._profile = profile
        self._next_report_s = clock_s() + _REPORT_EVERY_S

    def now_s(self) -> float:
        """The time now."""
        now_s = self.clock_s()
        if now_s >= self._next_report_s:
            self._next_report_s = now_s + _REPORT_EVERY_S
            logger.info("Pace: %s", ", ".join(f"{name} {value:.4g}" for name, value in self._core.pace().items()))
            if self._profile is not None:
                self._profile.save()
        return now_s


class Pace:
    """Starts the clock once somebody has a rate; until then nothing is measured."""

    def __init__(self, core: "Core", statistics: "Statistics | None", additional_config: object = None) -> None:
        self._core = core
        self._statistics = statistics
        self._profile = ProfileFile.named_in(additional_config, core)
        self._clock_s: Callable[[], float] = time.perf_counter
        self._clock: PaceClock | None = None
        self.start_when_asked()

    def start_when_asked(self) -> None:
        """A request arrived: it may be the first that has a rate."""
        if self._clock is None and self._core.is_paced:
            self._start()

    def use_clock(self, clock_s: Callable[[], float]) -> None:
        """Measure by another clock, in seconds."""
        self._clock_s = clock_s
        if self._clock is not None:
            self._start()

    def now_s(self) -> float:
        """The time now; 0 while nothing is measured."""
        return 0.0 if self._clock is None else self._clock.now_s()

    def close(self) -> None:
        """The engine ends: the next start is to know what this one learnt."""
        if self._profile is not None:
            self._profile.save()

    def _start(self) -> None:
        self._clock = PaceClock(self._core, self._clock_s, self._profile)
        if self._statistics is not None:
            self._statistics.follow_pace(self._clock)
