# SPDX-License-Identifier: Apache-2.0
"""vLLM's own models and placed ones on the same ranks: step times, tokens, collectives, and how good the cost table is.

``python -m benchmarks.placement_gpu [--ranks N] [--models dense mla dense_8b] [--batches 1 16 128] [--prefill-tokens 8192]
[--reps 5] [--json FILE] [--table FILE] [--check]``. ``--quick`` runs tiny models on two CPU ranks, to test the benchmark
itself: its times mean nothing, its tokens and collectives do. With ``--ranks 1`` it shows what a placed model costs.

Each engine runs in a process of its own, one after another: timed as vLLM runs it (compiled, CUDA graphs), and once eagerly for
tokens and for counting collectives. ``--table FILE`` writes the cost table fitted from this run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.control.fleet import import_folder, worker_environment
from benchmarks.gpu.models import MODELS, TINY_MODELS, Model, write_model
from benchmarks.placed.bars import LINK_SIZES_BYTES, QUICK_LINK_SIZES_BYTES, fitted, placement_bars
from benchmarks.report import exit_code, print_outcomes, print_table, write_json

_DENSE_8B = {
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_ALL = {
    **MODELS,
    "dense_8b": Model("dense_8b", {**MODELS["dense"].config, **_DENSE_8B}, MODELS["dense"].kv_cache_bytes),
}


def systems_of(model: str, ranks: int, device: str = "cuda") -> dict[str, dict[str, Any]]:
    """Name -> placement and expert parallelism of the engines that are compared; vLLM's CPU kernel cannot split experts."""
    whole = f"attn=tp{ranks},dense=tp{ranks}"
    found: dict[str, dict[str, Any]] = {
        "stock": {"placement": None, "expert_parallel": False},
        "placed": {"placement": "auto", "expert_parallel": False},
    }
    if ranks > 1:
        found["placed, tokens split"] = {"placement": f"{whole},residual=sharded", "expert_parallel": False}
    if ranks > 1 and model == "mla" and device != "cpu":
        found["stock, experts"] = {"placement": None, "expert_parallel": True}
        found["placed, experts"] = {"placement": f"{whole},moe=ep{ranks}", "expert_parallel": True}
    return found


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=tuple(_ALL), default=["dense", "mla", "dense_8b"])
    parser.add_argument("--systems", nargs="+", help="some of the engines only, by name")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 128])
    parser.add_argument("--prefill-tokens", type=int, default=8192)
    parser.add_argument("--decode-steps", type=int, default=128)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--seconds-per-engine", type=float, default=600.0)
    parser.add_argument("--quick", action="store_true", help="tiny models on CPU")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--table", metavar="FILE", help="write the fitted cost table")
    parser.add_argument("--check", action="store_true", help="exit with 1 and name every bar that is not met")
    options = parser.parse_args(arguments)
    if options.quick:
        options.models = [name for name in options.models if name in TINY_MODELS][:1]
        options.batches, options.prefill_tokens, options.decode_steps, options.reps = [1, 3], 131, 8, 1
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    options = parse_arguments(arguments)
    figures: dict[str, Any] = {"ranks": options.ranks, "models": {}}
    with tempfile.TemporaryDirectory(prefix="placement-gpu-") as temporary:
        for name in options.models:
            measured = figures["models"][name] = {}
            folder = write_model((TINY_MODELS if options.quick else _ALL)[name], Path(temporary))
            for system, settings in systems_of(name, options.ranks, "cpu" if options.quick else "cuda").items():
                if not options.systems or system in options.systems:
                    measured[system] = _run(options, name, folder, settings, links=system == "stock")
                    write_json(options.json, figures, [])
    table, figures["links"] = fitted(figures)
    if options.table and table:
        Path(options.table).write_text(table.model_dump_json(indent=1) + "\n")
    outcomes = [bar.judge() for bar in placement_bars(figures)]
    write_json(options.json, figures, outcomes)
    _print(figures)
    print_outcomes(outcomes)
    return exit_code(outcomes, options.check)


def _run(
    options: argparse.Namespace, name: str, folder: Path, settings: dict[str, Any], *, links: bool
) -> dict[str, Any]:
    """Figures of one system: a timed engine and an eager one, which on CPU are the same."""
    shared = {
        **settings,
        "model": str(folder),
        "device": "cpu" if options.quick else "cuda",
        "ranks": options.ranks,
        "batches": options.batches,
        "prefill_tokens": options.prefill_tokens,
        "decode_steps": options.decode_steps,
        "reps": options.reps,
        "kv_cache_bytes": (TINY_MODELS if options.quick else _ALL)[name].kv_cache_bytes,
        "link_sizes_bytes": QUICK_LINK_SIZES_BYTES if options.quick else LINK_SIZES_BYTES,
    }
    links = links and options.ranks > 1
    if options.quick:
        return _engine({**shared, "timed": True, "eager": True, "links": links}, options.seconds_per_engine)
    timed = _engine({**shared, "timed": True, "eager": False, "links": links}, options.seconds_per_engine)
    eager = _engine({**shared, "timed": False, "eager": True, "links": False}, options.seconds_per_engine)
    return {**eager, **timed}


def _engine(options: dict[str, Any], seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.placed.engine_process"]
    environment = {**worker_environment(), "PYTHONPATH": str(import_folder())}
    try:
        done = subprocess.run(
            command,
            input=json.dumps(options),
            capture_output=True,
            text=True,
            timeout=seconds,
            env=environment,
            cwd=import_folder(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no figures after {seconds:.0f} s"}
    if done.returncode or not done.stdout:
        return {"error": " | ".join(done.stderr.splitlines()[-3:])[-800:]}
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _print(figures: dict[str, Any]) -> None:
    rows = []
    for model, systems in figures["models"].items():
        for system, found in systems.items():
            decode = ", ".join(f"{batch}: {ms:.2f}" for batch, ms in found.get("decode_ms", {}).items())
            moved = found.get("collectives", {}).get("decode", [])
            counted = ", ".join(f"{times} {kind} of {size} B" for kind, size, times in moved)
            prefill = f"{found['prefill_ms']:.1f}" if "prefill_ms" in found else found.get("error", "-")
            rows.append((f"{model}: {system}", decode or "-", prefill, counted or "-"))
    print_table("Step times", ("system", "decode ms by batch", "prefill ms", "collectives of a decode step"), rows)


if __name__ == "__main__":
    sys.exit(main())
