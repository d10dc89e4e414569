# SPDX-License-Identifier: Apache-2.0
"""Kernels behind one registry: what was chosen, by which measurement, and why the others were not."""
