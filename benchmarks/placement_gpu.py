# SPDX-License-Identifier: Apache-2.0
"""vLLM's own models and placed ones on the same ranks: step times, tokens, collectives, and how good the cost table is.

``python -m benchmarks.placement_gpu [--ranks N] [--models dense mla dense_8b] [--batches 1 16 128] [--prefill-tokens 8192]
[--reps 5] [--json FILE] [--table FILE] [--check]``. ``--quick`` runs a tiny model on two CPU ranks, to test the benchmark
itself: its times mean nothing, its tokens and collectives do. With ``--ranks 1`` it shows what a placed model costs.

All engines of a model stand side by side, one process each, and are measured in turns: as vLLM runs them (compiled, CUDA graphs,
vLLM's scheduler), and eagerly, with batch-invariant kernels, for tokens and for counting collectives. ``--table FILE`` writes the
cost table fitted from this run.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.models import MODELS, TINY_MODELS, Model, write_model
from benchmarks.placed.bars import fitted, placement_bars
from benchmarks.placed.run import ModelRun
from benchmarks.report import exit_code, print_outcomes, print_table, write_json

_DENSE_8B = {
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_KV_CACHE_BYTES = 5 << 30
"""Of all ranks: enough for the largest batch and the longest prompt of every model, and little enough for ten engines of two ranks."""
_ALL = {
    name: Model(name, config, _KV_CACHE_BYTES)
    for name, config in (
        *((model.name, model.config) for model in MODELS.values()),
        ("dense_8b", {**MODELS["dense"].config, **_DENSE_8B}),
    )
}


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
    parser.add_argument("--seconds-to-start", type=float, default=400.0, help="for all engines of a model")
    parser.add_argument("--logs", metavar="FOLDER", help="keep the engines' logs there")
    parser.add_argument("--quick", action="store_true", help="a tiny model on CPU")
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
    known = TINY_MODELS if options.quick else _ALL
    with tempfile.TemporaryDirectory(prefix="placement-gpu-") as temporary:
        folder = Path(temporary)
        for name in options.models:
            run = ModelRun(options, name, write_model(known[name], folder), known[name].kv_cache_bytes // options.ranks)
            figures["models"][name] = run.measure(folder)
            write_json(options.json, figures, [])
        if options.logs:
            Path(options.logs).mkdir(parents=True, exist_ok=True)
            for log in folder.glob("*.log"):
                shutil.copy(log, options.logs)
    table, figures["links"] = fitted(figures)
    if options.table and table:
        Path(options.table).write_text(table.model_dump_json(indent=1) + "\n")
    outcomes = [bar.judge() for bar in placement_bars(figures)]
    write_json(options.json, figures, outcomes)
    _print(figures)
    print_outcomes(outcomes)
    return exit_code(outcomes, options.check)


def _print(figures: dict[str, Any]) -> None:
    rows = []
    for model, systems in figures["models"].items():
        for system, found in systems.items():
            decode = ", ".join(f"{batch}: {ms:.2f}" for batch, ms in found.get("decode_ms", {}).items())
            moved = found.get("collectives", {}).get("decode", [])
            counted = ", ".join(f"{times} {kind} of {size} B" for kind, size, times in moved)
            prefill = f"{found['prefill_ms']:.1f}" if "prefill_ms" in found else found.get("error", "-")
            device = ", ".join(f"{batch}: {ms:.2f}" for batch, ms in found.get("decode_gpu_ms", {}).items())
            rows.append((f"{model}: {system}", decode or "-", device or "-", prefill, counted or "-"))
    columns = ("system", "decode ms by batch", "of these on the GPU", "prefill ms", "collectives of a decode step")
    print_table("Step times", columns, rows)


if __name__ == "__main__":
    sys.exit(main())
