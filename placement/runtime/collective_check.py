# SPDX-License-Identifier: Apache-2.0
"""Runs each collective of the plans once at start-up, on values whose result is known.

The verifier proves that a plan is right, not that the machine does what the plan says. vLLM's group, for one, returns memory that
nobody wrote from a reduce-scatter when it has not found NCCL (0.33 on GPUs), and says nothing.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from tokenspeed_plugin.host.log import logger
from tokenspeed_plugin.kernels.comm.peer_memory import settle
from tokenspeed_plugin.placement.algebra import Conversion, PlacementError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tokenspeed_plugin.placement.plan import ModelPlan
    from tokenspeed_plugin.placement.runtime.communicator import Communicator
    from tokenspeed_plugin.placement.runtime.vllm_communicator import GroupCommunicator

_ROWS_PER_RANK: Final = 2
_COLUMNS: Final = 8


def check_collectives(
    communicator: GroupCommunicator, group: Any, plans: Iterable[ModelPlan], dtype: torch.dtype
) -> None:
    """Try what the plans use on vLLM's ``group``; every rank of it has to call this.

    Raises:
        PlacementError: a collective gives wrong values or fails, on any rank; raised on all of them.
    """
    used = {move.kind for plan in plans for section in plan.sections for move in section.collectives}
    check_kinds(communicator, group, used, dtype)


def check_kinds(communicator: GroupCommunicator, group: Any, kinds: set[Conversion], dtype: torch.dtype) -> None:
    """The same for kinds of collectives. A reduce-scatter that does not work is left to torch's process group, and tried again."""
    for kind in sorted(kinds & _CHECKS.keys(), key=lambda kind: kind.value):
        problem = settle(group.cpu_group, _problem(partial(_CHECKS[kind], communicator, group, dtype)))
        if problem is not None and kind is Conversion.REDUCE_SCATTER:
            logger(__name__).warning(
                "placement: vLLM's reduce-scatter does not work here (%s); torch's is used. Often vLLM has not found an NCCL that is "
                "new enough: VLLM_NCCL_SO_PATH names its library",
                problem,
            )
            communicator.leave_vllms_reduce_scatter()
            problem = settle(group.cpu_group, _problem(partial(_CHECKS[kind], communicator, group, dtype)))
        if problem is not None:
            message = (
                f"placement: {kind.value} over {group.world_size} ranks does not work here ({problem}). Often vLLM has not "
                "found NCCL: VLLM_NCCL_SO_PATH names its library. Without reduce-scatter use --placement ...,residual=replicated"
            )
            raise PlacementError(message)


def _problem(check: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> str | None:
    try:
        found, expected = check()
    except (RuntimeError, AssertionError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None if torch.equal(found, expected) else f"row {found[0].tolist()} instead of {expected[0].tolist()}"


def _rows(group: Any, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, exact in 16 bits: other ones in each row and on each rank."""
    rows = torch.arange(_ROWS_PER_RANK * group.world_size, dtype=dtype, device=group.device)
    return (rows + (rank + 1) * 4)[:, None].expand(-1, _COLUMNS).contiguous()


def _own(rows: torch.Tensor, rank: int) -> torch.Tensor:
    return rows[rank * _ROWS_PER_RANK :][:_ROWS_PER_RANK].contiguous()


def _poison(like: torch.Tensor) -> None:
    """Leave values that are no numbers in the memory that the allocator hands out next."""
    torch.full_like(like, float("nan"))


def _sum(group: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([_rows(group, rank, dtype) for rank in range(group.world_size)]).sum(0).to(dtype)


def _check_all_reduce(communicator: Communicator, group: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rows, expected = _rows(group, group.rank_in_group, dtype), _sum(group, dtype)
    _poison(expected)
    return communicator.all_reduce(rows, (), "sum"), expected


def _check_reduce_scatter(
    communicator: Communicator, group: Any, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, expected = _rows(group, group.rank_in_group, dtype), _own(_sum(group, dtype), group.rank_in_group)
    _poison(expected)
    return communicator.reduce_scatter(rows, (), 0, "sum"), expected


def _check_all_gather(communicator: Communicator, group: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [_own(_rows(group, rank, dtype), rank) for rank in range(group.world_size)]
    expected = torch.cat(parts)
    _poison(expected)
    return communicator.all_gather(parts[group.rank_in_group], (), 0), expected


_CHECKS: Final = {
    Conversion.ALL_REDUCE: _check_all_reduce,
    Conversion.REDUCE_SCATTER: _check_reduce_scatter,
    Conversion.ALL_GATHER: _check_all_gather,
}
