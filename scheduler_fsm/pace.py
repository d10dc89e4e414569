# SPDX-License-Identifier: Apache-2.0
"""The rate per user, as far as it is Python: the clock that steps are measured by, and chunk budgets of other distributions."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tokenspeed_plugin.hooks import plugin_manager
from tokenspeed_plugin.host.log import logger as named_logger

if TYPE_CHECKING:
    from tokenspeed_plugin.scheduler_fsm._core import Core

logger = named_logger(__name__)

_REPORT_EVERY_S = 60.0


class PaceClock:
    """The clock that steps are measured by, in seconds; once a minute it logs what was measured."""

    def __init__(self, core: "Core", clock_s: Callable[[], float] = time.perf_counter) -> None:
        self.clock_s = clock_s
        self._core = core
        self._next_report_s = clock_s() + _REPORT_EVERY_S

    def now_s(self) -> float:
        """The time now."""
        now_s = self.clock_s()
        if now_s >= self._next_report_s:
            self._next_report_s = now_s + _REPORT_EVERY_S
            logger.info("Pace: %s", ", ".join(f"{name} {value:.4g}" for name, value in self._core.pace().items()))
        return now_s


def clock_of(core: "Core") -> PaceClock | None:
    """The clock of a core with a rate per user; None without one: then nothing is measured.

    A chunk budget that another distribution offers takes the place of ours.
    """
    if core.pace()["target_period_ms"] == 0:
        return None
    budget = plugin_manager().hook.tokenspeed_chunk_budget()
    if budget is not None:
        core.set_chunk_budget(budget)
    return PaceClock(core)
