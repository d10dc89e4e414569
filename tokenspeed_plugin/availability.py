# SPDX-License-Identifier: Apache-2.0
"""Settings whose feature this version does not have: asking for one is refused at start-up, one row each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenspeed_plugin.settings import ResolvedSettings, SettingsError, Source


@dataclass(frozen=True)
class Unavailable:
    """A setting that only takes some of its values in this version.

    Attributes:
        key: setting.
        is_there: whether a value can be had; explicit values only, defaults are never refused.
        available: the values that can be had.
        way_on: what to do instead.
    """

    key: str
    is_there: Callable[[Any], bool]
    available: str
    way_on: str


UNAVAILABLE: tuple[Unavailable, ...] = (
    Unavailable("kv_store", lambda value: value == "none", "none", "leave the flag out"),
    Unavailable(
        "kernels",
        lambda value: "moe=" not in value,
        "off, auto, mla=NAME, append=NAME, linear=NAME",
        "leave `moe=` out, vLLM has `--moe-backend`",
    ),
)


def available(key: str) -> str:
    """What this version has of the values that `key` takes."""
    return next((row.available for row in UNAVAILABLE if row.key == key), "all")


def refusal(key: str, value: object, source: Source) -> str | None:
    """Why `value`, given in `source`, cannot be had in this version; None when it can."""
    for row in UNAVAILABLE:
        if row.key == key and source is not Source.DEFAULT and not row.is_there(value):
            return (
                f"{source.spelling(key)}: {value!r} is not available in this version; "
                f"available: {row.available}. Way on: {row.way_on}."
            )
    return None


def refusals(resolved: ResolvedSettings) -> list[str]:
    """Every reason for which `resolved` cannot be had in this version."""
    found = (refusal(row.key, getattr(resolved.values, row.key), resolved.source(row.key)) for row in UNAVAILABLE)
    return [reason for reason in found if reason]


def require(resolved: ResolvedSettings) -> None:
    """Refuse settings that this version cannot honour.

    Raises:
        SettingsError: names every such setting, its value, its source and the way on.
    """
    if reasons := refusals(resolved):
        raise SettingsError("\n".join(reasons))
