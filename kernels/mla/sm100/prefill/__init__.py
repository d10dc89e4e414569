# SPDX-License-Identifier: Apache-2.0
"""Ragged MLA prefill on Blackwell in the CuTe DSL: compiled for sm_100a, never run on hardware."""
