# SPDX-License-Identifier: Apache-2.0
"""Which steps of known shapes `engines` measures: those to which a step model is fitted, and one shape again and again."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any, Protocol

from benchmarks.agentic.stock_limits import StockLimits
from benchmarks.gpu.engine_client import EngineFailedError

_DECODES = [[64, 1024], [256, 1024], [256, 2048], [448, 1024], [64, 8192]]
_PREFILLS = [[0, 48], [0, 384], [0, 1536], [8192, 384]]
_SHORT_ROWS, _SHORT_CONTEXT, _SHORT_PREFILLS = (1, 16, 64, 128, 256, 448), 64, [[0, 48], [0, 512]]
_REFERENCE_ROWS = 256

Reference = dict[str, float]
"""Milliseconds of the reference's step by system."""


class Ask(Protocol):
    """Has a system's engine run a command; raises EngineFailedError."""

    def __call__(self, system: str, command: str, **arguments: Any) -> dict[str, Any]:
        """Return the answer."""


class KnownSteps:
    """The shapes that both engines have room for.

    Args:
        engines: what was built, by system, as of `describe`.
        start: limits that stock was started with; steps are measured within them, whatever a point before was tuned to.
    """

    def __init__(
        self, options: argparse.Namespace, engines: Mapping[str, Mapping[str, Any]], start: StockLimits
    ) -> None:
        self._most_rows = min(options.stock_seqs, options.max_num_seqs) - 1  # and a prompt beside them
        self._most_tokens = options.max_model_len - 4100
        self._pool_tokens = min(one["num_blocks"] * one["block_tokens"] for one in engines.values())
        self._start = start

    def shapes(self, ask: Ask, systems: Iterable[str]) -> dict[str, Any]:
        """Measure what a step model is fitted to: `rows` of ours, and `short` contexts of each system."""
        most = self._most_tokens
        decodes = [
            [n, c]
            for n, c in _DECODES
            if n <= self._most_rows and c <= most and n * (c + 500) <= 0.9 * self._pool_tokens
        ]
        prefills = [[begin, new] for begin, new in _PREFILLS if begin + new <= most]
        short = [[n, _SHORT_CONTEXT] for n in _SHORT_ROWS if n <= self._most_rows]
        # Ours costs the host less, so its steps show more of the device.
        found = self._ask(ask, "ours", "step_shapes", decodes=decodes, prefills=prefills, stream=10_000)
        found["short"] = {
            system: self._ask(ask, system, "step_shapes", decodes=short, prefills=_SHORT_PREFILLS, stream=40_000)[
                "rows"
            ]
            for system in systems
        }
        return found

    def reference(self, ask: Ask, systems: Iterable[str]) -> Reference:
        """Return what a step of one shape takes at the moment; without a system whose engine fails."""
        found = {}
        for system in systems:
            try:
                answer = self._ask(
                    ask,
                    system,
                    "reference_steps",
                    rows=min(_REFERENCE_ROWS, self._most_rows),
                    context=_SHORT_CONTEXT,
                    stream=70_000,
                )
            except EngineFailedError:
                continue  # the next point of that system says so
            found[system] = answer["ms"]
        return found

    def _ask(self, ask: Ask, system: str, command: str, **arguments: Any) -> dict[str, Any]:
        limits = asdict(self._start) if system == "stock" else None
        return ask(system, command, limits=limits, **arguments)


def mean_reference(references: Sequence[Reference]) -> Reference:
    """Return the mean by system."""
    systems = {system for reference in references for system in reference}
    return {system: fmean(one[system] for one in references if system in one) for system in sorted(systems)}
