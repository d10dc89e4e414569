# SPDX-License-Identifier: Apache-2.0
"""Attention kernels inside whole engines: `python -m benchmarks.mla_engines`."""
