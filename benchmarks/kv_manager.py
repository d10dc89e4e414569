# SPDX-License-Identifier: Apache-2.0
"""What the KV manager's operations cost: match, allocate and free, bytes of bookkeeping; vLLM's manager beside ours."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.kvmanager.costs import costs
from benchmarks.report import Bar, MissingFigureError, exit_code, print_outcomes, print_table, write_json

BLOCK_TOKENS = (128, 16)
MAX_MATCH_US = 60.0
MAX_CYCLE_US = 100.0
MAX_BYTES_PER_BLOCK = 128.0
_CLAIMS = (
    ("match of a 100K-token prompt, us", "match_us", MAX_MATCH_US),
    ("1,000 blocks taken and given back, us", "cycle_us", MAX_CYCLE_US),
    ("bytes per cached block", "bytes_per_block", MAX_BYTES_PER_BLOCK),
)


def all_bars(figures: dict[int, dict[str, float]]) -> list[Bar]:
    """Every bar, for every size of block; a figure that is missing is a bar that is not met."""
    return [
        Bar(f"{claim}, blocks of {size}", "<=", limit, lambda size=size, key=key: _figure(figures, size, key))
        for size in BLOCK_TOKENS
        for claim, key, limit in _CLAIMS
    ]


def _figure(figures: dict[int, dict[str, float]], size: int, key: str) -> float:
    try:
        return figures[size][key]
    except KeyError as error:
        msg = f"{key} was not measured with blocks of {size}"
        raise MissingFigureError(msg) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_manager", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is not met")
    options = parser.parse_args(arguments)
    figures = {size: costs(size, reps=20 if options.quick else 400) for size in BLOCK_TOKENS}
    rows = [
        (f"{claim}, blocks of {size}", *(f"{figures[size][name]:,.1f}" for name in (f"stock_{key}", key)))
        for size in BLOCK_TOKENS
        for claim, key, _ in _CLAIMS
    ]
    print_table("Costs", ("", "vLLM", "ours"), rows)
    outcomes = [bar.judge() for bar in all_bars(figures)]
    print_outcomes(outcomes)
    write_json(options.json, {"costs": figures}, outcomes)
    return exit_code(outcomes, options.check)


if __name__ == "__main__":
    sys.exit(main())
