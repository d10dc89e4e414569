# SPDX-License-Identifier: Apache-2.0
"""Bars of the placement benchmark, and the cost table that its links give."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.report import Bar, MissingFigureError
from benchmarks.served.answers import LARGEST_ERROR_RATIO, error_ratio, margin, noise_logprob
from tokenspeed_plugin.placement.algebra import Conversion, PlacementError
from tokenspeed_plugin.placement.cost import CostTable
from tokenspeed_plugin.placement.cost.cost_table import Sample
from tokenspeed_plugin.placement.cost.measurement import measured_table, prediction_errors

LINK_SIZES_BYTES = tuple(2**exponent for exponent in range(12, 28))
QUICK_LINK_SIZES_BYTES = (1 << 12, 1 << 16, 1 << 20)
CONTROL = "stock-unfused"
"""vLLM's own model with all-reduce and norm apart: rounds sums in another order than vLLM's default, which is the measure of that noise."""
UNFUSED = "placed-unfused"
"""Shows what the fused kernel gives; judged by nothing."""
OVERLAP = "placed-overlap"
"""Is there for its prefill, in which linear layers run over their reductions."""
SPLIT = "placed-split"
"""The residual stream split by force; its prefill is judged where the cost model chooses the same (``picked``)."""
LEAST_RATIO = 0.98
LEAST_PREFILL_RATIO, LEAST_OVERLAPPED_PREFILL_RATIO = 1.02, 1.1
LEAST_SMALL_DECODE_RATIO, SMALL_BATCH = 1.05, 16
LARGEST_PREDICTION_ERROR = 0.2


def peer_of(system: str) -> str:
    """The engine with vLLM's own model that a system is held against."""
    return "stock-experts" if system.endswith("experts") else "stock"


def fitted(figures: dict[str, Any]) -> tuple[CostTable | None, dict[str, Any]]:
    """The shipped table with the links of this run, and for each collective and size the error of a table without that size."""
    for systems in figures["models"].values():
        for found in systems.values():
            if found.get("links"):
                samples = {
                    Conversion(kind): [Sample(ring_bytes=size, time_us=us) for size, us in measured]
                    for kind, measured in found["links"].items()
                }
                changes = {Conversion(kind): sizes for kind, sizes in found.get("link_changes", {}).items()}
                try:
                    table = measured_table(CostTable.load(), figures["ranks"], samples, changes)
                except PlacementError as error:
                    print(f"no cost table: {error}", file=sys.stderr)
                    continue
                return table, {kind.value: own for kind, own in prediction_errors(samples, changes).items()}
    return None, {}


def placement_bars(figures: dict[str, Any]) -> list[Bar]:
    """Return the bars of everything that was run; what failed leaves its bars unmet."""
    bars = []
    for model, systems in figures["models"].items():
        for system in systems:
            if system.startswith(("placed", "ours")) and system != UNFUSED:
                bars += _bars_of(model, systems, system, figures["ranks"])
    if figures["ranks"] > 1:
        bars.append(_prediction_bar(figures))
    return bars


def _bars_of(model: str, systems: dict[str, Any], system: str, ranks: int) -> list[Bar]:
    peer = peer_of(system)
    batches = systems[system].get("decode_ms", {})
    split = system == SPLIT
    # A forced split is there for its prefill where the cost model would have it; decode steps are judged as that has them.
    judged = () if split else batches
    bars = [_ratio(model, systems, system, peer, f"decode at batch {batch}", ("decode_ms", batch)) for batch in judged]
    prefill = LEAST_PREFILL_RATIO if split else LEAST_OVERLAPPED_PREFILL_RATIO if system == OVERLAP else LEAST_RATIO
    if not split or systems[system]["picked"]:
        bars.append(_ratio(model, systems, system, peer, "prefill", ("prefill_ms",), prefill))
    if system in ("placed", "ours") and ranks > 1:
        small = [batch for batch in batches if int(batch) <= SMALL_BATCH]
        for batch in small:
            what = f"decode at batch {batch}, own kernel"
            least = LEAST_SMALL_DECODE_RATIO
            bars.append(_ratio(model, systems, system, peer, what, ("decode_ms", batch), least))
            # Small models wait for the host, whatever the kernels take: what the kernel gives is seen on the device.
            bars.append(_ratio(model, systems, system, peer, f"{what}, GPU time", ("decode_gpu_ms", batch), least))
    bars.append(_tokens(model, systems, system, "tokens", exact=ranks == 1))
    bars.append(_tokens(model, systems, system, "tokens_as_run", exact=False))
    if CONTROL in systems:
        claim = f"{model}, {system}, as it runs: mean error of log-probabilities against {peer}, over {CONTROL}'s"
        bars.append(Bar(claim, "<=", LARGEST_ERROR_RATIO, lambda: _error_ratio(systems, system)))
    return bars


def _ratio(
    model: str,
    systems: dict[str, Any],
    system: str,
    peer: str,
    what: str,
    keys: tuple[str, ...],
    least: float = LEAST_RATIO,
) -> Bar:
    def ratio() -> float:
        return float(_figure(systems, peer, keys) / _figure(systems, system, keys))

    return Bar(f"{model}, {system}: {what}, speed over {peer}", ">=", least, ratio)


def _figure(systems: dict[str, Any], system: str, keys: tuple[str, ...]) -> Any:
    found = systems.get(system, {"error": "was not run"})
    for key in keys:
        if key not in found:
            raise MissingFigureError(f"{system}: {systems.get(system, {}).get('error', 'no ' + key)}")
        found = found[key]
    return found


def _tokens(model: str, systems: dict[str, Any], system: str, kind: str, *, exact: bool) -> Bar:
    """On one rank, with batch-invariant kernels, the tokens are the same; else sums are rounded in another order."""

    def compared() -> dict[str, Any]:
        found: dict[str, Any] = _figure(systems, system, (kind,))
        if found["constant_answers"] * 2 > found["requests"]:
            raise MissingFigureError("most answers repeat one token: equality proves nothing")
        return found

    peer, how = peer_of(system), {"tokens": "batch-invariant", "tokens_as_run": "as it runs"}[kind]
    if exact:
        claim = f"{model}, {system}, {how}: requests whose greedy tokens differ from those of {peer}"
        return Bar(claim, "<=", 0.0, lambda: float(len(compared()["mismatches"])))
    claim = f"{model}, {system}, {how}: log-probability between the tokens of {peer} and ours where answers part"
    # Where vLLM parts from itself in the same mode, as much is noise.
    noise = noise_logprob(systems.get(CONTROL, {}).get(kind, {}).get("mismatches", ()))
    return Bar(claim, "<=", noise, lambda: max(map(margin, compared()["mismatches"]), default=0.0))


def _error_ratio(systems: dict[str, Any], system: str) -> float:
    ours, control = (_figure(systems, name, ("tokens_as_run",)) for name in (system, CONTROL))
    return error_ratio(ours, control)


def _prediction_bar(figures: dict[str, Any]) -> Bar:
    def largest() -> float:
        errors = [abs(error) for own in figures["links"].values() for _, error in own]
        if not errors:
            raise MissingFigureError("no link was measured")
        return max(errors)

    return Bar(
        "cost table: largest relative error at a size that it was not given", "<=", LARGEST_PREDICTION_ERROR, largest
    )
