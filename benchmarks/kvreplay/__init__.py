# SPDX-License-Identifier: Apache-2.0
"""Replays request traces against KV caches of finite size."""
