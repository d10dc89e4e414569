# SPDX-License-Identifier: Apache-2.0
"""Tables of a GPU run."""

from __future__ import annotations

from typing import Any

from benchmarks.report import console, print_table

_PROFILE_PARTS = ("schedule", "execute_model", "sample_tokens", "update_from_output", "rest", "whole_step")


def print_run(figures: dict[str, Any]) -> None:
    """Print every part of every model."""
    printers = {"engine": _print_engine, "profile": _print_profile, "tokens": _print_tokens, "server": _print_server}
    for model, parts in figures.items():
        for part, measured in parts.items():
            if "error" in measured:
                console().print(f"{model}, {part}: {measured['error']}")
            else:
                printers[part](model, measured)


def _print_engine(model: str, measured: dict[str, Any]) -> None:
    rows = []
    for count, systems in measured["counts"].items():
        stock, ours = systems.get("stock"), systems.get("ours")
        ratio = f"{ours['tokens_per_s'] / stock['tokens_per_s']:.2f}" if stock and ours else "-"
        row = [f"N={count}"]
        for key, digits in (("tokens_per_s", 0), ("step_p50_ms", 2)):
            row += [f"{system[key]:,.{digits}f}" if system else "-" for system in (stock, ours)]
        rows.append([*row, ratio])
    columns = ("running", "stock tokens/s", "ours tokens/s", "stock ms/step", "ours ms/step", "ours/stock")
    print_table(f"{model}: EngineCore out of process, {_engine_line(measured)}", columns, rows)
    for count, systems in measured["frontend"].items():
        for system, result in systems.items():
            console().print(f"{model}, {system}, LLM.generate N={count}: {result['tokens_per_s']:,.0f} tokens/s")


def _engine_line(measured: dict[str, Any]) -> str:
    lines = []
    for system, built in measured["engines"].items():
        mode = "async" if built["async_scheduling"] else "sync"
        runner = "V2" if built["v2_model_runner"] else "V1"
        lines.append(f"{system}: vLLM {built['vllm']}, {mode}, runner {runner}, started in {built['startup_s']:.0f} s")
    return "; ".join(lines)


def _print_profile(model: str, measured: dict[str, Any]) -> None:
    rows = []
    for count, systems in measured["counts"].items():
        for system, parts in systems.items():
            whole = parts["whole_step"]
            shares = [f"{parts[name]:.2f} ({parts[name] / whole:.0%})" for name in _PROFILE_PARTS]
            rows.append([f"N={count} {system}", *shares])
    title = f"{model}: parts of a decode step, EngineCore in process, p50 ms (share of the step)"
    print_table(title, ("running", *_PROFILE_PARTS), rows)


def _print_tokens(model: str, measured: dict[str, Any]) -> None:
    if "mismatches" not in measured:
        console().print(f"{model}, tokens: only {', '.join(measured['engines'])} was run")
        return
    kernels = "batch-invariant" if measured["batch_invariant"] else "usual"
    console().print(
        f"{model}: {len(measured['mismatches'])} of {measured['requests']} requests differ ({kernels} kernels, "
        f"{measured['tokens']} tokens, {measured['distinct_tokens']} distinct, "
        f"{measured['constant_answers']} answers of one token)"
    )
    for entry in measured["mismatches"]:
        console().print(f"  {entry}")


def _print_server(model: str, measured: dict[str, Any]) -> None:
    rows = []
    for system, results in measured.items():
        for name in ("whole", "streaming"):
            result = results[name]
            cores = ", ".join(f"{role} {used:.2f}" for role, used in result["cores"].items())
            label = f"{system} {name}, N={results['requests']}"
            rows.append((label, f"{result['tokens_per_s']:,.0f}", result["bottleneck"], cores))
    print_table(f"{model}: vllm serve", ("system, answers", "tokens/s", "bottleneck", "cores used"), rows)
