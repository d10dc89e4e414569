# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the project: one module per claim, run as ``python -m benchmarks.NAME``."""
