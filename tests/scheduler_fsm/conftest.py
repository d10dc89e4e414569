# SPDX-License-Identifier: Apache-2.0
"""Puts the shared test helpers (`exact_worker`, `scheduler_harness`) on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
