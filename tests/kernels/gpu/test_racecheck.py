# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer's racecheck: what it can follow, and that it finds nothing in the kernels that keep to that."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tokenspeed_plugin.kernels.nvcc import find_nvcc

HERE = Path(__file__).parent
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")


def hazards(*command: str) -> tuple[int, str]:
    """Number of hazards that racecheck displays, and all output; the command must succeed under it."""
    checker = ("compute-sanitizer", "--tool", "racecheck", "--racecheck-report", "all", "--print-limit", "12")
    done = subprocess.run([*checker, *command], capture_output=True, text=True, check=False)
    found = SUMMARY.search(done.stdout)
    assert found is not None, done.stdout + done.stderr
    return int(found[1]), done.stdout


@pytest.fixture(scope="module")
def exchange(tmp_path_factory: pytest.TempPathFactory) -> str:
    nvcc, target = find_nvcc(), tmp_path_factory.mktemp("race") / "exchange"
    assert nvcc is not None, "needs nvcc"
    options = ("-std=c++17", "-O3", "-lineinfo", "-gencode=arch=compute_90a,code=sm_90a", "-cudart=static")
    subprocess.run([nvcc, *options, "-o", str(target), str(HERE / "exchange.cu")], check=True)
    return str(target)


@pytest.mark.parametrize(
    ("barriers", "lost"), [((0, 0), False), ((1, 1), False), ((1, 0), True), ((0, 1), True), ((2, 1), True)]
)
def test_it_loses_track_of_warpgroups_that_passed_unequally_many_barriers(
    exchange: str, barriers: tuple[int, int], lost: bool
) -> None:
    """The same exchange across the same barrier, and no value is ever wrong: what it reports depends on the count alone."""
    count, output = hazards(exchange, *map(str, barriers))
    assert ": 0 wrong values, no error" in output
    assert (count > 0) == lost


@pytest.mark.parametrize("heads", [16, 64])
def test_decode_has_no_hazards(heads: int) -> None:
    case = f"{HERE / 'test_mla_decode.py'}::test_padding_is_zero_and_leaves_real_rows_as_they_are[{heads}]"
    count, output = hazards(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", case)
    assert "1 passed" in output
    assert count == 0
