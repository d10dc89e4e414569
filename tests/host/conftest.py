# SPDX-License-Identifier: Apache-2.0
"""Shares the fixtures of `plugin_fixtures`, and puts helpers of other folders on the path."""

import sys
from pathlib import Path

# Last wins: a test's own helpers, then those of all tests, then the demonstration's server.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "demo"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "real_vllm"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from plugin_fixtures import clean_environment, entry_point, run_python, stock_vllm

__all__ = ["clean_environment", "entry_point", "run_python", "stock_vllm"]
