# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.tokenspeed.reduce_scatter`: the reduce-scatter of a torch process group, as torch.compile and CUDA graphs see it.

vLLM's own needs an NCCL of its own choice (0.33: 2.29.7 or later) and writes nothing where it has not found one; torch's group
brings its NCCL along. The operation finds its group by name, because a graph can hold no object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import distributed
from torch.library import Library

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NAME: Final = "reduce_scatter"
_groups: dict[str, ProcessGroup] = {}


def register_process_group(name: str, group: ProcessGroup) -> None:
    """Make a group known to the operation in this process; a second one of that name takes its place."""
    _groups[name] = group


def reduce_scatter(tensor: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """This rank's part, along ``dim``, of the sum of all ranks' tensors; new and contiguous."""
    part: torch.Tensor = torch.ops.tokenspeed.reduce_scatter(tensor, dim, _groups[group].size(), group)
    return part


def reduce_scatter_on(
    group: ProcessGroup, tensor: torch.Tensor, dim: int, op: distributed.ReduceOp.RedOpType
) -> torch.Tensor:
    """The same for any reduction, outside of graphs."""
    front = tensor.movedim(dim, 0).contiguous()
    own = front.new_empty(front.shape[0] // group.size(), *front.shape[1:])
    distributed.reduce_scatter_tensor(own, front, op=op, group=group)
    return own.movedim(0, dim)


def _run(tensor: torch.Tensor, dim: int, size: int, group: str) -> torch.Tensor:  # noqa: ARG001 - size is for the shapes
    return reduce_scatter_on(_groups[group], tensor, dim, distributed.ReduceOp.SUM).contiguous()


def _shape(tensor: torch.Tensor, dim: int, size: int, group: str) -> torch.Tensor:  # noqa: ARG001
    shape = list(tensor.shape)
    shape[dim] //= size
    return tensor.new_empty(shape)


_library = Library("tokenspeed", "FRAGMENT")
_library.define(f"{_NAME}(Tensor tensor, int dim, int size, str group) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl(_NAME, _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"tokenspeed::{_NAME}", _shape, lib=_library)
