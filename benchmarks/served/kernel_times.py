# SPDX-License-Identifier: Apache-2.0
"""What the kernel benchmark says of the batches that the engines decode: microseconds of one layer's attention."""

from __future__ import annotations

from typing import Any

HEADS = 16
_PAGE_TOKENS, _TOKEN_BYTES = 64, 1152


def kernel_times_us(counts: list[int], context_tokens: int) -> dict[str, dict[str, float]]:
    """By number of sessions: ours, and FlashAttention 3 at its best splits, as `benchmarks.mla` measures them.

    Raises:
        RuntimeError: FlashAttention 3 does not run here.
    """
    from benchmarks.latent.cells import Cell
    from benchmarks.mla import Bench

    bench = Bench(None, 3 * max(counts) * context_tokens * _TOKEN_BYTES)
    if "FlashAttention 3" in bench.absent:
        raise RuntimeError(bench.absent["FlashAttention 3"])
    bench.peers = [peer for peer in bench.peers if peer.name == "FlashAttention 3"]
    found: dict[str, Any] = {}
    for count in counts:
        measured = bench.run(Cell(HEADS, 1, count, context_tokens))
        times = measured.times_us
        found[str(count)] = {
            "ours": times["ours"],
            "flashattn3": times["FlashAttention 3"],
            "plan": measured.plan_us,
            "difference": measured.difference,
        }
    return found
