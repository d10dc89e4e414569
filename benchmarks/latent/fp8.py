# SPDX-License-Identifier: Apache-2.0
"""MLA decode from an e4m3 cache with e4m3 queries: ours, FlashMLA's as vLLM has it, and what is asked of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.latent.cells import Cell
from benchmarks.latent.passes import REPLAYS, in_turn, settle_us
from benchmarks.latent.peers import FlashMlaFp8, PeerUnavailableError
from benchmarks.latent.timing import Inputs
from benchmarks.report import Bar, MissingFigureError
from tokenspeed_plugin.kernels.graph_timing import time_us
from tokenspeed_plugin.kernels.mla.geometry import LATENT_DIMS
from tokenspeed_plugin.kernels.mla.sm90.decode import MlaDecodePlan
from tokenspeed_plugin.kernels.mla.sm90.decode_fp8 import E4M3, fp8_workspace, mla_decode_fp8

OURS_BF16, OURS, PEER = "ours", "ours, FP8", "FlashMLA, FP8"
SHORT_ROWS = 32
"""Folds of at most so many query rows are bound by reading KV."""
LONG_FLOOR_US = 140
LARGEST_POOL_BYTES = 16 * 65536 * 576 * 3
BLOCK_ELEMENTS = 1 << 22
READ_BYTES_PER_S = 4e12
"""About what an H200 reads, to tell long calls from short ones."""


class Measured(Protocol):
    """A cell of the bf16 table, to which the FP8 times are added."""

    cell: Cell
    floor_us: float
    times_us: dict[str, float]


def is_measured(cell: Cell) -> bool:
    """Whether the cell is measured in FP8: short folds, and single query tokens of more heads."""
    return cell.heads * cell.query_tokens <= SHORT_ROWS or (cell.query_tokens == 1 and cell.context_tokens <= 65536)


class Fp8Bench:
    """Times cells in FP8; without the peer of vLLM, `absent` says why."""

    def __init__(self, folder: Path | None) -> None:
        block = torch.randn(BLOCK_ELEMENTS, device="cuda").to(E4M3).view(torch.uint8)
        self.pool = block.repeat(LARGEST_POOL_BYTES // BLOCK_ELEMENTS).view(E4M3)
        self.peer, self.absent = None, ""
        try:
            self.peer = FlashMlaFp8(folder)
        except PeerUnavailableError as error:
            self.absent = str(error)

    def times_us(self, cell: Cell, page_tokens: int, number: int) -> tuple[dict[str, float], float]:
        """Microseconds of a pass by implementation, and the relative difference of ours to the peer's output."""
        inputs = Inputs(cell, page_tokens, self.pool)
        one = torch.ones(1, device=self.pool.device)
        settle = settle_us(cell.floor_us(READ_BYTES_PER_S))
        times_us, outputs = {}, {}
        for name in in_turn([OURS, PEER], number):
            if name == OURS:
                times_us[name], outputs[name] = time_ours(inputs, one, REPLAYS, settle)
            elif self.peer is not None:
                times_us[name], outputs[name] = self.peer.time_us(inputs, one, REPLAYS, settle)
        out, theirs = outputs[OURS].float(), outputs.get(PEER, outputs[OURS]).float()
        return times_us, ((out - theirs).norm() / theirs.norm()).item()


def time_ours(inputs: Inputs, scale: torch.Tensor, replays: int, settle: float) -> tuple[float, torch.Tensor]:
    """Microseconds of decode, and the output on the first part of the KV cache."""
    cell, device = inputs.cell, inputs.q.device
    workspace = fp8_workspace(cell.heads, cell.query_tokens, cell.requests, device)
    plans = [MlaDecodePlan(workspace, cell.requests) for _ in inputs.block_tables]
    for plan, table in zip(plans, inputs.block_tables, strict=True):
        plan.update(inputs.seq_lens, table, inputs.page_tokens)
    out = torch.empty(*inputs.q.shape[:2], LATENT_DIMS, dtype=torch.bfloat16, device=device)
    lse = torch.empty(inputs.q.shape[:2], dtype=torch.float32, device=device)

    def launch(call: int) -> None:
        plan = plans[inputs.part(call)]
        mla_decode_fp8(inputs.q, inputs.kv_cache, plan, inputs.scale, scale, scale, out=out, lse=lse)

    decode_us = time_us(launch, replays, settle)
    launch(0)
    return decode_us, out


def smallest_ratio(cells: Sequence[Measured], above: str) -> float:
    """Smallest time of `above` over that of our FP8 kernel.

    Raises:
        MissingFigureError: there are no such cells, or one of the two did not run.
    """
    for m in cells:
        if missing := [name for name in (OURS, above) if name not in m.times_us]:
            raise MissingFigureError(f"{m.cell}: {', '.join(missing)} did not run")
    if not cells:
        raise MissingFigureError("no such cell was run")
    return min(m.times_us[above] / m.times_us[OURS] for m in cells)


def fp8_bars(measured: Sequence[Measured]) -> list[Bar]:
    """What the project's issue on kernels asks of FP8 KV."""
    cells = [m for m in measured if is_measured(m.cell)]
    short = [m for m in cells if m.cell.heads * m.cell.query_tokens <= SHORT_ROWS]
    long = [m for m in short if m.floor_us > LONG_FLOOR_US and m.cell.requests > 1]
    few = [m for m in short if (m.cell.requests, m.cell.context_tokens) in {(1, 65536), (4, 32768)}]
    return [
        Bar(
            "FP8 KV: worst speed-up over our bf16, short folds, bf16 floor over 140 us",
            ">=",
            1.5,
            partial(smallest_ratio, long, OURS_BF16),
        ),
        Bar(
            "FP8 KV: worst speed-up over our bf16, short folds, B1 L64K and B4 L32K",
            ">=",
            1.2,
            partial(smallest_ratio, few, OURS_BF16),
        ),
        Bar("FP8 KV: worst speed-up over FlashMLA's FP8", ">=", 1.0, partial(smallest_ratio, cells, PEER)),
    ]


def table_rows(measured: Sequence[Measured]) -> list[tuple[str, ...]]:
    """One row per cell that ran: times, and the ratios to our bf16 and to the peer."""
    rows = []
    for m in measured:
        if OURS in m.times_us:
            ours = m.times_us[OURS]
            rows.append(
                (
                    str(m.cell),
                    *_numbers(m.times_us),
                    _ratio(m.times_us, OURS_BF16, ours),
                    _ratio(m.times_us, PEER, ours),
                )
            )
    return rows


def _numbers(times_us: Mapping[str, float]) -> list[str]:
    return [f"{times_us[name]:.1f}" if name in times_us else "-" for name in (OURS, PEER, OURS_BF16)]


def _ratio(times_us: Mapping[str, float], above: str, ours: float) -> str:
    return f"{times_us[above] / ours:.2f}" if above in times_us else "-"
