# SPDX-License-Identifier: Apache-2.0
"""The benchmark's side of engine processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.control.fleet import import_folder, worker_environment
from benchmarks.gpu.engine import EngineOptions


class EngineFailedError(RuntimeError):
    """An engine process could not be built or died; the message carries the end of its log."""


class EngineProcess:
    """A running engine process; starting does not wait until the engine is built."""

    def __init__(self, options: EngineOptions, log_file: Path, environment: dict[str, str] | None = None) -> None:
        self.options = options
        self.description: dict[str, Any] = {}
        self._log_file = log_file
        with log_file.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.engine_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**worker_environment(), **(environment or {})},
                cwd=import_folder(),
            )
        self._send(options.as_json())

    @property
    def pid(self) -> int:
        """Of the process; vLLM's own processes are below it."""
        return self._process.pid

    def wait_until_built(self, timeout_s: float) -> None:
        """Wait for the engine; raise EngineFailedError when it fails or takes longer than `timeout_s`."""
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        try:
            self.description = self._receive()
        finally:
            timer.cancel()

    def run(self, command: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Run a measurement and return its figures; an engine that takes longer than `timeout_s` is killed and has failed."""
        self._send({"command": command, **arguments})
        if timeout_s is None:
            return self._receive()
        timer = threading.Timer(max(0.0, timeout_s), self._process.kill)
        timer.start()
        try:
            return self._receive()
        finally:
            timer.cancel()

    def let_go(self) -> None:
        """Tell the process to end, without waiting for it."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.stdin = None

    def stop(self) -> None:
        """End the process; kill it when it does not end in 30 seconds."""
        self.let_go()
        try:
            self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise EngineFailedError(self._last_words()) from None

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailedError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineFailedError(f"{self.options.system}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        return f"{self.options.system} ended: " + " | ".join(self._log_file.read_text().splitlines()[-3:])


@contextmanager
def engines(
    options: list[EngineOptions],
    folder: Path,
    timeout_s: float,
    environment: dict[str, str] | None = None,
    together: bool = True,
    failures: dict[str, str] | None = None,
) -> Iterator[dict[str, EngineProcess]]:
    """Build an engine per entry, side by side or one after the other, and stop them all at the end.

    One that cannot be built raises EngineFailedError; with `failures` its reason is noted there and the others go on.
    Every system keeps caches of compiled code of its own, so that two that start together do not write one file.
    """
    processes: dict[str, EngineProcess] = {}
    try:
        for entry in options:
            cache = {"VLLM_CACHE_ROOT": str(folder / f"cache-{entry.system}"), **(environment or {})}
            place = "in-process" if entry.in_process else "engine"
            log_file = folder / f"{Path(entry.model_folder).name}-{entry.system}-{place}.log"
            processes[entry.system] = EngineProcess(entry, log_file, {**cache, **_triton_cache(folder, entry)})
            if not together:
                processes[entry.system].wait_until_built(timeout_s)
        if together:
            _wait_for_all(processes, timeout_s, failures)
        yield {system: process for system, process in processes.items() if system not in (failures or {})}
    finally:
        for process in processes.values():
            process.let_go()
        for process in processes.values():
            process.stop()


def _wait_for_all(processes: dict[str, EngineProcess], timeout_s: float, failures: dict[str, str] | None) -> None:
    for system, process in processes.items():
        try:
            process.wait_until_built(timeout_s)
        except EngineFailedError as error:
            if failures is None:
                raise
            failures[system] = str(error)


def _triton_cache(folder: Path, options: EngineOptions) -> dict[str, str]:
    return {"TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(folder / f"triton-{options.system}"))}
