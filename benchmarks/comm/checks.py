# SPDX-License-Identifier: Apache-2.0
"""Whether the fused all-reduce computes what it should, on one rank of a group; every rank runs the same checks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenspeed_plugin.kernels.comm import operation
from tokenspeed_plugin.kernels.comm.reference import add_norm_reference, sum_reference

EPSILON = 1e-5
SETS = 4
GRAPH_ROWS = (1, 5, 2, 16, 1, 64, 3, 7)
GRAPH_REPLAYS = 200

Fused = Callable[
    [torch.Tensor, torch.Tensor | None, torch.Tensor | None, tuple[torch.Tensor, torch.Tensor]],
    tuple[torch.Tensor, torch.Tensor],
]
"""`fused(branch, residual, weight, out)`."""


@dataclass(frozen=True)
class Inputs:
    """One set of operands and results, the same on all ranks but for `branch`, which is this rank's term."""

    branch: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    normed: torch.Tensor
    total: torch.Tensor

    @classmethod
    def random(
        cls, seed: int, rank: int, ranks: int, rows: int, hidden: int, dtype: torch.dtype, device: torch.device
    ) -> Inputs:
        """Fresh random operands, every rank's from the same seed; the results are the reference's."""
        generator = torch.Generator(device).manual_seed(seed)
        shape = (ranks, rows, hidden)
        branches = torch.randn(shape, generator=generator, device=device).to(dtype)
        residual = torch.randn(shape[1:], generator=generator, device=device).mul_(3).to(dtype)
        weight = torch.randn(hidden, generator=generator, device=device).to(dtype)
        normed, total = add_norm_reference(sum_reference(list(branches)), residual, weight, EPSILON)
        return cls(branches[rank].clone(), residual, weight, normed, total)


def poisoned(rows: int, hidden: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs full of NaN: what is not written shows."""
    return (
        torch.full((rows, hidden), float("nan"), dtype=like.dtype, device=like.device),
        torch.full((rows, hidden), float("nan"), dtype=like.dtype, device=like.device),
    )


def wrong_values(inputs: Inputs, rows: int, normed: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """How many totals differ in any bit, and how many normalised values by more than one unit in the last place."""
    unit = 2 * torch.finfo(total.dtype).eps
    close = torch.isclose(normed.float(), inputs.normed[:rows].float(), rtol=unit, atol=1e-6)
    return (total != inputs.total[:rows]).sum() + (~close).sum()


def check_shapes(
    fused: Fused, rank: int, ranks: int, hidden: int, rows: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> int:
    """One call for each number of rows, and one each without residual and without weight."""
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for index, count in enumerate(rows):
        inputs = Inputs.random(index, rank, ranks, count, hidden, dtype, device)
        out = poisoned(count, hidden, inputs.branch)
        fused(inputs.branch, inputs.residual, inputs.weight, out)
        wrong += wrong_values(inputs, count, *out)
        bare = poisoned(count, hidden, inputs.branch)
        fused(inputs.branch, None, None, bare)
        reduced = inputs.total.float() - inputs.residual.float()
        # Without residual the total is the rounded sum: close to what is left when the residual is taken away.
        wrong += (~torch.isclose(bare[1].float(), reduced, rtol=0.02, atol=0.1)).sum()
        wrong += (~torch.isclose(bare[0].float().pow(2).mean(-1), torch.ones(count, device=device), rtol=0.02)).sum()
    return int(wrong.item())


def check_endurance(
    fused: Fused, rank: int, ranks: int, hidden: int, max_rows: int, calls: int, device: torch.device
) -> int:
    """Back-to-back calls with changing numbers of rows; now and then a rank comes late, on the device or on the host."""
    dtype = torch.bfloat16
    sets = [Inputs.random(100 + i, rank, ranks, max_rows, hidden, dtype, device) for i in range(SETS)]
    common, own = random.Random(7), random.Random(1000 + rank)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    out = poisoned(max_rows, hidden, sets[0].branch)
    for call in range(calls):
        rows = common.choice((1, 1, 2, 3, 16, max_rows, common.randint(1, max_rows)))
        inputs = sets[call % SETS]
        part = (out[0][:rows], out[1][:rows])
        for tensor in out:
            tensor.fill_(float("nan"))
        _dawdle(own, device)
        fused(inputs.branch[:rows], inputs.residual[:rows], inputs.weight, part)
        wrong += wrong_values(inputs, rows, *part)
        wrong += sum((~tensor[rows:].isnan()).sum() for tensor in out)
    return int(wrong.item())


def check_graphs(fused: Fused, rank: int, ranks: int, hidden: int, max_rows: int, device: torch.device) -> int:
    """A CUDA graph of calls with different numbers of rows, replayed with inputs that change under it."""
    dtype = torch.bfloat16
    sets = [Inputs.random(200 + i, rank, ranks, max_rows, hidden, dtype, device) for i in range(SETS)]
    live = Inputs(*(torch.empty_like(t) for t in vars(sets[0]).values()))
    rows = [min(count, max_rows) for count in GRAPH_ROWS]
    outs = [poisoned(count, hidden, live.branch) for count in rows]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for count, out in zip(rows, outs, strict=True):
            fused(live.branch[:count], live.residual[:count], live.weight, out)
    own = random.Random(2000 + rank)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for replay in range(GRAPH_REPLAYS):
        for target, source in zip(vars(live).values(), vars(sets[replay % SETS]).values(), strict=True):
            target.copy_(source)
        for tensor in (t for out in outs for t in out):
            tensor.fill_(float("nan"))
        _dawdle(own, device)
        graph.replay()
        for count, out in zip(rows, outs, strict=True):
            wrong += wrong_values(live, count, *out)
    return int(wrong.item())


def _dawdle(own: random.Random, device: torch.device) -> None:
    if device.type == "cuda" and own.random() < 0.3:
        torch.cuda._sleep(own.randint(1, 100_000))  # cycles of the device, up to about 50 us
    if own.random() < 0.01:
        time.sleep(own.random() * 0.005)


def by_operation(
    group: str,
    branch: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    out: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The step as models take it, through the operation for a registered group, into tensors that are there."""
    made = operation.all_reduce_add_norm(branch, residual, weight, EPSILON, 0.0, group)
    for target, source in zip(out, made, strict=True):
        target.copy_(source)
    return out
