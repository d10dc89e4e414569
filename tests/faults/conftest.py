# SPDX-License-Identifier: Apache-2.0
"""Names the scheduler under test."""

import os

import pytest


@pytest.fixture
def scheduler() -> str:
    """`tokenspeed`; EXACT_SCHEDULER=vllm shows which of the public faults vLLM's own scheduler still has."""
    return os.environ.get("EXACT_SCHEDULER", "tokenspeed")
