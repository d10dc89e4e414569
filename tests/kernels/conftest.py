# SPDX-License-Identifier: Apache-2.0
"""Leaves the tests that need a Hopper GPU out of a run without one; `pytest tests/kernels/gpu` runs them there."""

import torch

collect_ignore = [] if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) else ["gpu"]
