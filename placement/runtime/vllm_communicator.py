# SPDX-License-Identifier: Apache-2.0
"""The collectives of a plan on vLLM's tensor-parallel group, through its custom operations (torch.compile sees them).

Where the GPUs of the group reach each other's memory, an all-reduce and the norm behind it are one kernel of our own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tokenspeed_plugin.host.log import logger
from tokenspeed_plugin.host.norms import batch_invariant
from tokenspeed_plugin.kernels.comm.all_reduce_add_norm import AllReduceAddNorm, RowShape, connect
from tokenspeed_plugin.kernels.comm.copies import NUM_RANKS, CopyExchange, connect_copies
from tokenspeed_plugin.kernels.comm.limits import MAX_PARTS, OVERLAP_DEVICES, OVERLAP_HIDDEN, PART_ROWS
from tokenspeed_plugin.kernels.comm.linear_operation import Linear, linear_all_reduce_add_norm
from tokenspeed_plugin.kernels.comm.operation import ReductionGroup, all_reduce_add_norm, register_group
from tokenspeed_plugin.kernels.comm.overlap import Exchange, GroupExchange, Overlap, trial
from tokenspeed_plugin.kernels.comm.peer_memory import NotConnectedError
from tokenspeed_plugin.placement.algebra import Conversion, PlacementError
from tokenspeed_plugin.placement.runtime import torch_reduce_scatter
from tokenspeed_plugin.placement.spec import Fusing, Overlapping

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tokenspeed_plugin.placement.plan import ModelPlan
    from tokenspeed_plugin.placement.runtime.residual_sum import RmsNorm


class GroupCommunicator:
    """One group coordinator of vLLM for all collectives: every plan must use exactly its ranks."""

    def __init__(self, group: Any, plans: Iterable[ModelPlan]) -> None:
        """Check that the plans need nothing else.

        Raises:
            PlacementError: a collective that the group does not have, or over other ranks.
        """
        self._group = group
        self._torch_reduce_scatter = False
        for plan in plans:
            for move in (move for section in plan.sections for move in section.collectives):
                if plan.mesh.size(move.atoms) != group.world_size or move.op not in (None, "sum"):
                    _refuse(f"{move.kind.value} ({move.op}) over {plan.mesh.size(move.atoms)} ranks", group.world_size)
                if move.kind is Conversion.ALL_TO_ALL:
                    _refuse(move.kind.value, group.world_size)

    def all_reduce(self, tensor: torch.Tensor, atoms: tuple[int, ...], op: str) -> torch.Tensor:  # noqa: ARG002
        """The sum of all members' tensors."""
        # On CPU vLLM reduces in place; on GPUs it does not.
        own = tensor.clone() if tensor.device.type == "cpu" else tensor
        reduced: torch.Tensor = self._group.all_reduce(own)
        return reduced

    def reduce_scatter(self, tensor: torch.Tensor, atoms: tuple[int, ...], dim: int, op: str) -> torch.Tensor:  # noqa: ARG002
        """This rank's part, along ``dim``, of the sum."""
        if self._torch_reduce_scatter:
            return torch_reduce_scatter.reduce_scatter(tensor, dim, self._group.unique_name)
        part: torch.Tensor = self._group.reduce_scatter(tensor.contiguous(), dim)
        return part

    def leave_vllms_reduce_scatter(self) -> None:
        """From now on torch's process group does it; before anything is compiled, and on all ranks."""
        torch_reduce_scatter.register_process_group(self._group.unique_name, self._group.device_group)
        self._torch_reduce_scatter = True

    def all_gather(self, tensor: torch.Tensor, atoms: tuple[int, ...], dim: int) -> torch.Tensor:  # noqa: ARG002
        """All members' tensors, joined along ``dim``."""
        whole: torch.Tensor = self._group.all_gather(tensor.contiguous(), dim)
        return whole

    def all_to_all(self, tensor: torch.Tensor, atoms: tuple[int, ...], from_dim: int, dim: int) -> torch.Tensor:
        """Never called: the constructor refuses plans with it."""
        raise NotImplementedError


