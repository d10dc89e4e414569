# SPDX-License-Identifier: Apache-2.0
"""Output tokens/s of vLLM with its own scheduler and with ours, in one run on one GPU.

``python -m benchmarks.gpu_throughput [--models dense mla] [--parts engine profile tokens server]
[--counts 1 64 256 512] [--reps 3] [--seconds 540] [--json FILE] [--check]``. ``--device cpu --tiny`` runs the same
steps with tiny models where there is no GPU: its figures mean nothing.

* engine: EngineCore out of process (vLLM's default), driven through its client; both systems stand side by side
  and take turns rep by rep.
* profile: EngineCore in process; medians of the parts of a decode step.
* tokens: greedy tokens of mixed requests with varied weights, batch-invariant kernels where they run.
* server: `vllm serve`, streaming and whole answers, with the cores that every process used.

A part that does not fit into ``--seconds`` any more is left out and says so; figures are written after each part.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.bars import throughput_bars
from benchmarks.gpu.plan import PARTS, Run
from benchmarks.gpu.tables import print_run
from benchmarks.report import exit_code, print_outcomes, write_json


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("dense", "mla"), default=["dense"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["engine", "profile"])
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 64, 256, 512], help="running requests")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--token-requests", type=int, default=512, help="requests of the tokens part")
    parser.add_argument("--server-requests", type=int, default=256, help="concurrent requests of the server part")
    parser.add_argument("--systems", nargs="+", choices=("stock", "ours"), default=["stock", "ours"])
    parser.add_argument("--one-by-one", action="store_true", help="build the two engines one after the other")
    parser.add_argument("--seconds", type=float, default=540.0, help="time for the whole run")
    parser.add_argument("--startup-seconds", type=float, default=240.0, help="time for engines to be built")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to test the benchmark itself")
    parser.add_argument("--work-dir", help="keep models, logs and caches of compiled code in this folder")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 and name every bar that is not met")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    options = parse_arguments(arguments)
    with tempfile.TemporaryDirectory(prefix="gpu-throughput-") as temporary:
        folder = Path(options.work_dir or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        run = Run(options, folder)
        for figures in run.parts():
            write_json(options.json, figures, [bar.judge() for bar in throughput_bars(figures)])
    print_run(run.figures)
    outcomes = [bar.judge() for bar in throughput_bars(run.figures)]
    print_outcomes(outcomes)
    return exit_code(outcomes, options.check)


if __name__ == "__main__":
    sys.exit(main())
