# SPDX-License-Identifier: Apache-2.0
"""Decode of long sessions in whole engines on one Hopper GPU: vLLM's own choice of MLA kernels, and `--kernels auto`.

``python -m benchmarks.mla_engines [--sessions 1 4 16] [--context-tokens 65536] [--kernels auto] [--json FILE] [--check]``.
Both engines have vLLM's scheduler and CUDA graphs, stand side by side, and are measured in turns on the same sessions, whose
histories lie in the prefix cache. The judged time is that of the decode graph on the GPU (the model's whole forward pass);
the milliseconds between two tokens are reported beside it. What the kernels promise is measured in the same run, as
`benchmarks.mla` does. Greedy tokens of mixed prompts and of the long sessions are compared, with varied weights; a third
engine, with vLLM's FlashMLA, shows how far two kernels of vLLM's own lie apart.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.models import MODELS, TINY_MODELS, Model, write_model
from benchmarks.report import MissingFigureError, exit_code, print_outcomes, print_table, write_json
from benchmarks.served.bars import engine_bars, predicted_ms
from benchmarks.served.kernel_times import in_own_process
from benchmarks.served.run import SYSTEMS, Run


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--context-tokens", type=int, default=65_536)
    parser.add_argument("--output-tokens", type=int, default=64, help="decode steps of a rep")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--kernels", default="auto", help="as `--kernels` takes it")
    parser.add_argument("--token-requests", type=int, default=64, help="mixed prompts whose tokens are compared")
    parser.add_argument("--token-outputs", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=200.0, help="no further rep is begun after so long")
    parser.add_argument("--startup-seconds", type=float, default=200.0)
    parser.add_argument(
        "--no-control", action="store_true", help="no third engine, with vLLM's FlashMLA, for the tokens"
    )
    parser.add_argument("--no-kernel-times", action="store_true", help="do not time the kernels alone")
    parser.add_argument("--logs", metavar="FOLDER", help="keep the engines' logs there")
    parser.add_argument("--quick", action="store_true", help="short sessions, few reps")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to test the benchmark itself")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 and name every bar that is not met")
    options = parser.parse_args(arguments)
    if options.quick:
        options.context_tokens, options.reps, options.token_requests = min(options.context_tokens, 8192), 2, 16
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    options = parse_arguments(arguments)
    model: Model = (TINY_MODELS if options.tiny else MODELS)["mla"]
    if options.device == "cuda":
        in_own_process(options.context_tokens, [])  # builds our library: nvcc's time is no start-up time of ours
    with tempfile.TemporaryDirectory(prefix="mla-engines-") as temporary:
        folder = Path(temporary)
        run = Run(options, write_model(model, folder), model.config["num_hidden_layers"])
        try:
            run.measure(folder, lambda: write_json(options.json, run.figures, []))
        finally:
            if options.logs:
                Path(options.logs).mkdir(parents=True, exist_ok=True)
                for log in folder.glob("*.log"):
                    shutil.copy(log, options.logs)
    outcomes = [bar.judge() for bar in engine_bars(run.figures)]
    write_json(options.json, run.figures, outcomes)
    _print(run.figures)
    print_outcomes(outcomes)
    return exit_code(outcomes, options.check)


def _print(figures: dict[str, Any]) -> None:
    rows = []
    for count in figures["sessions"]:
        decode = {s: figures["engines"][s].get("decode", {}).get(str(count), {}) for s in SYSTEMS}
        who = figures["engines"]["ours"].get("who", {}).get("choices", {}).get(str(count), {})
        cells = [_number(decode[s], key) for key in ("graph_ms", "step_ms") for s in SYSTEMS]
        rows.append((str(count), *cells, _predicted(figures, count), who.get("reason", "-") if who else "-"))
    columns = ("sessions", "graph ms, stock", "ours", "step ms, stock", "ours", "promised saving, ms", "choice")
    print_table(f"Decode of sessions of {figures['context_tokens']} tokens", columns, rows)
    for kind in ("tokens", "long_tokens"):
        for system, found in figures.get(kind, {}).items():
            parted = [f"{m.get('margin', float('nan')):.3f}" for m in found["mismatches"]]
            print(f"{kind}, {system}: {len(parted)} of {found['requests']} answers part from stock's, margins {parted}")
            print(f"  error of log-probabilities before that: {found['error']}")


def _number(found: dict[str, Any], key: str) -> str:
    return f"{found[key]:.3f}" if key in found else "-"


def _predicted(figures: dict[str, Any], count: int) -> str:
    try:
        return f"{predicted_ms(figures, count):.3f}"
    except (MissingFigureError, KeyError):
        return "-"


if __name__ == "__main__":
    sys.exit(main())
