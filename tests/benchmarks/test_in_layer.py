# SPDX-License-Identifier: Apache-2.0
"""What MLA decode adds to a layer: it is called between the layer's two products, and only its own time is reported."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.latent.cells import Cell
from benchmarks.served import in_layer

HEADS, REQUESTS, CONTEXT = 4, 2, 128


def inputs(page_tokens: int) -> Any:
    pages = CONTEXT // page_tokens
    tables = [torch.randperm(REQUESTS * pages, dtype=torch.int32).view(REQUESTS, pages) + part for part in (0, 7)]
    return SimpleNamespace(
        cell=Cell(HEADS, 1, REQUESTS, CONTEXT),
        page_tokens=page_tokens,
        q=torch.randn(REQUESTS, HEADS, 576).to(torch.bfloat16),
        kv_cache=None,
        seq_lens=torch.full((REQUESTS,), CONTEXT),
        block_tables=tables,
        scale=1.0,
        part=lambda call: call % 2,
    )


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Attention calls in order; a graph takes 2 us, and 3 more for each attention call in it."""
    calls: list[tuple[Any, ...]] = []

    def time_us(launch: Callable[[int], None]) -> float:
        before = len(calls)
        launch(1)
        return 2.0 + 3.0 * (len(calls) - before)

    class Plan:
        def __init__(self, workspace: Any, requests: int) -> None:
            self.workspace = workspace

        def update(self, seq_lens: torch.Tensor, table: torch.Tensor, page_tokens: int) -> None:
            self.table, self.longest = table, int(seq_lens.max())

    def decode(q_nope: torch.Tensor, q_rope: torch.Tensor, cache: Any, plan: Plan, scale: float, **launch: bool) -> Any:
        ways = (plan.workspace["cooperative"], launch["dependent_launch"])
        calls.append(("ours", *ways, plan.table.tolist(), plan.longest))
        assert (q_nope.shape, q_rope.shape) == ((REQUESTS, HEADS, 512), (REQUESTS, HEADS, 64))
        return torch.ones(REQUESTS, HEADS, 512, dtype=torch.bfloat16), None

    monkeypatch.setattr(in_layer, "WEIGHTS_BYTES", 64)
    monkeypatch.setattr(in_layer, "time_us", time_us)
    monkeypatch.setattr(in_layer, "MlaWorkspace", lambda *_, **options: options)
    monkeypatch.setattr(in_layer, "MlaDecodePlan", Plan)
    monkeypatch.setattr(in_layer, "mla_decode", decode)
    return calls


class Flash:
    """vLLM's kernel by script."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls

    def prepared(self, pages: Any, splits: int) -> Callable[[int], torch.Tensor]:
        def launch(part: int) -> torch.Tensor:
            self.calls.append(("flash", pages.page_tokens, splits, part, int(pages.seq_lens.max())))
            return torch.ones(REQUESTS, HEADS, 512, dtype=torch.bfloat16)

        return launch


def test_each_way_to_launch_is_timed_without_its_neighbours(called: list[tuple[Any, ...]]) -> None:
    wide, served = in_layer.in_order(inputs(64)), in_layer.in_order(inputs(16))
    found: Any = in_layer.in_layer_us(wide, served, Flash(called))  # type: ignore[arg-type]
    assert found == dict.fromkeys(found, 3.0)
    behind = " behind a call on one page"
    flash = [f"FlashAttention 3, pages of {tokens}{more}" for tokens in (16, 64) for more in ("", f",{behind}")]
    assert list(found) == [name for name, *_ in in_layer.LAUNCHES] + [f"ours,{behind}", *flash]
    ways = [(cooperative, dependent, CONTEXT) for _, cooperative, dependent in in_layer.LAUNCHES]
    # Behind a call on one page: that and the call itself, then that alone.
    primed = [(True, True, longest) for longest in (64, CONTEXT, 64)]
    assert [(*call[1:3], call[4]) for call in called if call[0] == "ours"] == [*ways, *primed]
    assert all(call[3] == [[7, 8], [9, 10]] for call in called if call[0] == "ours")
    assert [call[1:] for call in called if call[0] == "flash"] == [
        (tokens, 32, 1, longest) for tokens in (16, 64) for longest in (CONTEXT, tokens, CONTEXT, tokens)
    ]


def test_the_products_are_those_of_a_layer() -> None:
    neighbours = in_layer.Neighbours(inputs(64), 64)
    seen: list[torch.Tensor] = []

    def attention(call: int) -> torch.Tensor:
        seen.append(neighbours.latents.clone())
        return neighbours.latents

    def once(launch: Callable[[int], None]) -> float:
        launch(0)
        return 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_layer, "time_us", once)
        neighbours.added_us(attention)
    q, up = neighbours.q.float(), neighbours.into_latents.float()
    assert torch.allclose(seen[0].float(), torch.einsum("htd,hdl->thl", q, up), atol=1e-2)
    down = torch.einsum("thl,hlv->htv", seen[0].float(), neighbours.out_of_latents.float())
    assert torch.allclose(neighbours.out.float(), down, atol=1e-2)
