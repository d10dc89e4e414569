# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual add + RMS norm over the GPUs of one host, in one launch that a CUDA graph can replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from tokenspeed_plugin.kernels.comm import library as comm
from tokenspeed_plugin.kernels.comm import limits
from tokenspeed_plugin.kernels.comm.abi import (
    BFLOAT16,
    DEPENDENT_LAUNCH,
    FLOAT16,
    FLOAT32,
    CommLibrary,
    Params,
)
from tokenspeed_plugin.kernels.comm.peer_memory import NotConnectedError, PeerMemory, settle, share

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tokenspeed_plugin.kernels.comm.overlap import Arriving

ELEMENT_TYPES: Final = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
WEIGHT_TYPES: Final = {**ELEMENT_TYPES, torch.float32: FLOAT32}
TIMEOUT_S: Final = 600.0
"""As long as a process group of NCCL waits. A rank may be late because it still compiles."""
_WORD_BYTES: Final = 4
_ALIGNMENT: Final = 2 << 20
"""Of allocations that other processes map."""


@dataclass(frozen=True)
class RowShape:
    """What all calls of one communicator have in common.

    Attributes:
        hidden: elements of a row.
        dtype: their type.
        max_rows: rows of a call, at most.
    """

    hidden: int
    dtype: torch.dtype
    max_rows: int

    @classmethod
    def fitting(cls, hidden: int, dtype: torch.dtype, num_ranks: int, step_rows: int = 0) -> RowShape:
        """With as many rows as one call should send, where steps have up to `step_rows`."""
        return cls(hidden, dtype, limits.fitting_rows(hidden, num_ranks, step_rows))

    def refusal(self, num_ranks: int) -> str | None:
        """Why the kernel does not take it, or None."""
        dtype = str(self.dtype).removeprefix("torch.")
        return limits.refusal(self.hidden, dtype, self.max_rows, num_ranks)


def connect(
    group: ProcessGroup, device: torch.device, shape: RowShape, timeout_s: float = TIMEOUT_S
) -> AllReduceAddNorm:
    """Build or find the library, share memory and test it; every rank of `group`, one of the CPU kind, has to call this.

    Raises:
        NotConnectedError: it cannot be had, on all ranks alike; the message says why.
    """
    library: CommLibrary | None = None
    problem = shape.refusal(group.size()) or _unfit(device, shape)
    for rank in (0, None):  # one builds, then the others find what was built
        if problem is None and library is None and rank in (None, group.rank()):
            try:
                library = comm.load()
            except (RuntimeError, OSError) as error:
                problem = str(error)
        if (failed := settle(group, problem)) is not None:
            raise NotConnectedError(failed)
    if library is None:
        raise NotConnectedError("no library")
    memory = share(group, library, device.index, memory_bytes(library, shape, group.size()))
    return AllReduceAddNorm(library, memory, group.rank(), device, shape, timeout_s)


def memory_bytes(library: CommLibrary, shape: RowShape, num_ranks: int) -> int:
    """Bytes of peer memory that each rank needs: for the rows of the others, and the number of each row's slot."""
    num_bytes = library.staging_bytes(num_ranks, shape.max_rows, shape.hidden) + _WORD_BYTES * shape.max_rows
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _unfit(device: torch.device, shape: RowShape) -> str | None:
    if device.type != "cuda" or device.index is None:
        return f"device {device}, allowed: cuda with a number"
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) != (9, 0):
        return f"compute capability {properties.major}.{properties.minor}, allowed: 9.0"
    at_once = min(shape.max_rows, limits.MAX_ROWS)
    if properties.multi_processor_count < at_once:
        return f"{at_once} rows at once, allowed: {properties.multi_processor_count}, one for each multiprocessor"
    return None


