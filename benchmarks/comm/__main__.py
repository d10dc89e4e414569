# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual add + RMS norm on the GPUs of one host: is it right, and how long does it take beside its peers.

``python -m benchmarks.comm [--ranks 2] [--hidden H ...] [--rows R ...] [--json FILE] [--check]``. One process for each GPU.
First results are checked, bit by bit where the arithmetic defines them: every shape, back-to-back calls with changing row counts
and random delays, CUDA graphs replayed with changing inputs. Then each implementation is timed in a CUDA graph of 32 calls: ours,
FlashInfer's fused kernel (without multicast), vLLM's custom all-reduce with its fused norm, NCCL with our norm, and our norm alone as the floor.
``--large`` checks and times one sum of 8,192 rows instead, by every way that a prefill could take: microseconds on the GPU and on the host.
``--quick`` runs the same checks on two CPU processes with the reference, to test the benchmark itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import multiprocessing

from benchmarks.comm.bars import FLOOR, IMPLEMENTATIONS, OURS, comm_bars
from benchmarks.comm.large import WAYS
from benchmarks.comm.worker import Options, run
from benchmarks.gpu.engine import MULTICAST_OFF
from benchmarks.report import exit_code, print_outcomes, print_table, write_json

HIDDEN = (2048, 4096, 7168)
LARGE_ROWS, LARGE_HIDDEN = 8192, (2048, 4096)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, nargs="+", help="default: 2048 4096 7168, without the last for --large")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--calls", type=int, default=2000, help="back-to-back calls of the endurance check")
    parser.add_argument("--timeout-s", type=float, default=20, help="how long a kernel waits for a peer")
    parser.add_argument("--large", action="store_true", help="sums of a long prefill, two ranks")
    parser.add_argument("--quick", action="store_true", help="two CPU processes, the reference, no times")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is not met")
    return parser.parse_args(arguments)


def gather(options: Options) -> list[dict[str, Any]]:
    """What each rank found."""
    os.environ.update(MULTICAST_OFF)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, (options, folder), nprocs=options.ranks)
        return [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(options.ranks)]


def joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One figure for all ranks: the slowest rank's times, the sum of all errors."""
    first = ranks[0]
    checks = {name: sum(rank["checks"][name] for rank in ranks) for name in first["checks"]}
    times = [
        {
            **cell,
            "times_us": {name: max(rank["times"][i]["times_us"][name] for rank in ranks) for name in cell["times_us"]},
        }
        for i, cell in enumerate(first["times"])
    ]
    absent = {name: reason for rank in ranks for name, reason in rank["absent"].items()}
    large = [
        {
            **cell,
            "times_us": {
                way: {what: max(rank["large"][i]["times_us"][way][what] for rank in ranks) for what in took}
                for way, took in cell["times_us"].items()
            },
        }
        for i, cell in enumerate(first.get("large", []))
    ]
    return {**first, "checks": checks, "times": times, "absent": absent, "large": large}


def show(found: dict[str, Any]) -> None:
    """Print checks and times."""
    print(f"{found['device']}; peer memory: {found['way']}")
    for name, reason in found["absent"].items():
        print(f"not there: {name}: {reason}")
    print_table("Checks", ("what", "wrong"), [(name, str(wrong)) for name, wrong in found["checks"].items()])
    if found["large"]:
        print_table(
            "Microseconds of one large sum with add and norm, the slower rank's median: on the GPU / of the host",
            ("hidden x rows", *WAYS),
            [
                (f"{c['hidden']} x {c['rows']}", *(_both(c["times_us"].get(way)) for way in WAYS))
                for c in found["large"]
            ],
        )
    names = [n for n in IMPLEMENTATIONS if any(n in cell["times_us"] for cell in found["times"])]
    if names:
        print_table(
            "Microseconds per call, the slowest rank's median",
            ("hidden x rows", *names),
            [
                (
                    f"{c['hidden']} x {c['rows']}",
                    *(f"{c['times_us'][n]:.2f}" if n in c["times_us"] else "-" for n in names),
                )
                for c in found["times"]
            ],
        )


def _both(took: dict[str, float] | None) -> str:
    return "-" if took is None else f"{took['gpu']:.0f} / {took['host']:.0f}"


def main() -> int:
    """Run, print, write."""
    given = parse_arguments()
    options = Options(
        2 if given.quick else given.ranks,
        (16,) if given.quick else tuple(given.hidden or (LARGE_HIDDEN if given.large else HIDDEN)),
        tuple([1, 3] if given.quick else given.rows),
        50 if given.quick else given.calls,
        given.timeout_s,
        "cpu" if given.quick else "cuda",
        LARGE_ROWS if given.large else 0,
    )
    found = joined(gather(options))
    show(found)
    outcomes = [bar.judge() for bar in comm_bars(found, with_times=not (given.quick or given.large))]
    print_outcomes(outcomes)
    write_json(given.json, found, outcomes)
    return exit_code(outcomes, given.check)


__all__ = ["FLOOR", "OURS", "main"]

if __name__ == "__main__":
    sys.exit(main())
