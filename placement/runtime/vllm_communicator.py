# SPDX-License-Identifier: Apache-2.0
"""The collectives of a plan on vLLM's tensor-parallel group, through its custom operations (torch.compile sees them)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenspeed_plugin.placement.algebra import Conversion, PlacementError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from tokenspeed_plugin.placement.plan import ModelPlan


class GroupCommunicator:
    """One group coordinator of vLLM for all collectives: every plan must use exactly its ranks."""

    def __init__(self, group: Any, plans: Iterable[ModelPlan]) -> None:
        """Check that the plans need nothing else.

        Raises:
            PlacementError: a collective that the group does not have, or over other ranks.
        """
        self._group = group
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
        part: torch.Tensor = self._group.reduce_scatter(tensor.contiguous(), dim)
        return part

    def all_gather(self, tensor: torch.Tensor, atoms: tuple[int, ...], dim: int) -> torch.Tensor:  # noqa: ARG002
        """All members' tensors, joined along ``dim``."""
        whole: torch.Tensor = self._group.all_gather(tensor.contiguous(), dim)
        return whole

    def all_to_all(self, tensor: torch.Tensor, atoms: tuple[int, ...], from_dim: int, dim: int) -> torch.Tensor:
        """Never called: the constructor refuses plans with it."""
        raise NotImplementedError


def _refuse(what: str, world_size: int) -> None:
    message = f"{what}: vLLM's group has all-reduce, reduce-scatter and all-gather of sums over {world_size} ranks"
    raise PlacementError(message)
