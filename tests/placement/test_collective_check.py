# SPDX-License-Identifier: Apache-2.0
"""A group whose collectives do not do what they say stops the start, whatever the way in which they fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.placement.placement_cases import compile_plan, model
from tokenspeed_plugin.placement.algebra import PlacementError
from tokenspeed_plugin.placement.residual import Residual
from tokenspeed_plugin.placement.runtime import collective_check
from tokenspeed_plugin.placement.runtime.collective_check import check_collectives

RANK = 1
GROUP = SimpleNamespace(world_size=2, rank_in_group=RANK, cpu_group=None, device=torch.device("cpu"))


class OneOfTwo:
    """The second of two ranks: the other one's values are its own less 4 (what the check sends)."""

    def all_reduce(self, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        return tensor + (tensor - 4)

    def reduce_scatter(self, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        return self.all_reduce(tensor)[len(tensor) // 2 :]

    def all_gather(self, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.cat([tensor - 4 - len(tensor), tensor])

    def leave_vllms_reduce_scatter(self) -> None:
        """The other one is as broken."""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_check, "settle", lambda _, problem: problem and f"rank {RANK}: {problem}")


def plans(residual: Residual) -> list[Any]:
    return [compile_plan(model("qwen3"), residual=residual)]


@pytest.mark.parametrize("residual", [Residual.REPLICATED, Residual.SHARDED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_collectives_that_work_pass(residual: Residual, dtype: torch.dtype) -> None:
    check_collectives(OneOfTwo(), GROUP, plans(residual), dtype)


def unwritten(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(len(tensor) // 2, tensor.shape[1])


def missing(*_: Any) -> torch.Tensor:
    raise AssertionError("no communicator")


FAULTS = {
    "memory that nobody wrote": unwritten,
    "an error": missing,
    "the other rank's part": lambda tensor, *_: (tensor + tensor - 4)[: len(tensor) // 2],
    "its own part only": lambda tensor, *_: tensor[len(tensor) // 2 :],
    "reduced twice": lambda tensor, *_: 2 * (tensor + tensor - 4)[len(tensor) // 2 :],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reduce_scatter_that_does_not_work_is_named(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = OneOfTwo()
    monkeypatch.setattr(broken, "reduce_scatter", FAULTS[fault], raising=False)
    with pytest.raises(PlacementError, match=r"reduce-scatter over 2 ranks .*rank 1.*VLLM_NCCL_SO_PATH"):
        check_collectives(broken, GROUP, plans(Residual.SHARDED), torch.float32)


@pytest.mark.parametrize("fault", FAULTS)
def test_torchs_reduce_scatter_takes_the_place_of_one_that_does_not_work(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = OneOfTwo()
    monkeypatch.setattr(broken, "reduce_scatter", FAULTS[fault], raising=False)
    monkeypatch.setattr(
        broken, "leave_vllms_reduce_scatter", lambda: monkeypatch.delattr(broken, "reduce_scatter"), raising=False
    )
    check_collectives(broken, GROUP, plans(Residual.SHARDED), torch.float32)
    assert broken.reduce_scatter(torch.ones(2, 1)).tolist() == [[-2.0]]


def test_what_no_plan_uses_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = OneOfTwo()
    monkeypatch.setattr(broken, "reduce_scatter", missing)
    check_collectives(broken, GROUP, plans(Residual.REPLICATED), torch.float32)
