# SPDX-License-Identifier: Apache-2.0
"""Puts the shared test helpers on the path and names the scheduler under test."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@pytest.fixture
def scheduler() -> str:
    """`tokenspeed`; EXACT_SCHEDULER=vllm shows which of the public faults vLLM's own scheduler still has."""
    return os.environ.get("EXACT_SCHEDULER", "tokenspeed")
