# SPDX-License-Identifier: Apache-2.0
"""The collectives of a plan on process groups. All parts are equal: steps are padded before they get here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import distributed

from tokenspeed_plugin.placement.runtime.torch_reduce_scatter import reduce_scatter_on

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import ProcessGroup

    from tokenspeed_plugin.kernels.comm.linear_operation import Linear
    from tokenspeed_plugin.placement.mesh import Mesh
    from tokenspeed_plugin.placement.plan import ModelPlan
    from tokenspeed_plugin.placement.runtime.residual_sum import RmsNorm


class Communicator(Protocol):
    """Collectives over the group of this rank along a set of atoms. Inputs are not changed."""

    def all_reduce(self, tensor: torch.Tensor, atoms: tuple[int, ...], op: str) -> torch.Tensor:
        """The reduction of all members' tensors."""
        ...

    def reduce_scatter(self, tensor: torch.Tensor, atoms: tuple[int, ...], dim: int, op: str) -> torch.Tensor:
        """This rank's part, along ``dim``, of the reduction."""
        ...

    def all_gather(self, tensor: torch.Tensor, atoms: tuple[int, ...], dim: int) -> torch.Tensor:
        """All members' tensors, joined along ``dim``."""
        ...

    def all_to_all(self, tensor: torch.Tensor, atoms: tuple[int, ...], from_dim: int, dim: int) -> torch.Tensor:
        """The tensor whole along ``from_dim`` and this rank's part of it along ``dim``."""
        ...


@runtime_checkable
class FusingCommunicator(Communicator, Protocol):
    """One that can do an all-reduce together with the residual sum and the norm behind it."""

    def all_reduce_add_norm(
        self, branch: torch.Tensor, residual: torch.Tensor | None, norm: RmsNorm, atoms: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of ``residual`` (if there is one) plus the sum of all members' ``branch``, and that sum."""
        ...


@runtime_checkable
class OverlappingCommunicator(FusingCommunicator, Protocol):
    """One that takes the linear layer in front of it as well, and can overlap the two."""

    def linear_all_reduce_add_norm(
        self,
        rows: torch.Tensor,
        linear: Linear,
        residual: torch.Tensor | None,
        norm: RmsNorm,
        atoms: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, where all members' branches are what ``linear`` makes of their ``rows``."""
        ...


class TorchCommunicator:
    """On ``torch.distributed``: one process group per set of atoms that the plans use."""

    def __init__(self, mesh: Mesh, plans: Iterable[ModelPlan]) -> None:
        """Create the groups; every rank of the world has to do this with the same plans."""
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        used = {move.atoms for plan in plans for section in plan.sections for move in section.collectives}
        for atoms in sorted(used):
            group, _ = distributed.new_subgroups_by_enumeration([list(ranks) for ranks in mesh.groups(atoms)])
            self._groups[atoms] = group

    def all_reduce(self, tensor: torch.Tensor, atoms: tuple[int, ...], op: str) -> torch.Tensor:
        """The reduction of all members' tensors."""
        result = tensor.clone()
        distributed.all_reduce(result, op=_reduction(op), group=self._groups[atoms])
        return result

    def reduce_scatter(self, tensor: torch.Tensor, atoms: tuple[int, ...], dim: int, op: str) -> torch.Tensor:
        """This rank's part, along ``dim``, of the reduction."""
        return reduce_scatter_on(self._groups[atoms], tensor, dim, _reduction(op))

    def all_gather(self, tensor: torch.Tensor, atoms: tuple[int, ...], dim: int) -> torch.Tensor:
        """All members' tensors, joined along ``dim``."""
        group = self._groups[atoms]
        front = tensor.movedim(dim, 0).contiguous()
        whole = front.new_empty(front.shape[0] * group.size(), *front.shape[1:])
        distributed.all_gather_into_tensor(whole, front, group=group)
        return whole.movedim(0, dim)

    def all_to_all(self, tensor: torch.Tensor, atoms: tuple[int, ...], from_dim: int, dim: int) -> torch.Tensor:
        """The tensor whole along ``from_dim`` and this rank's part of it along ``dim``."""
        group = self._groups[atoms]
        parts = torch.stack(tensor.chunk(group.size(), dim)).contiguous()
        received = torch.empty_like(parts)
        distributed.all_to_all_single(received, parts, group=group)
        return torch.cat(tuple(received), dim=from_dim)


def _reduction(op: str) -> distributed.ReduceOp.RedOpType:
    return distributed.ReduceOp.SUM if op == "sum" else distributed.ReduceOp.MAX
