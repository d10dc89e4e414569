# SPDX-License-Identifier: Apache-2.0
"""Hands the work of vLLM's layers to kernels of the registry; the only room of `kernels` that knows vLLM."""
