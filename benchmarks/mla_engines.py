# SPDX-License-Identifier: Apache-2.0
"""Decode of long sessions in whole engines on one Hopper GPU: vLLM's own choice of MLA kernels, and `--kernels auto`.

``python -m benchmarks.mla_engines [--sessions 1 4 16] [--context-tokens 65536] [--drafts 1 3] [--contexts 128K 512K 1M]
[--returning 256 512 2048] [--append triton] [--kernels auto] [--kv-cache-dtype fp8] [--json FILE] [--check]``.
Both engines have vLLM's scheduler and CUDA graphs, stand side by side, and are measured in turns on the same sessions, whose
histories lie in the prefix cache: they are not computed but filled in (`benchmarks.served.held_prefix`), the same in all engines.
The judged time is that of the decode graph on the GPU (the model's whole forward pass);
the milliseconds between two tokens are reported beside it. What the kernels promise is measured in the same run, as
`benchmarks.mla` does. Greedy tokens of mixed prompts and of the long sessions are compared, with varied weights; a third
engine, with vLLM's FlashMLA, shows how far two kernels of vLLM's own lie apart.
The graph is also replayed by itself under a tracer, which shows the time of each of its kernels.

``--drafts`` adds a pair of engines for each number of drafts (n-gram): steps in which all drafts are taken are timed, and answers
with drafts compared. ``--contexts`` are those of one session that grows. ``--returning`` times turns that come back to a session
with so many new tokens, and compares their answers. ``--append`` adds an engine that also writes new tokens with that kernel.
``--kv-cache-dtype fp8`` gives all engines an e4m3 cache: vLLM's own choice for it is FlashMLA, and the third engine has Triton.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.models import MODELS, TINY_MODELS, Model, write_model
from benchmarks.report import exit_code, print_outcomes, write_json
from benchmarks.served.bars import engine_bars
from benchmarks.served.kernel_times import in_own_process
from benchmarks.served.run import Run
from benchmarks.served.tables import print_figures

IDLE_S = 1.3
"""After a second without work an engine's processes stop spinning; then they take no core from the one that is measured."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--context-tokens", type=int, default=65_536)
    parser.add_argument(
        "--drafts", nargs="+", type=int, default=[], help="drafts of a step; a pair of engines for each"
    )
    parser.add_argument("--draft-sessions", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--contexts", nargs="+", type=_tokens, default=[], help="tokens, or with K or M")
    parser.add_argument("--returning", nargs="+", type=_tokens, default=[], help="new tokens of a turn that comes back")
    parser.add_argument("--append", help="an engine more, whose new tokens this solution writes")
    parser.add_argument("--output-tokens", type=int, default=64, help="decode steps of a rep")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--kernels", default="auto", help="as `--kernels` takes it")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="of all engines; fp8 is e4m3")
    parser.add_argument("--token-requests", type=int, default=64, help="mixed prompts whose tokens are compared")
    parser.add_argument("--token-outputs", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=240.0, help="no further part is begun after so long")
    parser.add_argument("--startup-seconds", type=float, default=200.0)
    parser.add_argument(
        "--no-control", action="store_true", help="no third engine, with vLLM's FlashMLA, for the tokens"
    )
    parser.add_argument("--no-kernel-times", action="store_true", help="do not time the kernels alone")
    parser.add_argument(
        "--kernel-times", metavar="FILE", help="output of benchmarks.served.kernel_times, measured before"
    )
    parser.add_argument("--idle-seconds", type=float, default=IDLE_S, help="pause before an engine's turn")
    parser.add_argument("--no-traces", action="store_true", help="do not trace the kernels of the decode graphs")
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


def _tokens(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1)
    if not number.isdigit() or not int(number):
        raise argparse.ArgumentTypeError(f"{text!r}, allowed: a positive number of tokens, or one with K or M")
    return int(number) * unit


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    options = parse_arguments(arguments)
    model: Model = (TINY_MODELS if options.tiny else MODELS)["mla"]
    if options.device == "cuda" and options.kernel_times is None:
        # builds our library: nvcc's time is no start-up time of ours
        in_own_process(options.context_tokens, [], options.kv_cache_dtype)
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
    print_figures(run.figures)
    print_outcomes(outcomes)
    return exit_code(outcomes, options.check)


if __name__ == "__main__":
    sys.exit(main())
