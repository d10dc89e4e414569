# SPDX-License-Identifier: Apache-2.0
"""What one launch of the fused all-reduce takes. Nothing here needs torch: plans are made without it."""

from __future__ import annotations

from typing import Final

RANK_COUNTS: Final = (2, 4, 6, 8)
DTYPES: Final = ("bfloat16", "float16")
LANE_ELEMENTS: Final = 8
MAX_HIDDEN: Final = 16384
MAX_ROWS: Final = 128
"""One block for each row, and up to so many all run at once: a block waits for its peers while it holds a multiprocessor. More take turns."""
MAX_SENT_BYTES: Final = 1 << 20
"""Payload that a rank sends in one call, at most: every rank gets all of it, so a ring is better for more.

Set when twice the payload was sent: on two H200s 1.0 MiB took 9.7 us where vLLM's all-reduce and a norm took 12.1, and 1.75 MiB took 17.3
where they took 16.0."""

LARGE_SUM_RANKS: Final = 2
LARGE_SUM_HIDDEN: Final = 8192
LARGE_SUM_BYTES: Final = 64 << 20
"""The same between two ranks, where a ring moves no fewer bytes; 0: what `MAX_SENT_BYTES` leaves goes by copies or the group's own all-reduce.

Each rank has to read the other's terms or their sum, so n bytes of terms put at least n on the link in each direction. The whole term does it
in one step; halves that are summed and sent back do it in two, and halves that are also normalised there send 1.5 n. What is spent for the one
step is memory traffic: both ranks add and normalise all rows, which takes half as long as the link takes and runs meanwhile. Staging memory is
three times the payload. Longer rows leave too few registers."""

PART_ROWS: Final = 1024
"""Rows of a part of a linear layer whose reduction is overlapped, at least: fewer fill no GPU, and a part costs a few launches."""
MAX_PARTS: Final = 4
OVERLAP_HIDDEN: Final = 4096
"""Width from which on an overlap is chosen unasked: with it the GPU is what a prefill of 8,192 tokens waits for (1.10 times as fast on two
H200s, 36 layers), with 2048 the host is, which launches more."""
OVERLAP_DEVICES: Final = ("H200",)
"""In the names of the GPUs on which that was measured."""
SUM_PART_BYTES: Final = 32 << 20
"""Of a part of a sum that is there as a whole: its norm runs while the next part comes, which has to be worth the launches."""


def num_parts(rows: int, part_rows: int = PART_ROWS) -> int:
    """Parts of a product of so many rows whose reductions are overlapped; 1 when there is nothing to overlap."""
    return max(1, min(rows // part_rows, MAX_PARTS))


def fitting_rows(hidden: int, num_ranks: int, step_rows: int = 0) -> int:
    """Rows that one call should have, at most, where steps have up to `step_rows`."""
    small = max(1, min(MAX_ROWS, MAX_SENT_BYTES // (hidden * 2 * max(num_ranks - 1, 1))))
    return max(small, min(step_rows, _large_rows(hidden, num_ranks)))


def most_rows(hidden: int, num_ranks: int) -> int:
    """Rows that one call can have; from `fitting_rows` on only two ranks gain by it."""
    return max(MAX_ROWS, _large_rows(hidden, num_ranks))


def _large_rows(hidden: int, num_ranks: int) -> int:
    return LARGE_SUM_BYTES // (hidden * 2) if num_ranks == LARGE_SUM_RANKS and hidden <= LARGE_SUM_HIDDEN else 0


def refusal(hidden: int, dtype: str, max_rows: int, num_ranks: int) -> str | None:
    """Why the kernel does not take such rows, or None."""
    if num_ranks not in RANK_COUNTS:
        return f"{num_ranks} ranks, allowed: {', '.join(map(str, RANK_COUNTS))}"
    if dtype not in DTYPES:
        return f"dtype {dtype}, allowed: {', '.join(DTYPES)}"
    if hidden % LANE_ELEMENTS or not 0 < hidden <= MAX_HIDDEN:
        return f"hidden={hidden}, allowed: multiples of {LANE_ELEMENTS} up to {MAX_HIDDEN}"
    if not 0 < max_rows <= (most := most_rows(hidden, num_ranks)):
        return f"max_rows={max_rows}, allowed: 1 to {most}"
    return None
