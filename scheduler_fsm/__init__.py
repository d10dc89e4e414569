# SPDX-License-Identifier: Apache-2.0
"""Request state machine and scheduling policy (C++), and the adapter to the SchedulerInterface of vLLM."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenspeed_plugin.scheduler_fsm.scheduler import TokenSpeedScheduler

__all__ = ["TokenSpeedScheduler"]


def __getattr__(name: str) -> Any:
    # The adapter needs vLLM, the core does not: importing this package must work without it.
    if name == "TokenSpeedScheduler":
        from tokenspeed_plugin.scheduler_fsm.scheduler import TokenSpeedScheduler

        return TokenSpeedScheduler
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
