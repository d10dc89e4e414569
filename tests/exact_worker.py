# SPDX-License-Identifier: Apache-2.0
"""The exact worker, its driver and its workloads: the entry for tests (see `tests/exact/`)."""

from __future__ import annotations

from exact.drafter import Drafter
from exact.driver import Driver, Report, run_scenario
from exact.memory import ExactError, KvMemory
from exact.reference import Answer, Stops, generate
from exact.runners import V1Runner, V2Runner
from exact.worker import ExactWorker, StepResult
from exact.workload import Arrival, Workload

__all__ = [
    "Answer",
    "Arrival",
    "Drafter",
    "Driver",
    "ExactError",
    "ExactWorker",
    "KvMemory",
    "Report",
    "StepResult",
    "Stops",
    "V1Runner",
    "V2Runner",
    "Workload",
    "generate",
    "run_scenario",
]
