# SPDX-License-Identifier: Apache-2.0
"""How hypothesis runs where an example is a whole run of a scheduler: the same examples each time, no clock."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

relaxed = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