class FusedGroupCommunicator(GroupCommunicator):
    """The same, with the all-reduce, the residual sum and the norm behind it as one operation."""

    def __init__(
        self,
        group: Any,
        plans: Iterable[ModelPlan],
        kernel: AllReduceAddNorm | None,
        overlap: Overlap | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """Make the group known to the operation; without ``kernel`` that runs the group's all-reduce and a norm in torch.

        ``exchange`` takes the group's place in large steps.
        """
        super().__init__(group, plans)
        self._name = str(group.unique_name)
        members = ReductionGroup(lambda tensor: self.all_reduce(tensor, (), "sum"), kernel, overlap, exchange)
        register_group(self._name, members)

    def all_reduce_add_norm(
        self,
        branch: torch.Tensor,
        residual: torch.Tensor | None,
        norm: RmsNorm,
        atoms: tuple[int, ...],  # noqa: ARG002 - the constructor has seen that all collectives are over the group
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of ``residual`` (if there is one) plus the sum of all members' ``branch``, and that sum."""
        return all_reduce_add_norm(branch, residual, norm.weight, norm.epsilon, norm.weight_offset, self._name)


class OverlappingGroupCommunicator(FusedGroupCommunicator):
    """And with the linear layer in front, whose product large steps take in parts while earlier parts are reduced."""

    def __init__(
        self,
        group: Any,
        plans: Iterable[ModelPlan],
        kernel: AllReduceAddNorm | None,
        overlap: Overlap,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__(group, plans, kernel, overlap, exchange)
        self.least_tokens = overlap.least_rows if overlap.part_rows > 1 else 1
        """Of a step that overlaps something: plans for smaller ones leave linear layers as they are."""

    def linear_all_reduce_add_norm(
        self,
        rows: torch.Tensor,
        linear: Linear,
        residual: torch.Tensor | None,
        norm: RmsNorm,
        atoms: tuple[int, ...],  # noqa: ARG002 - as above
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, where all members' branches are what ``linear`` makes of their ``rows``."""
        return linear_all_reduce_add_norm(
            rows, linear, residual, norm.weight, norm.epsilon, norm.weight_offset, self._name
        )


def communicator_of(
    group: Any,
    plans: Iterable[ModelPlan],
    hidden: int,
    dtype: torch.dtype,
    fusing: Fusing,
    overlapping: Overlapping = Overlapping.AUTO,
    max_tokens: int = 0,
) -> GroupCommunicator:
    """The communicator for a group; every rank of it has to call this, and all get the same kind.

    ``max_tokens``: of a step, for which an overlap has room.

    Raises:
        PlacementError: see :class:`GroupCommunicator`.
    """
    plans = tuple(plans)
    if group.world_size == 1 or fusing is Fusing.OFF:
        return GroupCommunicator(group, plans)
    kernel = None
    if fusing is Fusing.AUTO:
        shape = RowShape.fitting(hidden, dtype, group.world_size, max_tokens)
        try:
            kernel = _connected(group, shape)
        except NotConnectedError as error:
            logger(__name__).info("placement: all-reduce + residual + norm in one kernel is not used because %s", error)
            return GroupCommunicator(group, plans)
        logger(__name__).info(
            "placement: all-reduce + residual + norm in one kernel for up to %d tokens, over %s",
            kernel.max_rows,
            kernel.memory.way,
        )
    shape = RowShape(hidden, dtype, max_tokens)
    copies = _copies(group, shape, kernel) if _needs_copies(shape, kernel, overlapping) else None
    overlap = _overlap(group, copies, shape, overlapping)
    if overlap is None:
        return FusedGroupCommunicator(group, plans, kernel, exchange=copies)
    return OverlappingGroupCommunicator(group, plans, kernel, overlap, copies)


def _connected(group: Any, shape: RowShape) -> AllReduceAddNorm:
    if batch_invariant():
        raise NotConnectedError("VLLM_BATCH_INVARIANT asks for vLLM's own batch-invariant norms")
    return connect(group.cpu_group, group.device, shape)


def _needs_copies(shape: RowShape, kernel: AllReduceAddNorm | None, overlapping: Overlapping) -> bool:
    """Whether the kernel leaves sums to copies: those that are overlapped, and those of more rows than it takes."""
    asked_for = overlapping in (Overlapping.ON, Overlapping.REFERENCE)
    overlapped = asked_for or (overlapping is Overlapping.AUTO and shape.hidden >= OVERLAP_HIDDEN)
    return overlapped or (kernel is not None and kernel.max_rows < shape.max_rows)


def _copies(group: Any, shape: RowShape, kernel: AllReduceAddNorm | None) -> CopyExchange | None:
    """What two GPUs do in place of an all-reduce of more rows than the kernel takes; the log says so, or why not."""
    if kernel is None or group.world_size != NUM_RANKS:
        return None
    like = torch.empty(shape.hidden, dtype=shape.dtype, device=group.device)
    try:
        exchange = connect_copies(group.cpu_group, group.device, shape)
        problem = trial(exchange, group.cpu_group, like)
    except NotConnectedError as error:
        problem = str(error)
    if problem is not None:
        logger(__name__).info("placement: large sums do not go by copies because %s", problem)
        return None
    logger(__name__).info("placement: sums of more tokens go by %s, where nothing is captured", exchange.way)
    return exchange


def _overlap(group: Any, copies: CopyExchange | None, shape: RowShape, overlapping: Overlapping) -> Overlap | None:
    """How large steps overlap products and reductions; the log says so, or why they do not."""
    reason = _no_overlap(group, copies, shape, overlapping)
    if reason is not None:
        if reason:
            _tell_no_overlap(reason)
        return None
    exchange: Exchange = copies or GroupExchange(group.device_group)
    like = torch.empty(shape.hidden, dtype=shape.dtype, device=group.device)
    problem = None if copies else trial(exchange, group.cpu_group, like)
    if problem is not None:
        _tell_no_overlap(f"by {exchange.way} because {problem}")
        return None
    overlap = Overlap(exchange, 1 if overlapping is Overlapping.REFERENCE else PART_ROWS)
    logger(__name__).info(
        "placement: in steps of %d tokens and more linear layers overlap their reduction in up to %d parts, by %s",
        overlap.least_rows,
        MAX_PARTS,
        exchange.way,
    )
    return overlap


def _no_overlap(group: Any, copies: CopyExchange | None, shape: RowShape, overlapping: Overlapping) -> str | None:
    """Why there is none; empty when nobody asked for one, None when there is one."""
    if overlapping is Overlapping.OFF:
        return ""
    if batch_invariant():
        return "because VLLM_BATCH_INVARIANT asks for results that do not depend on the batch"
    if overlapping is not Overlapping.AUTO:
        return None
    if copies is None:
        return ""
    device = torch.cuda.get_device_name(group.device)
    if shape.hidden < OVERLAP_HIDDEN or not any(name in device for name in OVERLAP_DEVICES):
        return (
            f"because hidden size {shape.hidden} on {device} is not known to gain: known is {OVERLAP_HIDDEN} and more on"
            f" {', '.join(OVERLAP_DEVICES)}; overlap=on does it anyway"
        )
    return None


def _tell_no_overlap(why: str) -> None:
    logger(__name__).info("placement: linear layers do not overlap their reduction %s", why)


def _refuse(what: str, world_size: int) -> None:
    message = f"{what}: vLLM's group has all-reduce, reduce-scatter and all-gather of sums over {world_size} ranks"
    raise PlacementError(message)
