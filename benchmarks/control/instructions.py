# SPDX-License-Identifier: Apache-2.0
"""Instruction counts of decode steps, through callgrind: the same on a busy machine as on a quiet one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.control.counted import COUNTED_STEPS, label_of
from benchmarks.control.fleet import import_folder, worker_environment

_SOURCE = Path(__file__).with_name("callgrind_marks.c")
_TRIGGER = re.compile(r"^desc: Trigger: .*?(cell \S+)", re.MULTILINE)
_TOTAL = re.compile(r"^(?:summary|totals): (\d+)", re.MULTILINE)


class CountingUnavailableError(RuntimeError):
    """This machine cannot count instructions; the message says what is missing."""


def _build_marks(folder: Path) -> Path:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if shutil.which("valgrind") is None or compiler is None:
        raise CountingUnavailableError("valgrind and a C compiler are needed")
    library = folder / "callgrind_marks.so"
    built = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(_SOURCE)],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        raise CountingUnavailableError(f"callgrind_marks.c: {built.stderr.strip().splitlines()[0]}")
    return library


def run_callgrind(system: str, cells: Sequence[str], folder: Path) -> dict[str, Path]:
    """Count `cells` on `system`; return the callgrind dump of each cell."""
    library = _build_marks(folder)
    command = [
        "valgrind",
        "--tool=callgrind",
        "--instr-atstart=no",
        "--collect-atstart=no",
        f"--callgrind-out-file={folder}/callgrind.%p",
        sys.executable,
        "-m",
        "benchmarks.control.counted",
        "--marks",
        str(library),
        "--system",
        system,
        *cells,
    ]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, env=worker_environment(), cwd=import_folder()
    )
    if ended.returncode:
        raise CountingUnavailableError(f"counting ended with {ended.returncode}: {ended.stderr[-400:]}")
    dumps: dict[str, Path] = {}
    for path in folder.glob("callgrind.*"):
        trigger = _TRIGGER.search(path.read_text()[:4000])
        if trigger is not None:
            dumps[trigger.group(1)] = path
    return {cell: dumps[label_of(cell)] for cell in cells}


def instructions_per_step(dump: Path) -> float:
    """Return the instructions of one step from a dump of `COUNTED_STEPS` steps."""
    total = _TOTAL.search(dump.read_text())
    if total is None:
        raise CountingUnavailableError(f"{dump.name} has no total")
    return int(total.group(1)) / COUNTED_STEPS


def hottest_functions(dump: Path, num_rows: int) -> list[tuple[float, str]]:
    """Return (share of the instructions, function) of the costliest functions in a dump."""
    listing = subprocess.run(
        ["callgrind_annotate", "--threshold=100", str(dump)], capture_output=True, text=True, check=True
    ).stdout
    rows = re.findall(r"^\s*([\d,]+)\s+\(\s*([\d.]+)%\)\s+(.+)$", listing, re.MULTILINE)
    functions = [(float(share), _short(name)) for _, share, name in rows if not name.startswith("PROGRAM TOTALS")]
    return functions[:num_rows]


def _short(function: str) -> str:
    """Return a function without the folders of its source file and library."""
    return re.sub(r"[^\s\[]*/(?=[^/\s]+)", "", function)
