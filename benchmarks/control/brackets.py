# SPDX-License-Identifier: Apache-2.0
"""Put something around the measured calls of a vLLM plane: `schedule` and `update_from_output`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MEASURED_CALLS = ("schedule", "update_from_output")


def bracket_calls(scheduler: Any, enter: Callable[[str], object], leave: Callable[[str], object]) -> None:
    """Replace the measured methods of one scheduler object by versions between `enter(name)` and `leave(name)`."""
    for name in MEASURED_CALLS:
        setattr(scheduler, name, _bracketed(name, getattr(scheduler, name), enter, leave))


def _bracketed(
    name: str, call: Callable[..., Any], enter: Callable[[str], object], leave: Callable[[str], object]
) -> Callable[..., Any]:
    def bracketed(*arguments: Any) -> Any:
        enter(name)
        try:
            return call(*arguments)
        finally:
            leave(name)

    return bracketed