class AllReduceAddNorm:
    """The launches of one rank.

    All ranks must make the same calls in the same order. The launches of one rank must follow each other, on one stream or on
    streams that wait for each other. A peer that does not come within `timeout_s` ends this process's use of the device with
    a launch failure.
    """

    def __init__(
        self,
        library: CommLibrary,
        memory: PeerMemory,
        rank: int,
        device: torch.device,
        shape: RowShape,
        timeout_s: float = TIMEOUT_S,
        *,
        dependent_launch: bool = True,
        most_blocks: int = 0,
    ) -> None:
        """Load the kernels.

        `dependent_launch`: start before the previous kernel has drained, and wait for it inside; `most_blocks`: of a launch with
        many rows, 0: as many as run at once.
        """
        self.shape, self.memory, self.device = shape, memory, device
        self._flags = DEPENDENT_LAUNCH if dependent_launch else 0
        self._library, self._rank = library, rank
        self._timeout_ns = int(timeout_s * 1e9)
        self._num_ranks = len(memory.addresses)
        # A launch copies its parameters, so two blocks of them serve all launches: filling new ones took most of a call's time.
        self._blocks = {num_ranks: self._params(num_ranks) for num_ranks in (1, self._num_ranks)}
        whole = self._blocks[self._num_ranks]
        library.prepare(device.index, whole)
        large = shape.max_rows > limits.MAX_ROWS
        self._most_blocks = most_blocks or (library.blocks_at_once(device.index, whole) if large else 0)

    def with_launch(self, *, dependent_launch: bool) -> AllReduceAddNorm:
        """The same memory and the same count of calls, launched another way: to compare them."""
        return AllReduceAddNorm(
            self._library,
            self.memory,
            self._rank,
            self.device,
            self.shape,
            self._timeout_ns * 1e-9,
            dependent_launch=dependent_launch,
            most_blocks=self._most_blocks,
        )

    @property
    def max_rows(self) -> int:
        """Rows that one launch over all ranks takes."""
        return self.shape.max_rows

    def takes(self, branch: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None) -> bool:
        """Whether shapes and types of the operands are the kernel's; the number of rows and the layout aside."""
        hidden, dtype = self.shape.hidden, self.shape.dtype
        return (
            branch.dim() == 2
            and branch.shape[1] == hidden
            and branch.dtype == dtype
            and (residual is None or (residual.shape == branch.shape and residual.dtype == dtype))
            and (weight is None or (weight.shape == (hidden,) and weight.dtype in (dtype, torch.float32)))
        )

    def __call__(
        self,
        branch: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        epsilon: float,
        weight_offset: float = 0.0,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """RMS norm of `residual` plus the sum of all ranks' `branch`, and that sum.

        Args:
            branch: `[rows, hidden]`, this rank's term; at most `shape.max_rows` rows.
            residual: `[rows, hidden]`, the same on all ranks, or None.
            weight: `[hidden]`, in the type of the elements or fp32, or None.
            epsilon: added to the mean of squares.
            weight_offset: added to the weight.
            out: contiguous tensors to write to.

        Raises:
            ValueError: a shape, type or layout is not what the kernel takes; nothing was launched.
        """
        if branch.shape[0] > self.shape.max_rows:
            raise ValueError(f"branch: {branch.shape[0]} rows, allowed: {self.shape.max_rows}")
        return self._launch(self._num_ranks, branch, residual, weight, epsilon, weight_offset, out)

    def add_norm(
        self,
        reduced: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        epsilon: float,
        weight_offset: float = 0.0,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
        other: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for a sum that is there already, of any number of rows; no other rank takes part.

        `other`: contiguous rows that are added to `reduced` first, as the term of another rank is.
        """
        return self._launch(1, reduced, residual, weight, epsilon, weight_offset, out, other)

    def add_norm_of_parts(
        self,
        own: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        epsilon: float,
        weight_offset: float,
        out: tuple[torch.Tensor, torch.Tensor],
        arriving: Arriving,
    ) -> None:
        """The same for the sum of `own` and a peer's rows, which arrive in parts: each as soon as it has come."""
        params = self._filled(1, own, residual, weight, epsilon, weight_offset, out, arriving.rows)
        parts, num_parts = arriving.parts, arriving.num_parts
        self._library.add_norm_of_parts(self.device.index, params, parts, num_parts, self._stream())

    def _launch(
        self,
        num_ranks: int,
        branch: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        epsilon: float,
        weight_offset: float,
        out: tuple[torch.Tensor, torch.Tensor] | None,
        other: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = out or (self._new(branch.shape[0]), self._new(branch.shape[0]))
        params = self._filled(num_ranks, branch, residual, weight, epsilon, weight_offset, out, other)
        self._library.all_reduce_add_norm(self.device.index, params, self._stream())
        return out

    def _stream(self) -> int:
        stream: int = torch.cuda.current_stream(self.device).cuda_stream
        return stream

    def _filled(
        self,
        num_ranks: int,
        branch: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        epsilon: float,
        weight_offset: float,
        out: tuple[torch.Tensor, torch.Tensor],
        other: torch.Tensor | None = None,
    ) -> Params:
        """The block of parameters for a call; it is used again by the next one."""
        rows, params = branch.shape[0], self._blocks[num_ranks]
        params.branch, params.branch_stride = self._address(branch, "branch", rows), branch.stride(0)
        params.other = None if other is None else self._address(other, "other", rows, packed=True)
        params.residual = None if residual is None else self._address(residual, "residual", rows)
        params.residual_stride = 0 if residual is None else residual.stride(0)
        self._require_weight(weight)
        params.weight = None if weight is None else weight.data_ptr()
        params.weight_type = BFLOAT16 if weight is None else WEIGHT_TYPES[weight.dtype]
        params.normed = self._address(out[0], "normed", rows, packed=True)
        params.total = self._address(out[1], "total", rows, packed=True)
        params.rows, params.epsilon, params.weight_offset = rows, epsilon, weight_offset
        params.most_blocks = self._most_blocks if num_ranks > 1 and rows > limits.MAX_ROWS else 0
        return params

    def _params(self, num_ranks: int) -> Params:
        shape, addresses = self.shape, self.memory.addresses
        params = Params(
            rank=self._rank if num_ranks > 1 else 0,
            num_ranks=num_ranks,
            hidden=shape.hidden,
            max_rows=shape.max_rows,
            element_type=ELEMENT_TYPES[shape.dtype],
            launch_flags=self._flags,
            timeout_ns=self._timeout_ns,
        )
        for rank, address in enumerate(addresses):
            params.staging[rank] = address
        # Behind the staging memory, and in the same allocation: what says where a row is must live as long as the rows.
        params.last_slots = addresses[self._rank] + self._library.staging_bytes(
            len(addresses), shape.max_rows, shape.hidden
        )
        return params

    def _new(self, rows: int) -> torch.Tensor:
        return torch.empty(rows, self.shape.hidden, dtype=self.shape.dtype, device=self.device)

    def _address(self, tensor: torch.Tensor, name: str, rows: int, *, packed: bool = False) -> int:
        """Of a tensor that the kernel takes; `packed`: row behind row."""
        address, shape = tensor.data_ptr(), self.shape
        if tensor.shape != (rows, shape.hidden):
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, allowed: {(rows, shape.hidden)}")
        if tensor.dtype != shape.dtype or tensor.device != self.device:
            raise ValueError(f"{name}: {tensor.dtype} on {tensor.device}, allowed: {shape.dtype} on {self.device}")
        if tensor.is_contiguous() and address % 16 == 0:
            return address
        if packed:
            raise ValueError(f"{name}: strides {tensor.stride()}, allowed: contiguous, from a multiple of 16")
        row_stride = tensor.stride(0) if rows > 1 else 0
        if tensor.stride(1) != 1 or row_stride % limits.LANE_ELEMENTS or address % 16:
            raise ValueError(f"{name}: strides {tensor.stride()}, allowed: (a multiple of 8, 1), from a multiple of 16")
        return address

    def _require_weight(self, weight: torch.Tensor | None) -> None:
        if weight is None:
            return
        if tuple(weight.shape) != (self.shape.hidden,) or not weight.is_contiguous() or weight.data_ptr() % 16:
            raise ValueError(f"weight: shape {tuple(weight.shape)}, allowed: ({self.shape.hidden},), contiguous")
        if weight.dtype not in (self.shape.dtype, torch.float32) or weight.device != self.device:
            raise ValueError(
                f"weight: {weight.dtype} on {weight.device}, allowed: {self.shape.dtype} or fp32 on {self.device}"
            )
