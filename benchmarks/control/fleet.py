# SPDX-License-Identifier: Apache-2.0
"""The parent's side of the workers: one process per system, cells interleaved rep by rep."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.control.systems import TOKENSPEED

REPOSITORY = Path(__file__).resolve().parents[2]
PEER_PYTHON_VARIABLE = "TOKENSPEED_SCHEDULER_PYTHON"
PEER_VENV_PYTHON = REPOSITORY / ".venv-peers" / "bin" / "python"


class NotInstalledError(RuntimeError):
    """A system cannot run on this machine."""


def interpreter(system: str) -> str:
    """Return the interpreter of `system`; raise NotInstalledError when tokenspeed-scheduler has none."""
    if system != TOKENSPEED:
        return sys.executable
    if python := os.environ.get(PEER_PYTHON_VARIABLE):
        return python
    if find_spec("tokenspeed_scheduler") is not None:
        return sys.executable
    if PEER_VENV_PYTHON.exists():
        return str(PEER_VENV_PYTHON)
    raise NotInstalledError(f"not installed (set {PEER_PYTHON_VARIABLE} or make {PEER_VENV_PYTHON.parent.parent.name})")


@lru_cache(maxsize=1)
def import_folder() -> str:
    """Return a folder from which `benchmarks` can be imported, and nothing else of this repository.

    The repository itself on the path would hide an installed `tokenspeed_plugin` behind its sources, which lack
    the compiled parts. It is the path and the working folder of every process that a benchmark starts.
    """
    folder = tempfile.mkdtemp(prefix="benchmarks-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    Path(folder, "benchmarks").symlink_to(REPOSITORY / "benchmarks")
    return folder


def worker_environment() -> dict[str, str]:
    """Return the environment of a worker: the benchmarks importable, hashes of strings fixed."""
    kept = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join([import_folder(), *(os.path.abspath(entry) for entry in kept if entry)])
    return {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}


class Worker:
    """A running worker process."""

    def __init__(self, system: str, core: int | None, log_folder: Path) -> None:
        self.system = system
        self._log = log_folder / f"{system}.log"
        command = [interpreter(system), "-m", "benchmarks.control.worker", "--system", system]
        if core is not None:
            command += ["--core", str(core)]
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=worker_environment(),
                cwd=import_folder(),
            )
        try:
            self._answer()
        except RuntimeError as error:
            raise NotInstalledError(str(error)) from None

    def run(self, cell: str, **options: Any) -> dict[str, Any]:
        """Run a cell and return its statistics, or an ``error`` entry."""
        assert self._process.stdin is not None
        print(json.dumps({"cell": cell, **options}), file=self._process.stdin, flush=True)
        return self._answer()

    def stop(self) -> None:
        """Close the worker's input and wait for it to end."""
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last = self._log.read_text().strip().splitlines()[-1:] or ["no message"]
            raise RuntimeError(f"worker {self.system} ended: {last[0]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Fleet:
    """The workers that could be started, and why the others could not."""

    def __init__(self, workers: dict[str, Worker], missing: dict[str, str]) -> None:
        self.workers = workers
        self.missing = missing

    def run_interleaved(self, cell: str, num_reps: int) -> dict[str, list[dict[str, Any]]]:
        """Run `cell` `num_reps` times on every worker in turn; a system that fails a cell is not asked again."""
        reps: dict[str, list[dict[str, Any]]] = {system: [] for system in self.workers}
        failed: set[str] = set()
        for _ in range(num_reps):
            for system, worker in self.workers.items():
                if system not in failed:
                    reps[system].append(worker.run(cell))
                    if "error" in reps[system][-1]:
                        failed.add(system)
        return reps


@contextmanager
def start_fleet(systems: Sequence[str], core: int | None, log_folder: Path) -> Iterator[Fleet]:
    """Start a worker per system and stop them all at the end."""
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        missing: dict[str, str] = {}
        for system in systems:
            try:
                workers[system] = Worker(system, core, log_folder)
            except NotInstalledError as reason:
                missing[system] = str(reason)
            else:
                stack.callback(workers[system].stop)
        yield Fleet(workers, missing)
