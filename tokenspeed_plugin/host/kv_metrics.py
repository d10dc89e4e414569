# SPDX-License-Identifier: Apache-2.0
"""How the scheduler's figures about the KV cache travel from the engine core to the process that serves `/metrics`.

vLLM's `SchedulerStats` has no room for a scheduler's own figures. They ride in a dictionary of counts that it has for KV connectors,
under names that no connector uses, and are taken out again before vLLM's own loggers look at it.
"""

from collections.abc import Mapping
from typing import Any

_PREFIX = "tokenspeed:"

# Why tokens that had been computed before were computed again -> the core's counter.
LOSS_REASONS = {
    "evicted": "evicted_hit_tokens",
    "granularity": "granularity_lost_tokens",
    "missing_state": "missing_state_tokens",
    "isolation": "isolated_tokens",
}
BLOCK_STATES = ("free", "cached", "pinned", "in_use")
EVICTION_KINDS = ("superseded", "ended", "idle", "expected", "pinned")


def payload(values: Mapping[str, int], prefix: str = _PREFIX) -> dict[str, int]:
    """Entries for `SchedulerStats.num_kv_fetch_reqs_by_stage`."""
    return {prefix + name: value for name, value in values.items()}


def take_payload(scheduler_stats: Any, prefix: str = _PREFIX) -> dict[str, int]:
    """Takes the entries out of vLLM's statistics again; empty when there are none."""
    stages = scheduler_stats.num_kv_fetch_reqs_by_stage
    names = [name for name in stages if name.startswith(prefix)]
    return {name.removeprefix(prefix): stages.pop(name) for name in names}
