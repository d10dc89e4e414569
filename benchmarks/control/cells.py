# SPDX-License-Identifier: Apache-2.0
"""Cells: a workload with its numbers, written ``workload:key=value,key=value``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.control.agentic import AgenticShape, agentic
from benchmarks.control.driver import PlaneFactory
from benchmarks.control.workloads import (
    AdmissionShape,
    DecodeShape,
    PressureShape,
    Result,
    admit,
    decode,
    decode_pressure,
)


@dataclass(frozen=True)
class Workload:
    """A runnable workload, its shape and the short keys of its cells."""

    run: Callable[[PlaneFactory, Any], Result]
    shape: Callable[..., Any]
    keys: Mapping[str, tuple[str, type]]


_DECODE_KEYS: dict[str, tuple[str, type]] = {
    "N": ("num_requests", int),
    "bs": ("block_tokens", int),
    "ctx": ("context_tokens", int),
    "steps": ("num_steps", int),
    "pool": ("pool_factor", int),
    "waiting": ("num_waiting", int),
    "long": ("num_long_waiting", int),
}

WORKLOADS: dict[str, Workload] = {
    "decode": Workload(decode, DecodeShape, _DECODE_KEYS),
    "decode_pressure": Workload(
        decode_pressure,
        PressureShape,
        {
            "N": ("num_requests", int),
            "bs": ("block_tokens", int),
            "ctx": ("context_tokens", int),
            "gen": ("output_tokens", int),
            "frac": ("pool_share", float),
        },
    ),
    "agentic": Workload(
        agentic,
        AgenticShape,
        {
            "S": ("num_sessions", int),
            "bs": ("block_tokens", int),
            "turns": ("num_turns", int),
            "frac": ("pool_share", float),
        },
    ),
    "admit64k": Workload(admit, AdmissionShape, {"bs": ("block_tokens", int), "samples": ("num_samples", int)}),
}


@dataclass(frozen=True)
class Cell:
    """A parsed cell."""

    text: str
    workload: Workload
    shape: Any

    def run(self, make: PlaneFactory) -> Result:
        """Run the cell on a fresh plane."""
        return self.workload.run(make, self.shape)


def parse_cell(text: str) -> Cell:
    """Parse a cell; raise ValueError that names the workload, key or value and what is allowed."""
    name, _, arguments = text.partition(":")
    if name not in WORKLOADS:
        raise ValueError(f"cell {text!r}: workload {name!r} is not one of {sorted(WORKLOADS)}")
    workload = WORKLOADS[name]
    values: dict[str, Any] = {}
    for argument in filter(None, arguments.split(",")):
        key, _, value = argument.partition("=")
        if key not in workload.keys:
            raise ValueError(f"cell {text!r}: key {key!r} is not one of {sorted(workload.keys)}")
        field, kind = workload.keys[key]
        try:
            values[field] = kind(value)
        except ValueError:
            raise ValueError(f"cell {text!r}: {key}={value!r} is not {kind.__name__}") from None
    try:
        return Cell(text, workload, workload.shape(**values))
    except TypeError:
        raise ValueError(f"cell {text!r}: keys needed are N and bs") from None
