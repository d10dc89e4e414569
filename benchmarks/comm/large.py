# SPDX-License-Identifier: Apache-2.0
"""One sum over two GPUs with the rows of a long prefill, residual add and norm, by every way there is: time on the GPU and on the host.

Nothing is captured, as in a prefill: the host enqueues calls while the GPU is kept busy, so neither time contains the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import distributed

from benchmarks.comm import checks
from benchmarks.comm.peers import FlashInferFused
from tokenspeed_plugin.kernels.comm import operation
from tokenspeed_plugin.kernels.comm.all_reduce_add_norm import RowShape, connect
from tokenspeed_plugin.kernels.comm.copies import connect_copies
from tokenspeed_plugin.kernels.comm.peer_memory import settle

ONE_LAUNCH, COPIES, NCCL, FLASHINFER, FLOOR = (
    "ours, one launch",
    "ours, copies + norm",
    "NCCL + our norm",
    "FlashInfer fused",
    "our norm alone",
)
WAYS = (ONE_LAUNCH, COPIES, FLASHINFER, NCCL, FLOOR)
CALLS, PASSES, ENDURANCE_CALLS = 16, 7, 40
SLEEP_CYCLES = 20_000_000
"""About 10 ms, in which the host enqueues all calls of a pass."""
ONE_SHOT_BYTES = 32 << 20
"""Up to here vLLM has FlashInfer send whole terms, as one-shot; from there on halves, in two steps."""

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""`step(branch, residual, weight)`."""


class LargeSums:
    """All ways for one shape, on one rank; every rank makes the same calls."""

    def __init__(
        self, rank: int, shape: RowShape, device: torch.device, control: distributed.ProcessGroup, timeout_s: float
    ) -> None:
        """`shape.max_rows`: rows of a call. What cannot be had is in `absent`, on all ranks alike."""
        self.absent: dict[str, str] = {}
        self.wrong: dict[str, int] = {}
        self._rank, self._shape, self._device, self._control = rank, shape, device, control
        hidden, dtype, rows = shape.hidden, shape.dtype, shape.max_rows
        small = connect(control, device, RowShape.fitting(hidden, dtype, distributed.get_world_size()), timeout_s)
        steps: dict[str, Step] = {FLOOR: lambda x, r, w: small.add_norm(x, r, w, checks.EPSILON)}
        fitting = RowShape.fitting(hidden, dtype, distributed.get_world_size(), rows)
        if fitting.max_rows == rows:
            whole = operation.ReductionGroup(_no_all_reduce, connect(control, device, fitting, timeout_s))
            steps[ONE_LAUNCH] = self._ours(ONE_LAUNCH, whole)
        else:
            self.absent[ONE_LAUNCH] = f"a call takes {fitting.max_rows} rows"
        exchange = connect_copies(control, device, shape)
        steps[COPIES] = self._ours(COPIES, operation.ReductionGroup(_no_all_reduce, small, None, exchange))
        steps[NCCL] = self._ours(NCCL, operation.ReductionGroup(_all_reduce, small))
        problem = None
        try:
            one_shot = rows * hidden * dtype.itemsize <= ONE_SHOT_BYTES
            steps[FLASHINFER] = FlashInferFused(control, shape, one_shot=one_shot)
        except Exception as error:  # whatever a peer raises, ours is measured
            problem = str(error) or repr(error)
        if (failed := settle(control, problem)) is not None:
            self.absent[FLASHINFER] = failed
            steps.pop(FLASHINFER, None)
        self._steps = {name: steps[name] for name in WAYS if name in steps}

    def _ours(self, name: str, members: operation.ReductionGroup) -> Step:
        group = f"large {name}"
        operation.register_group(group, members)
        return partial(_by_operation, group)

    def check(self) -> None:
        """Results of the two ways that are new to large sums, with changing rows and late ranks."""
        hidden, rows, size = self._shape.hidden, self._shape.max_rows, distributed.get_world_size()
        for name in (ONE_LAUNCH, COPIES):
            if name not in self._steps:
                continue
            fused = partial(checks.by_operation, f"large {name}")
            counts = tuple(count for count in (129, 1000, rows) if count <= rows)
            found = checks.check_shapes(fused, self._rank, size, hidden, counts, self._shape.dtype, self._device)
            found += checks.check_endurance(fused, self._rank, size, hidden, rows, ENDURANCE_CALLS, self._device)
            self.wrong[f"{hidden} x {rows}: {name}"] = found

    def times(self) -> dict[str, dict[str, float]]:
        """Microseconds of a call by way: `gpu` and `host`, medians."""
        inputs = checks.Inputs.random(
            9,
            self._rank,
            distributed.get_world_size(),
            self._shape.max_rows,
            self._shape.hidden,
            torch.bfloat16,
            self._device,
        )
        found: dict[str, dict[str, float]] = {}
        for name, step in self._steps.items():
            operands = (inputs.branch.clone(), inputs.residual.clone(), inputs.weight)
            passes, problem = [], None
            try:
                passes = [self._pass_us(partial(step, *operands)) for _ in range(PASSES + 1)][1:]
            except RuntimeError as error:
                problem = str(error)
            if (failed := settle(self._control, problem)) is not None:
                self.absent[name] = failed
                continue
            found[name] = {what: median(us[what] for us in passes) for what in ("gpu", "host")}
            if self._rank == 0:
                took = found[name]
                print(f"{name}: {self._shape.hidden}: {took['gpu']:.1f} us, host {took['host']:.1f} us", flush=True)
        return found

    def close(self) -> None:
        """Give FlashInfer's memory back; all ranks together."""
        torch.cuda.synchronize()
        distributed.barrier(self._control)
        peer = self._steps.get(FLASHINFER)
        if isinstance(peer, FlashInferFused):
            peer.close()

    def _pass_us(self, call: Callable[[], object]) -> dict[str, float]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        distributed.barrier(self._control)
        torch.cuda._sleep(SLEEP_CYCLES)
        call()  # all ranks meet in it, so that the wait for the last one to come is not counted
        start.record()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        host_s = time.perf_counter() - began
        end.record()
        torch.cuda.synchronize()
        return {"gpu": start.elapsed_time(end) * 1e3 / CALLS, "host": host_s * 1e6 / CALLS}


def large_sums(
    rank: int,
    hidden: tuple[int, ...],
    rows: int,
    device: torch.device,
    control: distributed.ProcessGroup,
    timeout_s: float,
) -> dict[str, Any]:
    """Checks and times of all ways for every hidden size."""
    found: dict[str, Any] = {"checks": {}, "large": [], "absent": {}}
    for size in hidden:
        sums = LargeSums(rank, RowShape(size, torch.bfloat16, rows), device, control, timeout_s)
        sums.check()
        times = sums.times()
        sums.close()
        found["checks"] |= sums.wrong
        found["absent"] |= {f"{size}: {name}": reason for name, reason in sums.absent.items()}
        found["large"].append({"hidden": size, "rows": rows, "times_us": times})
    return found


def _by_operation(group: str, branch: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> object:
    return operation.all_reduce_add_norm(branch, residual, weight, checks.EPSILON, 0.0, group)


def _all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    distributed.all_reduce(tensor)
    return tensor


def _no_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    raise AssertionError(f"{tuple(tensor.shape)} did not go the way that is measured")
