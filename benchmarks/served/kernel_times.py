# SPDX-License-Identifier: Apache-2.0
"""What the kernel benchmark says of the batches that the engines decode, from a process of its own.

``python -m benchmarks.served.kernel_times CONTEXT_TOKENS SESSIONS ...``: one JSON line of microseconds of one layer's attention
by number of sessions. Without sessions it only builds our library.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.control.fleet import import_folder, worker_environment

HEADS = 16
_TOKEN_BYTES = 1152
_MODULE = "benchmarks.served.kernel_times"


class KernelTimesError(RuntimeError):
    """The library could not be built or the kernels not timed; the message carries the end of the output."""


def in_own_process(context_tokens: int, counts: list[int], timeout_s: float = 240.0) -> dict[str, dict[str, Any]]:
    """Build the library and time the kernels, away from this process's path and GPU.

    Raises:
        KernelTimesError: the process failed or took longer than `timeout_s`.
    """
    command = [sys.executable, "-m", _MODULE, str(context_tokens), *map(str, counts)]
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


def main() -> None:
    """Build, time, print."""
    from tokenspeed_plugin.kernels.mla.sm90.library import SOURCES

    SOURCES.built()
    context_tokens, *counts = map(int, sys.argv[1:])
    print(json.dumps(kernel_times_us(context_tokens, counts) if counts else {}))


if __name__ == "__main__":
    main()
