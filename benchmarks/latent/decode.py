# SPDX-License-Identifier: Apache-2.0
"""MLA decode on one cell: ours, the peers, and the sweep, all on the same inputs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.latent.cells import Cell
from benchmarks.latent.fp8 import Fp8Bench
from benchmarks.latent.passes import REPLAYS, in_turn, medians, settle_us
from benchmarks.latent.peers import PEERS, FlashAttention3, FlashMlaFp8, Peer, PeerUnavailableError, TritonMla
from benchmarks.latent.timing import Inputs, Sweep, copy_bytes_per_s
from benchmarks.report import MissingFigureError
from tokenspeed_plugin.kernels.graph_timing import time_us
from tokenspeed_plugin.kernels.mla.geometry import HEAD_DIMS, LATENT_DIMS
from tokenspeed_plugin.kernels.mla.share import PAGE_TOKENS
from tokenspeed_plugin.kernels.mla.sm90.decode import MlaDecodePlan, MlaWorkspace, mla_decode

STOCK = ("FlashMLA", "FlashAttention 3")
OURS, SWEEP = "ours", "read-only sweep"


@dataclass
class Measured:
    """Microseconds of one cell by implementation, and the largest relative difference to another's output."""

    cell: Cell
    floor_us: float
    times_us: dict[str, float] = field(default_factory=dict)
    """Medians over the passes."""
    passes_us: list[dict[str, float]] = field(default_factory=list)
    """Of each pass."""
    plan_us: float = 0.0
    difference: float = 0.0
    fp8_difference: float = 0.0

    def add(self, number: int, times_us: dict[str, float]) -> None:
        """Take in what a pass has timed."""
        self.passes_us.extend({} for _ in range(number + 1 - len(self.passes_us)))
        self.passes_us[number].update(times_us)
        self.times_us = medians(self.passes_us)

    @property
    def speedup(self) -> float:
        """The better of stock's over ours."""
        if OURS not in self.times_us:
            raise MissingFigureError(f"{self.cell}: {OURS} did not run")
        return min(self.stock_us().values()) / self.times_us[OURS]

    def stock_us(self) -> dict[str, float]:
        """Return the times of FlashMLA and FlashAttention 3; both must have run."""
        found = {name: self.times_us[name] for name in STOCK if name in self.times_us}
        if len(found) < len(STOCK):
            raise MissingFigureError(f"{self.cell}: {', '.join(n for n in STOCK if n not in found)} did not run")
        return found


class DecodeBench:
    """Times cells, in bf16 and in FP8; peers that this machine lacks are named once and left out.

    Args:
        folder: vLLM's shared objects, where vLLM cannot be imported.
        pool_tokens: tokens of bf16 KV that cells are cut from.
        sweeps: cells on which the same bytes are also read and dropped.
        triton: whether vLLM's Triton kernel takes part.
    """

    def __init__(self, folder: Path | None, pool_tokens: int, sweeps: frozenset[Cell], triton: bool) -> None:
        self.pool = torch.empty(pool_tokens * HEAD_DIMS, dtype=torch.bfloat16, device="cuda").normal_()
        self.measured: dict[Cell, Measured] = {}
        self.absent: dict[str, str] = {}
        self._sweep, self._sweeps = Sweep(), sweeps
        self._peers: dict[str, Peer] = {}
        for peer in PEERS if triton else [peer for peer in PEERS if peer is not TritonMla]:
            try:
                self._peers[peer.name] = peer(folder)
            except PeerUnavailableError as error:
                self.absent[peer.name] = str(error)
        self._fp8 = Fp8Bench(folder)
        if self._fp8.absent:
            self.absent[FlashMlaFp8.name] = self._fp8.absent
        self.bytes_per_s = copy_bytes_per_s(self.pool)

    def run(self, cell: Cell, number: int) -> None:
        """Time all implementations of a pass on one cell, in bf16."""
        inputs, measured = Inputs(cell, PAGE_TOKENS, self.pool), self._of(cell)
        settle = settle_us(measured.floor_us)
        outputs: dict[str, torch.Tensor] = {}
        times_us: dict[str, float] = {}
        names = [OURS, *self._peers, *([SWEEP] if cell in self._sweeps else [])]
        for name in in_turn(names, number):
            if name == OURS:
                times_us[name], measured.plan_us, outputs[name] = time_ours(inputs, REPLAYS, settle)
            elif name == SWEEP:
                times_us[name] = self._sweep.time_us(inputs, REPLAYS, settle)
            else:
                with contextlib.suppress(PeerUnavailableError):  # not on this cell
                    found, outputs[name] = peer_us(self._peers[name], inputs, settle)
                    times_us.update(found)
        measured.add(number, times_us)
        result = outputs.pop(OURS).float()
        for other in outputs.values():
            difference = ((result - other.float()).norm() / other.float().norm()).item()
            measured.difference = max(measured.difference, difference)

    def run_fp8(self, cell: Cell, number: int) -> None:
        """Time both implementations of a pass on one cell, in FP8."""
        times_us, difference = self._fp8.times_us(cell, PAGE_TOKENS, number)
        measured = self._of(cell)
        measured.add(number, times_us)
        measured.fp8_difference = max(measured.fp8_difference, difference)

    def _of(self, cell: Cell) -> Measured:
        return self.measured.setdefault(cell, Measured(cell, cell.floor_us(self.bytes_per_s)))


def peer_us(peer: Peer, inputs: Inputs, settle: float) -> tuple[dict[str, float], torch.Tensor]:
    """Microseconds of a pass by implementation and setting, and the output on the first part of the KV cache."""
    if isinstance(peer, FlashAttention3):
        return peer.settings_us(inputs, REPLAYS, settle)
    timed, out = peer.time_us(inputs, REPLAYS, settle)
    return {peer.name: timed}, out


def time_ours(inputs: Inputs, replays: int = 9, settle: float = 0.0) -> tuple[float, float, torch.Tensor]:
    """Microseconds of decode and of planning, and the output on the first part of the KV cache."""
    cell, device = inputs.cell, inputs.q.device
    workspace = MlaWorkspace(cell.heads, cell.query_tokens, cell.requests, device)
    plans = [MlaDecodePlan(workspace, cell.requests) for _ in inputs.block_tables]
    for plan, table in zip(plans, inputs.block_tables, strict=True):
        plan.update(inputs.seq_lens, table, inputs.page_tokens)
    q_nope, q_rope = inputs.q.split((LATENT_DIMS, HEAD_DIMS - LATENT_DIMS), dim=-1)
    out = torch.empty_like(q_nope, memory_format=torch.contiguous_format)
    lse = torch.empty(q_nope.shape[:2], dtype=torch.float32, device=device)

    def launch(call: int) -> None:
        mla_decode(q_nope, q_rope, inputs.kv_cache, plans[inputs.part(call)], inputs.scale, out=out, lse=lse)

    decode_us = time_us(launch, replays, settle)
    plan_us = time_us(lambda _: plans[0].update(inputs.seq_lens, inputs.block_tables[0], inputs.page_tokens), replays)
    launch(0)
    return decode_us, plan_us, out
