# SPDX-License-Identifier: Apache-2.0
"""Flat KV manager: block pool, prefix index and groups (C++), and its mapping from the configuration of vLLM."""
