# SPDX-License-Identifier: Apache-2.0
"""Compiled plans on real tensors, all ranks in one process, against a single rank."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.placement.placement_cases import FAMILIES, SPECS, compile_plan, model
from tests.placement.random_models import random_model
from tokenspeed_plugin.placement import ModelGraph, Residual
from tokenspeed_plugin.placement.simulation import Batch, Simulation, random_weights
from tokenspeed_plugin.placement.verifier import verify

ALONE = ("attn=tp1,dense=tp1,moe=tp1", 1)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Many tiny operations: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(
    graph: ModelGraph, spec: str, world_size: int, batch: Batch, residual: Residual = Residual.AUTO
) -> torch.Tensor:
    plan = compile_plan(
        graph, spec, world_size, num_tokens=batch.num_tokens, num_rows=batch.num_sequences, residual=residual
    )
    verify(graph, plan)
    ids = torch.randint(0, graph.sizes["vocab"], (batch.num_tokens,), generator=torch.Generator().manual_seed(5))
    return Simulation(graph, plan, random_weights(graph, 3), batch).run(ids)


@cache
def run_alone(family: str, batch: Batch) -> torch.Tensor:
    return run(model(family), *ALONE, batch)


@pytest.mark.parametrize("residual", [Residual.REPLICATED, Residual.SHARDED])
@pytest.mark.parametrize(("spec", "world_size"), SPECS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_specification(family: str, spec: str, world_size: int, residual: Residual) -> None:
    batch = Batch(num_sequences=8, length_tokens=5)
    alone = run_alone(family, batch)
    assert alone.std() > 0.1
    ours = run(model(family), spec, world_size, batch, residual)
    torch.testing.assert_close(ours, alone, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("length_tokens", [1, 2, 7, 9])
def test_tokens_that_do_not_divide_over_the_shards(length_tokens: int) -> None:
    graph, batch = model("deepseek_v3"), Batch(1, length_tokens)
    alone = run(graph, *ALONE, batch)
    sharded = run(graph, "attn=tp4,dense=tp4,moe=ep4", 4, batch, Residual.SHARDED)
    torch.testing.assert_close(sharded, alone, rtol=1e-9, atol=1e-10)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_models_on_random_groups(data: st.DataObject) -> None:
    world_size = data.draw(st.sampled_from([2, 3, 4, 6, 8]), "world size")
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    attn = data.draw(st.sampled_from([n for n in divisors if 8 % n == 0]))
    dense = data.draw(st.sampled_from(divisors))
    moe = data.draw(st.sampled_from(divisors))
    kind = data.draw(st.sampled_from(["tp", "ep"]))
    nested = all(a % b == 0 or b % a == 0 for a in (attn, dense, moe) for b in (attn, dense, moe))
    if not nested:
        dense = moe = attn
    graph = data.draw(random_model())
    batch = Batch(world_size // attn * data.draw(st.integers(1, 2)), data.draw(st.integers(1, 4)))
    residual = data.draw(st.sampled_from(list(Residual)))
    alone = run(graph, *ALONE, batch)
    ours = run(graph, f"attn=tp{attn},dense=tp{dense},moe={kind}{moe}", world_size, batch, residual)
    torch.testing.assert_close(ours, alone, rtol=1e-8, atol=1e-8)
