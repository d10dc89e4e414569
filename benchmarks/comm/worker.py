# SPDX-License-Identifier: Apache-2.0
"""One rank of the benchmark: connects, checks, times, writes what it found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed

from benchmarks.comm import checks, timing
from benchmarks.comm.bars import FLASHINFER, OURS, VLLM
from benchmarks.comm.large import large_sums
from benchmarks.comm.peers import FlashInferFused, Stock
from tokenspeed_plugin.kernels.comm import operation
from tokenspeed_plugin.kernels.comm.all_reduce_add_norm import AllReduceAddNorm, RowShape, connect
from tokenspeed_plugin.kernels.comm.peer_memory import NotConnectedError, settle

GROUP_TIMEOUT = timedelta(seconds=300)
GROUP = "benchmark"
Peer = TypeVar("Peer")


@dataclass(frozen=True)
class Options:
    """What to run; `device` is `cuda` or `cpu`. `large_rows`: time sums of so many rows instead, 0: do not."""

    ranks: int
    hidden: tuple[int, ...]
    rows: tuple[int, ...]
    calls: int
    timeout_s: float
    device: str
    large_rows: int = 0


def run(rank: int, options: Options, folder: str) -> None:
    """Body of the process of one rank."""
    on_gpu = options.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=options.ranks,
        timeout=GROUP_TIMEOUT,
        device_id=device if on_gpu else None,
    )
    control = distributed.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
    if on_gpu and options.large_rows:
        found = {"device": torch.cuda.get_device_name(device), "way": "see the checks", "times": []}
        found |= large_sums(rank, options.hidden, options.large_rows, device, control, options.timeout_s)
    else:
        found = on_gpus(rank, options, device, control) if on_gpu else on_cpus(rank, options, device)
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def on_cpus(rank: int, options: Options, device: torch.device) -> dict[str, Any]:
    """The checks with the operation's way without a kernel."""
    operation.register_group(GROUP, operation.ReductionGroup(_all_reduce))
    fused = partial(checks.by_operation, GROUP)
    found: dict[str, int] = {}
    for hidden in options.hidden:
        for dtype in (torch.bfloat16, torch.float16):
            found[f"{hidden} {dtype}: shapes"] = checks.check_shapes(
                fused, rank, options.ranks, hidden, options.rows, dtype, device
            )
        most = max(options.rows)
        found[f"{hidden}: {options.calls} calls"] = checks.check_endurance(
            fused, rank, options.ranks, hidden, most, options.calls, device
        )
        found[f"{hidden}: one row after another"] = checks.check_endurance(
            fused, rank, options.ranks, hidden, 1, options.calls, device
        )
    return {"device": "CPU", "way": "none", "checks": found, "times": [], "absent": {}}


def on_gpus(rank: int, options: Options, device: torch.device, control: distributed.ProcessGroup) -> dict[str, Any]:
    """All checks and times; a kernel that cannot be had is reported with its reason."""
    name = torch.cuda.get_device_name(device)
    found: dict[str, Any] = {"device": name, "way": "none", "checks": {}, "times": [], "absent": {}}
    stock = _peer(found["absent"], VLLM, lambda: Stock(control, device), control)
    for hidden in options.hidden:
        for dtype in (torch.bfloat16, torch.float16):
            shape = RowShape.fitting(hidden, dtype, options.ranks)
            try:
                kernel = connect(control, device, shape, options.timeout_s)
            except NotConnectedError as error:
                found["absent"][OURS] = str(error)
                return found
            found["way"] = kernel.memory.way
            _check(found["checks"], kernel, rank, options, control)
            if dtype == torch.bfloat16:
                found["times"] += _times(found["absent"], kernel, rank, options, stock, control)
            torch.cuda.synchronize()
            distributed.barrier()
            kernel.memory.close()
    return found


def _check(
    found: dict[str, int],
    kernel: AllReduceAddNorm,
    rank: int,
    options: Options,
    control: distributed.ProcessGroup,
) -> None:
    shape, device = kernel.shape, kernel.device
    fused = partial(_launch, kernel)
    rows = tuple(count for count in (1, 2, 16, 64, shape.max_rows) if count <= shape.max_rows)
    label = f"{shape.hidden} {str(shape.dtype).removeprefix('torch.')}"
    found[f"{label}: shapes"] = checks.check_shapes(fused, rank, options.ranks, shape.hidden, rows, shape.dtype, device)
    if shape.dtype != torch.bfloat16:
        return
    most = min(64, shape.max_rows)
    found[f"{label}: {options.calls} calls"] = checks.check_endurance(
        fused, rank, options.ranks, shape.hidden, most, options.calls, device
    )
    found[f"{label}: graph replays"] = checks.check_graphs(fused, rank, options.ranks, shape.hidden, most, device)
    operation.register_group(GROUP, operation.ReductionGroup(_all_reduce, kernel))
    above = (1, shape.max_rows, shape.max_rows + 1, 2 * shape.max_rows)
    if options.ranks > 2:
        above = above[:2]  # NCCL rounds at every hop, which is another sum
    found[f"{label}: operation up to {above[-1]} rows"] = checks.check_shapes(
        partial(checks.by_operation, GROUP), rank, options.ranks, shape.hidden, above, shape.dtype, device
    )
    torch.cuda.synchronize()
    distributed.barrier(control)


def _peer(
    absent: dict[str, str], name: str, make: Callable[[], Peer], control: distributed.ProcessGroup
) -> Peer | None:
    """The peer, or None on all ranks when one of them could not make it; `absent` gets the reason."""
    peer, problem = None, None
    try:
        peer = make()
    except Exception as error:  # whatever a peer raises, ours is measured
        problem = str(error)
    if (failed := settle(control, problem)) is not None:
        absent[name] = failed
        return None
    return peer


def _times(
    absent: dict[str, str],
    kernel: AllReduceAddNorm,
    rank: int,
    options: Options,
    stock: Stock | None,
    control: distributed.ProcessGroup,
) -> list[dict[str, Any]]:
    """Times of all implementations; ours come first, and each is printed when it is there."""
    shape = kernel.shape
    rows = [count for count in options.rows if count <= shape.max_rows]
    if not rows:
        return []
    inputs = checks.Inputs.random(9, rank, options.ranks, max(rows), shape.hidden, shape.dtype, kernel.device)
    cells: list[dict[str, Any]] = [{"hidden": shape.hidden, "rows": count, "times_us": {}} for count in rows]
    flashinfer = _peer(absent, FLASHINFER, lambda: FlashInferFused(control, shape), control)
    for name, step in timing.steps(kernel, kernel.with_launch(dependent_launch=False), stock, flashinfer).items():
        for cell in cells:
            if name in absent:
                break
            problem = None
            try:
                cell["times_us"][name] = timing.time_us(step, inputs, cell["rows"], stock)
            except RuntimeError as error:
                problem = str(error)
            if (failed := settle(control, problem)) is not None:
                absent[name] = failed
                cell["times_us"].pop(name, None)
            elif rank == 0:
                print(f"{name}: {shape.hidden} x {cell['rows']}: {cell['times_us'][name]:.2f} us", flush=True)
    if flashinfer is not None:
        torch.cuda.synchronize()
        distributed.barrier(control)
        flashinfer.close()
    return cells


def _launch(
    kernel: AllReduceAddNorm,
    branch: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    out: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    return kernel(branch, residual, weight, checks.EPSILON, out=out)


def _all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    reduced = tensor.clone()
    distributed.all_reduce(reduced)
    return reduced
