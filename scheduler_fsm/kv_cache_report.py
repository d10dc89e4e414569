# SPDX-License-Identifier: Apache-2.0
"""What the flat KV cache tells its metrics: about once a second, and when the engine runs out of work."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tokenspeed_plugin.host.kv_metrics import BLOCK_STATES, EVICTION_KINDS, LOSS_REASONS, payload

if TYPE_CHECKING:
    from tokenspeed_plugin.scheduler_fsm._core import Core, HostedKv

PERIOD_S = 1.0


class KvCacheReport:
    """Differences of counters since the last report, and gauges. Nothing of it is done for each row of a step."""

    def __init__(self, core: "Core | HostedKv") -> None:
        self._core = core
        self._next_s = 0.0
        self._reported: dict[str, int] = {}

    def take(self, counters: Mapping[str, int], *, is_busy: bool) -> dict[str, int]:
        """The report as entries of a dictionary in vLLM's statistics; empty when it is not time.

        Args:
            counters: of the core, just read.
            is_busy: whether there is work left; the last report of all comes at once.
        """
        now_s = time.monotonic()
        if now_s < self._next_s and is_busy:
            return {}
        self._next_s = now_s + PERIOD_S
        evictions, gauges = self._core.eviction_counts(), self._core.kv_gauges()
        totals = {f"lost:{reason}": counters[counter] for reason, counter in LOSS_REASONS.items()}
        totals |= {f"evicted:{kind}": evictions[f"evictions_{kind}"] for kind in EVICTION_KINDS}
        totals |= {"copied": counters["block_copies"], "states_skipped": counters["lost_checkpoints"]}
        before, self._reported = self._reported, totals
        values = {name: total - before.get(name, 0) for name, total in totals.items()}
        values |= {f"blocks:{state}": int(gauges[state]) for state in BLOCK_STATES}
        values["fragmentation_ppm"] = round(1e6 * gauges["fragmentation"])
        return payload(values)
