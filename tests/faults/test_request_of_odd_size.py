# SPDX-License-Identifier: Apache-2.0
"""A request with numbers that no scheduler needs must not take the engine down: it runs, or fails alone."""

from __future__ import annotations

import pytest
from exact.timeline import Timeline
from scheduler_knobs import Knobs

pytestmark = pytest.mark.host_matrix


@pytest.mark.parametrize("priority", [2**40, -(2**40), 2**62])
def test_a_priority_of_any_size_is_a_priority(scheduler: str, priority: int) -> None:
    run = Timeline(scheduler, Knobs(policy="priority"))
    run.submit("odd", 5, 3, priority=priority)
    run.submit("plain", 5, 3)
    run.finish()
    assert (run.outcome("odd"), run.outcome("plain")) == ("length", "length")


def test_a_priority_beyond_all_bounds_fails_alone(scheduler: str) -> None:
    run = Timeline(scheduler, Knobs(policy="priority"))
    run.submit("odd", 5, 3, priority=2**70, refused=True)
    run.submit("plain", 5, 3)
    run.finish()
    assert (run.outcome("odd"), run.outcome("plain")) == ("error", "length")
