# SPDX-License-Identifier: Apache-2.0
"""What the kernel benchmark says of the batches that the engines decode, from a process of its own.

``python -m benchmarks.served.kernel_times CONTEXT_TOKENS SESSIONS ... [--kv-cache-dtype fp8]``: one JSON line of microseconds of
one layer's attention by number of sessions. Without sessions it only builds our libraries.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from benchmarks.control.fleet import import_folder, worker_environment

HEADS = 16
_TOKEN_BYTES = 1152
_PASSES = 3
_MODULE = "benchmarks.served.kernel_times"


class KernelTimesError(RuntimeError):
    """The library could not be built or the kernels not timed; the message carries the end of the output."""


def in_own_process(
    context_tokens: int, counts: list[int], cache_dtype: str = "auto", timeout_s: float = 240.0
) -> dict[str, dict[str, Any]]:
    """Build the library and time the kernels, away from this process's path and GPU.

    Raises:
        KernelTimesError: the process failed or took longer than `timeout_s`.
    """
    command = [sys.executable, "-m", _MODULE, *map(str, (context_tokens, *counts)), "--kv-cache-dtype", cache_dtype]
    try:
        done = subprocess.run(
            command,
            env=worker_environment(),
            cwd=import_folder(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise KernelTimesError(f"longer than {timeout_s:.0f} s") from error
    if done.returncode != 0:
        raise KernelTimesError(" | ".join(done.stderr.splitlines()[-3:]))
    times: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return times


def kernel_times_us(context_tokens: int, counts: list[int]) -> dict[str, dict[str, Any]]:
    """By number of sessions: ours, and FlashAttention 3 at its best splits, as `benchmarks.mla` measures them.

    There the pages of a session lie anywhere; in an engine that has just started they lie in order, so both are also timed so,
    and among the kernels of a layer (`benchmarks.served.in_layer`).

    Raises:
        KernelTimesError: FlashAttention 3 does not run here.
    """
    import torch

    from benchmarks.latent.cells import Cell
    from benchmarks.latent.decode import time_ours
    from benchmarks.latent.peers import FlashAttention3, PeerUnavailableError
    from benchmarks.latent.timing import Inputs, copy_bytes_per_s
    from benchmarks.served.in_layer import SERVED_PAGE_TOKENS, in_layer_us, in_order
    from tokenspeed_plugin.kernels.mla.share import PAGE_TOKENS

    try:
        flash_attention = FlashAttention3(None)
    except PeerUnavailableError as error:
        raise KernelTimesError(str(error)) from error
    pool_tokens = 3 * max(counts) * context_tokens
    pool = torch.empty(pool_tokens * _TOKEN_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_()
    bytes_per_s, found = copy_bytes_per_s(pool), {}
    for count in counts:
        cell = Cell(HEADS, 1, count, context_tokens)
        anywhere = Inputs(cell, PAGE_TOKENS, pool)
        ours_us, plan_us, ours = time_ours(anywhere)
        flash_us, theirs = flash_attention.time_us(anywhere)
        inputs, served = (in_order(Inputs(cell, tokens, pool)) for tokens in (PAGE_TOKENS, SERVED_PAGE_TOKENS))
        found[str(count)] = {
            "ours": ours_us,
            "flashattn3": flash_us,
            "ours_in_order": time_ours(inputs)[0],
            "flashattn3_in_order": flash_attention.time_us(inputs)[0],
            "plan": plan_us,
            "difference": ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item(),
            "bytes_per_s": bytes_per_s,
            "in_layer": in_layer_us(inputs, served, flash_attention),
        }
    return found


def fp8_kernel_times_us(context_tokens: int, counts: list[int]) -> dict[str, dict[str, Any]]:
    """By number of sessions with an e4m3 cache: ours, and FlashMLA's as vLLM has it.

    Raises:
        KernelTimesError: FlashMLA does not run here.
    """
    import torch

    from benchmarks.latent.cells import Cell
    from benchmarks.latent.fp8 import OURS, PEER, Fp8Bench
    from benchmarks.latent.passes import medians
    from benchmarks.latent.timing import copy_bytes_per_s
    from tokenspeed_plugin.kernels.mla.share import PAGE_TOKENS

    bench, found = Fp8Bench(None), {}
    if bench.absent:
        raise KernelTimesError(bench.absent)
    bytes_per_s = copy_bytes_per_s(bench.pool.view(torch.bfloat16))
    for count in counts:
        cell = Cell(HEADS, 1, count, context_tokens)
        passes = [bench.times_us(cell, PAGE_TOKENS, number) for number in range(_PASSES)]
        times_us = medians([times for times, _ in passes])
        found[str(count)] = {
            "ours": times_us[OURS],
            "flashmla": times_us[PEER],
            "difference": max(difference for _, difference in passes),
            "bytes_per_s": bytes_per_s,
        }
    return found


def main() -> None:
    """Build, time, print."""
    from tokenspeed_plugin.kernels.mla.sm90.library import FP8_SOURCES, SOURCES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("context_tokens", type=int)
    parser.add_argument("sessions", type=int, nargs="*")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    options = parser.parse_args()
    is_fp8 = options.kv_cache_dtype == "fp8"
    for sources in (SOURCES, *((FP8_SOURCES,) if is_fp8 else ())):
        sources.built()
    timed = fp8_kernel_times_us if is_fp8 else kernel_times_us
    print(json.dumps(timed(options.context_tokens, options.sessions) if options.sessions else {}))


if __name__ == "__main__":
    main()
