# SPDX-License-Identifier: Apache-2.0
"""How hypothesis runs where an example is a whole run of a scheduler: the same examples each time, no clock."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

relaxed = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def random_runs(num_examples: int) -> settings:
    """Settings for random schedules; EXACT_EXAMPLES asks for another number of them, and a failure prints how to repeat it."""
    return settings(
        relaxed,
        max_examples=int(os.environ.get("EXACT_EXAMPLES", num_examples)),
        database=None,
        print_blob=True,
    )
