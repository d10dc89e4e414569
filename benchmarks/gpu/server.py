# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` under streaming and whole-answer clients, with the CPU time of every process on the way."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks.control.fleet import import_folder, worker_environment
from benchmarks.gpu.engine import EngineOptions
from benchmarks.gpu.engine_client import EngineFailedError
from benchmarks.gpu.streaming_client import ClientLoad, run_clients

BUSY_SHARE = 0.85
"""A process that uses this share of a core during the run is named as the bottleneck."""


def free_port() -> int:
    """Return a TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(options: EngineOptions, folder: Path, timeout_s: float) -> Iterator[tuple[str, int]]:
    """Start `vllm serve` on a free port; yield its base address and process id."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", options.model_folder),
        *("--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy", "--dtype", "bfloat16"),
        *("--served-model-name", "benchmark", "--max-num-seqs", str(options.max_requests)),
        *("--max-num-batched-tokens", str(options.budget_tokens), "--max-model-len", str(options.max_model_tokens)),
        *("--kv-cache-memory-bytes", str(options.kv_cache_bytes), "--gpu-memory-utilization", "0.3"),
    ]
    if options.system == "ours":
        command += ["--scheduler", "tokenspeed"]
    if options.device == "cpu":
        command += ["--enforce-eager"]
    command += options.serve_flags
    environment = {**worker_environment(), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment["VLLM_CACHE_ROOT"] = str(folder / f"cache-{options.system}")
    if options.system == "stock":
        environment["VLLM_PLUGINS"] = ""
    if options.device == "cpu":
        environment.setdefault("VLLM_TARGET_DEVICE", "cpu")
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    log_file = folder / f"{Path(options.model_folder).name}-{options.system}-server-{port}.log"
    with log_file.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=import_folder())
    try:
        _wait_until_healthy(process, f"http://127.0.0.1:{port}", log_file, timeout_s)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], base: str, log_file: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{base}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    last = " | ".join(log_file.read_text(errors="replace").splitlines()[-3:])
    raise EngineFailedError(f"server not healthy within {timeout_s:.0f} s: {last}")


def _roles(server_pid: int) -> dict[str, list[psutil.Process]]:
    """Return the server's processes by what they do."""
    api = psutil.Process(server_pid)
    roles: dict[str, list[psutil.Process]] = {"API process": [api], "engine core": [], "workers and helpers": []}
    for child in api.children(recursive=True):
        is_core = "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline())
        roles["engine core" if is_core else "workers and helpers"].append(child)
    return roles


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure_server(base: str, server_pid: int, load: ClientLoad, num_clients: int) -> dict[str, Any]:
    """Send the load from `num_clients` processes; return tokens/s, cores used by role, and the bottleneck."""
    roles = _roles(server_pid)
    before = {role: _cpu_seconds(processes) for role, processes in roles.items()}
    client_results = run_clients(get_context("spawn"), base, load, num_clients)
    elapsed_s = max(r["end"] for r in client_results) - min(r["start"] for r in client_results)
    cores = {role: (_cpu_seconds(processes) - before[role]) / elapsed_s for role, processes in roles.items()}
    cores["busiest client"] = max(r["cpu_s"] for r in client_results) / elapsed_s
    return {
        "tokens_per_s": sum(r["num_tokens"] for r in client_results) / elapsed_s,
        "elapsed_s": elapsed_s,
        "cores": cores,
        "bottleneck": bottleneck(cores),
    }


def bottleneck(cores: dict[str, float]) -> str:
    """Name the busiest role if it fills a core; otherwise nobody does and the GPU or waiting is the limit."""
    role, used = max(cores.items(), key=lambda item: item[1])
    if used >= BUSY_SHARE:
        return f"{role} ({used:.2f} cores)"
    return f"no process fills a core (busiest: {role}, {used:.2f} cores)"
