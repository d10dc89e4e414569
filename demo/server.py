# SPDX-License-Identifier: Apache-2.0
"""Starts ``vllm serve`` on the loopback interface, waits until it answers, and stops it without leaving a process behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

# Without these vLLM asks hubs for models, reports its use, and pins threads to cores that other processes may need.
QUIET_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
}


class ServerError(RuntimeError):
    """The server did not start, died, or left something behind; the message carries the end of its log."""


def free_port() -> int:
    """A port of the loopback interface that nothing listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class VllmServer(AbstractContextManager["VllmServer"]):
    """A ``vllm serve`` process; entering waits for readiness, leaving stops it.

    Args:
        model: folder of the model.
        arguments: further arguments of ``vllm serve``.
        log_path: file that takes what the server prints.
        environment: variables on top of this process' environment.
        ready_timeout_s: how long start-up may take.
    """

    def __init__(
        self,
        model: Path,
        arguments: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        ready_timeout_s: float = 600.0,
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = log_path
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
            *("--host", "127.0.0.1", "--port", str(port), *arguments),
        ]
        self._environment = {**os.environ, **QUIET_ENVIRONMENT, **(environment or {})}
        self._ready_timeout_s = ready_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_ready(self._process)
        except BaseException:
            self._kill(self._members(self._process))
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, timeout_s: float = 60.0) -> None:
        """Ask the server to stop and wait for all of its processes.

        Raises:
            ServerError: a process outlived the server by more than ``timeout_s``; it is killed first.
        """
        if self._process is None:
            return
        members, process, self._process = self._members(self._process), self._process, None
        process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + timeout_s
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
        _, alive = psutil.wait_procs(members, timeout=max(1.0, deadline - time.monotonic()))
        if alive:
            names = ", ".join(f"{member.pid} {member.name()}" for member in alive)
            self._kill(alive)
            raise ServerError(f"still running {timeout_s:.0f} s after the request to stop: {names}\n{self.log_tail()}")

    def metrics(self) -> dict[str, float]:
        """The samples of ``/metrics``, summed over their labels, by sample name."""
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals

    def log_tail(self, num_lines: int = 40) -> str:
        """The last lines that the server printed."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-num_lines:])

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._ready_timeout_s
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise ServerError(f"vllm serve exited with {process.returncode} at start-up\n{self.log_tail()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=2.0).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.25)
        raise ServerError(f"vllm serve was not ready after {self._ready_timeout_s:.0f} s\n{self.log_tail()}")

    @staticmethod
    def _members(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
        try:
            leader = psutil.Process(process.pid)
            return [leader, *leader.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    @staticmethod
    def _kill(members: Sequence[psutil.Process]) -> None:
        for member in members:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(members, timeout=10.0)
