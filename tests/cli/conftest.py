# SPDX-License-Identifier: Apache-2.0
"""Shares the fixtures of `plugin_fixtures`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plugin_fixtures import clean_environment, entry_point, run_python, stock_vllm

__all__ = ["clean_environment", "entry_point", "run_python", "stock_vllm"]
