# SPDX-License-Identifier: Apache-2.0
"""vLLM's own models and placed ones on the same ranks: step times, tokens, collectives, and how good the cost table is.

``python -m benchmarks.placement_gpu [--ranks N] [--models dense mla dense_8b] [--batches 1 16 128] [--prefill-tokens 8192]
[--reps 5] [--json FILE] [--table FILE] [--check]``. ``--quick`` runs a tiny model on two CPU ranks, to test the benchmark
itself: its times mean nothing, its tokens and collectives do. With ``--ranks 1`` it shows what a placed model costs.

All engines stand side by side, one process each: first eagerly, with batch-invariant kernels, for tokens and for counting
collectives (``--no-eager`` leaves those out), then as vLLM runs them (compiled, CUDA graphs, vLLM's scheduler), measured in
turns. ``--table FILE`` writes the cost table fitted from this run. The JSON file is written after each phase, so that a run that
is cut short keeps what it has; ``--total-seconds`` ends the reps in time. ``--own-cores N`` gives the engine that is timed N cores
to itself. ``--traces`` adds, behind the reps, what PyTorch's profiler sees of one prefill and of a decode step of each batch.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine_client import engines
from benchmarks.gpu.models import MODELS, TINY_MODELS, Model, write_model
from benchmarks.placed.bars import fitted, placement_bars
from benchmarks.placed.choice import splits_residual
from benchmarks.placed.own_cores import CoreShare
from benchmarks.placed.run import ModelRun, engine_environment
from benchmarks.placed.trace_tables import print_traces
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
_TRACES_S = 4.0
"""Of one engine; the reps leave as much."""
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
    parser.add_argument("--seconds-to-start", type=float, default=400.0, help="for all engines")
    parser.add_argument("--total-seconds", type=float, default=3600.0, help="no rep begins that would end later")
    parser.add_argument(
        "--no-eager", action="store_true", help="without batch-invariant tokens and counts of collectives"
    )
    parser.add_argument(
        "--own-cores",
        type=int,
        default=0,
        metavar="N",
        help="of the engine that is timed, at least 2 for each of its processes; 0: all share all",
    )
    parser.add_argument("--traces", action="store_true", help="of single steps, behind the reps")
    parser.add_argument("--logs", metavar="FOLDER", help="keep the engines' logs there")
    parser.add_argument("--quick", action="store_true", help="a tiny model on CPU")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--table", metavar="FILE", help="write the fitted cost table")
    parser.add_argument("--check", action="store_true", help="exit with 1 and name every bar that is not met")
    options = parser.parse_args(arguments)
    options.cores = None
    if options.own_cores:
        try:
            options.cores = CoreShare.of(options.own_cores, options.ranks)
        except ValueError as error:
            parser.error(f"--own-cores: {error}")
    if options.quick:
        options.models = [name for name in options.models if name in TINY_MODELS][:1]
        options.batches, options.prefill_tokens, options.decode_steps, options.reps = [1, 3], 131, 8, 1
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    options = parse_arguments(arguments)
    with tempfile.TemporaryDirectory(prefix="placement-gpu-") as temporary:
        folder = Path(temporary)
        try:
            figures = _measure(options, folder)
        finally:
            if options.logs:
                Path(options.logs).mkdir(parents=True, exist_ok=True)
                for log in folder.glob("*.log"):
                    shutil.copy(log, options.logs)
    outcomes = [bar.judge() for bar in placement_bars(figures)]
    write_json(options.json, figures, outcomes)
    _print(figures)
    print_outcomes(outcomes)
    return exit_code(outcomes, options.check)


def _measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start all engines and take the figures, which are written after each phase."""
    known = TINY_MODELS if options.quick else _ALL
    began = time.monotonic()
    runs = {
        name: ModelRun(options, name, write_model(known[name], folder), known[name].kv_cache_bytes // options.ranks)
        for name in options.models
    }
    for name, run in runs.items():
        run.note_choice(splits_residual(name, known[name].config, options.ranks, options.prefill_tokens))
    figures = {
        "ranks": options.ranks,
        "own_cores": options.own_cores,
        "models": {name: run.figures for name, run in runs.items()},
        "links": {},
    }

    def write(phase: str) -> None:
        print(f"{time.monotonic() - began:.0f} s: {phase}", file=sys.stderr, flush=True)
        write_json(options.json, figures, [])

    @contextmanager
    def standing(*, eager: bool) -> Iterator[None]:
        """All models' engines of one kind, side by side."""
        failures: dict[str, str] = {}
        entries = [entry for run in runs.values() for entry in run.entries(eager=eager)]
        environment = engine_environment("cpu" if options.quick else "cuda")
        with engines(entries, folder, options.seconds_to_start, environment, failures=failures) as running:
            write(f"{len(running)} {'eager ' if eager else ''}engines stand, {len(failures)} failed")
            for run in runs.values():
                run.take(running, failures, eager=eager)
            yield

    if options.quick or not options.no_eager:
        with standing(eager=True):
            for name, run in runs.items():
                run.check_tokens()
                write(f"{name}: tokens and collectives")
            if options.quick:
                _time_all(options, runs, figures, began, write)
    if not options.quick:
        with standing(eager=False):
            _time_all(options, runs, figures, began, write)
    return figures


def _time_all(
    options: argparse.Namespace,
    runs: dict[str, ModelRun],
    figures: dict[str, Any],
    began: float,
    write: Callable[[str], None],
) -> None:
    for name, run in runs.items():
        run.check_tokens_as_run()
        write(f"{name}: tokens as it runs")
    _take_links(options, runs, figures)
    write("links")
    _time(options, list(runs.values()), began, write)
    if options.traces:
        for name, run in runs.items():
            run.trace_steps()
            write(f"{name}: traces")


def _take_links(options: argparse.Namespace, runs: dict[str, ModelRun], figures: dict[str, Any]) -> None:
    """Of the first model; the links are the same for all."""
    if options.ranks == 1:
        return
    next(iter(runs.values())).time_links()
    table, figures["links"] = fitted(figures)
    if options.table and table:
        Path(options.table).write_text(table.model_dump_json(indent=1) + "\n")


def _time(options: argparse.Namespace, runs: list[ModelRun], began: float, write: Callable[[str], None]) -> None:
    """The GPU's time first, then reps: the first one warms up, the others go on until they are all done or time is short."""
    if options.cores is not None:
        for run in runs:
            run.share_cores(options.cores)
    if not options.quick:
        for run in runs:
            run.time_graphs()
        write("time on the GPU")
    longest_s = 0.0
    end_s = options.total_seconds - (_TRACES_S * sum(run.num_timed for run in runs) if options.traces else 0.0)
    for rep in range(options.reps + 1):
        start = time.monotonic()
        if start - began + longest_s > end_s:
            write(f"only {max(rep - 1, 0)} of {options.reps} reps: no time for more")
            return
        for run in runs:
            run.time_steps(rep)
        longest_s = max(longest_s, time.monotonic() - start)
        write(f"rep {rep} of {options.reps}")


def _print(figures: dict[str, Any]) -> None:
    timed, moved = [], []
    for model, systems in figures["models"].items():
        for system, found in systems.items():
            name = f"{model}: {system}"
            decode, device = (
                ", ".join(f"{batch}: {ms:.2f}" for batch, ms in found.get(key, {}).items()) or "-"
                for key in ("decode_ms", "decode_gpu_ms")
            )
            prefill = f"{found['prefill_ms']:.1f}" if "prefill_ms" in found else found.get("error", "-")
            timed.append((name, decode, device, prefill))
            counted = found.get("collectives")
            if counted:
                moved.append((name, *(_moved(counted[step]) for step in ("decode", "prefill"))))
    print_table("Step times", ("system", "decode ms by batch", "of these on the GPU", "prefill ms"), timed)
    print_table("Collectives of a step in eager mode", ("system", "decode of one token", "prefill"), moved)
    for model, systems in figures["models"].items():
        print_traces(model, systems)
    links = {
        kind: [f"{size / 1024:.0f} KiB: {error:+.1%}" for size, error in errors]
        for kind, errors in figures["links"].items()
    }
    print_table(
        "Links", ("collective", "error of a table without this size"), [(k, ", ".join(e)) for k, e in links.items()]
    )


def _moved(counted: list[tuple[str, int, int]]) -> str:
    return ", ".join(f"{times} {kind} of {size} B" for kind, size, times in counted) or "none"


if __name__ == "__main__":
    sys.exit(main())
