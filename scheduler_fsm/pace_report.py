# SPDX-License-Identifier: Apache-2.0
"""What rates per user tell their metrics: about once a second, and when the engine runs out of work."""

import time
from typing import TYPE_CHECKING

from tokenspeed_plugin.host.kv_metrics import payload
from tokenspeed_plugin.host.pace_metrics import (
    CHUNK_TOKENS,
    COUNTS,
    DECODES,
    OF_A_CLASS,
    PREFIX,
    PROMPT_TOKENS,
    USERS_BELOW,
    class_entry,
)

if TYPE_CHECKING:
    from tokenspeed_plugin.scheduler_fsm._core import Core
    from tokenspeed_plugin.scheduler_fsm.pace import PaceClock

PERIOD_S = 1.0


class PaceReport:
    """Differences of sums since the last report, and gauges. Nothing of it is done for each row of a step."""

    def __init__(self, core: "Core", clock: "PaceClock") -> None:
        self._core = core
        self._clock = clock
        self._next_s = 0.0
        self._reported: dict[str, int] = {}

    def take(self) -> dict[str, int]:
        """The report as entries of a dictionary in vLLM's statistics; empty when it is not time."""
        now_s = time.monotonic()
        if now_s < self._next_s and self._core.num_running > 0:
            return {}
        self._next_s = now_s + PERIOD_S
        pace = self._core.pace()
        totals = {name: round(pace[name]) for name in COUNTS}
        for decodes, prompts, steps, *times_ms in self._core.step_classes():
            sums = (steps, *(round(1e3 * time_ms) for time_ms in times_ms))
            for what, value in zip(OF_A_CLASS, sums, strict=True):
                totals[class_entry(DECODES[decodes], PROMPT_TOKENS[prompts], what)] = value
        before, self._reported = self._reported, totals
        values = {name: total - before.get(name, 0) for name, total in totals.items()}
        values = {name: value for name, value in values.items() if value or name in COUNTS}
        values[CHUNK_TOKENS] = round(pace[CHUNK_TOKENS])
        values[USERS_BELOW] = self._core.users_below_target(self._clock.clock_s())
        return payload(values, PREFIX)
