# SPDX-License-Identifier: Apache-2.0
"""The scheduler under test, and what it says at start-up."""

import logging
import os

import pytest


@pytest.fixture
def scheduler() -> str:
    """`tokenspeed`; EXACT_SCHEDULER=vllm shows which of the public faults vLLM's own scheduler still has."""
    return os.environ.get("EXACT_SCHEDULER", "tokenspeed")


@pytest.fixture
def start_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What a scheduler says about its KV cache when it starts."""
    from tokenspeed_plugin.scheduler_fsm import capacity_report

    named = logging.getLogger("capacity_report_under_test")
    monkeypatch.setattr(capacity_report, "logger", named)
    caplog.set_level(logging.INFO, named.name)
    return caplog
