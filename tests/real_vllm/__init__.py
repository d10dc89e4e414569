# SPDX-License-Identifier: Apache-2.0
"""Tests that run real models on CPU inside an unmodified vLLM."""
