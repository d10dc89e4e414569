# SPDX-License-Identifier: Apache-2.0
"""Our MLA layer beside vLLM's own, with the same weights: what attention gets, what the cache holds, and when the layer stays vLLM's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import append_host as host
import pytest
import torch
from append_host import E4M3, HIDDEN, LAYER, engine_config, new_cache, new_layer, step

from tokenspeed_plugin.host import mla_append
from tokenspeed_plugin.kernels.engine import append_layer
from tokenspeed_plugin.kernels.engine.append_layer import AppendingLatentAttention
from tokenspeed_plugin.kernels.engine.append_operation import mla_append as operation
from tokenspeed_plugin.kernels.engine.log_once import log_once

pytestmark = pytest.mark.host_matrix

SLOTS = torch.tensor([17, 3, 40, -1, 5])
ROWS = 7
"""Two more than slots: rows that only fill a graph."""


@pytest.fixture(autouse=True)
def attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    monkeypatch.setattr("vllm.model_executor.layers.mla.MLAAttention", host.Attention)
    log_once.cache_clear()
    yield host.Attention
    mla_append.remove()


def stock() -> type:
    from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

    return MultiHeadLatentAttentionWrapper


def inputs(dtype: torch.dtype = torch.float32, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    positions = torch.randint(0, 200, (rows,), generator=generator)
    return positions, torch.randn(rows, HIDDEN, generator=generator).to(dtype)


def outcome(layer: Any, config: Any, cache: torch.Tensor, slots: torch.Tensor | None = SLOTS, **given: Any) -> Any:
    """What a step gives: the layer's output, what attention got, and the cache."""
    layer.mla_attn.kv_cache = cache
    positions, hidden = inputs(layer.o_proj.weight.dtype)
    with torch.inference_mode(), step(config, slots):
        out = layer(positions, hidden, **given)
    return out, *layer.mla_attn.seen, cache


def pair(cache: torch.dtype, **options: Any) -> tuple[Any, Any]:
    """The outcome of a step of vLLM's layer, and of ours."""
    found = []
    for cls in (stock(), AppendingLatentAttention):
        config = engine_config()
        layer = new_layer(cls, config, **options)
        if cls is AppendingLatentAttention:
            assert layer.appends
            assert layer.mla_attn.impl.do_kv_cache_update is append_layer._has_appended
        found.append(outcome(layer, config, new_cache(cache)))
    return found[0], found[1]


@pytest.mark.parametrize("compressed", [True, False])
def test_a_step_leaves_what_vllms_layer_leaves(compressed: bool) -> None:
    theirs, ours = pair(torch.float32, compressed=compressed)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5, equal_nan=True)
    written = ~ours[-1].isnan().all(dim=-1)
    assert sorted(torch.where(written.flatten())[0].tolist()) == [3, 5, 17, 40]


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.uint8], ids=str)
def test_bf16_models_with_either_cache(cache: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.Attention, "cache_dtype", "fp8" if cache == torch.uint8 else "auto")
    theirs, ours = pair(cache, dtype=torch.bfloat16)
    for left, right in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(left, right, rtol=2**-6, atol=2**-6)
    kept, stocks = (
        found[-1].view(E4M3).float() if cache == torch.uint8 else found[-1].float() for found in (ours, theirs)
    )
    torch.testing.assert_close(kept, stocks, rtol=2**-2 if cache == torch.uint8 else 2**-6, atol=2**-6, equal_nan=True)
    assert (~kept.isnan().all(dim=-1)).sum() == 4


def test_the_scaling_of_llama_4_comes_behind_the_rotation() -> None:
    found = []
    for cls in (stock(), AppendingLatentAttention):
        config = engine_config()
        scaling = torch.full((ROWS, 1, 1), 3.0)
        found.append(outcome(new_layer(cls, config), config, new_cache(torch.float32), llama_4_scaling=scaling)[1])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_a_profile_run_has_no_cache_and_a_padded_step_no_slots() -> None:
    config = engine_config()
    layer = new_layer(AppendingLatentAttention, config)
    profiled = outcome(layer, config, torch.tensor([]), None)
    cache = new_cache(torch.float32)
    idle = outcome(layer, config, cache, torch.full((ROWS,), -1))
    real = outcome(layer, config, new_cache(torch.float32))
    assert cache.isnan().all()
    for other in (profiled, idle):
        for left, right in zip(other[:-1], real[:-1], strict=True):
            assert torch.equal(left, right)


def test_compiled_it_is_the_same_and_the_operation_keeps_torchs_rules() -> None:
    config = engine_config()
    layer = new_layer(AppendingLatentAttention, config)
    expected = outcome(layer, config, new_cache(torch.float32))

    def projected_and_appended(positions: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        queries, latent = layer._projected(hidden)
        table = layer.rotary_emb.cos_sin_cache
        normed, key = operation(queries, latent, positions, layer.kv_a_layernorm.weight, 1e-6, table, True, LAYER)
        return queries, normed, key.unsqueeze(1)

    compiled = torch.compile(projected_and_appended, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (ROWS, 5):
        cache = new_cache(torch.float32)
        layer.mla_attn.kv_cache = cache
        positions, hidden = (value[:rows] for value in inputs())
        with torch.inference_mode(), step(config, SLOTS):
            got = compiled(positions, hidden)
        for left, right in zip(got, expected[1:4], strict=True):
            torch.testing.assert_close(left, right[:rows], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(cache, expected[-1], rtol=1e-5, atol=1e-5, equal_nan=True)
    with torch.inference_mode(), step(config, None):
        operands = (
            torch.randn(4, 2, 80),
            torch.randn(4, 576),
            torch.arange(4),
            None,
            1e-6,
            torch.randn(9, 64),
            True,
            LAYER,
        )
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(torch.ops.tokenspeed.mla_append.default, operands, test_utils=checks)


class OtherNorm(torch.nn.Identity):
    """A norm that is none of vLLM's."""


class OtherRope(torch.nn.Identity):
    """A rotary embedding that is none of vLLM's."""


REASONS = {
    "g_proj": ({"g_proj": torch.nn.Identity}, "g_proj, which only vLLM's layer knows, stay"),
    "norm": ({"kv_a_layernorm": OtherNorm}, "a norm OtherNorm stay"),
    "rope": ({"rotary_emb": OtherRope}, "the rotary embedding OtherRope stay"),
    "no rope": ({"rotary_emb": None}, "the rotary embedding NoneType stay"),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_layer_with_parts_of_its_own_stays_vllms(name: str, caplog: pytest.LogCaptureFixture) -> None:
    parts, reason = REASONS[name]
    with caplog.at_level(logging.INFO, logger="vllm"):
        layer = new_layer(AppendingLatentAttention, engine_config(), **parts)
    assert not layer.appends
    assert f"MLA append: layers with {reason} with vLLM's own kernels." in caplog.text
    assert type(layer.mla_attn.impl).do_kv_cache_update == layer.mla_attn.impl.do_kv_cache_update.__func__


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backend": "XPU_MLA"}, "a cache write of XPU_MLA's own"),
        ({"cache_dtype": "fp8_e5m2"}, "append=reference, which does not fit .*formats kv=fp8_e5m2"),
        ({"hisparse_cache": object()}, "HiSparse"),
        ({"use_pcp": True}, "context parallelism"),
    ],
)
def test_so_does_one_on_another_backend_or_cache(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in changes.items():
        monkeypatch.setattr(host.Attention, name, value, raising=False)
    with caplog.at_level(logging.INFO, logger="vllm"):
        assert not new_layer(AppendingLatentAttention, engine_config()).appends
    assert caplog.records[-1].getMessage().startswith("MLA append: layers with ")
    import re

    assert re.search(reason, caplog.text)


def test_a_layer_that_stays_vllms_still_works() -> None:
    config = engine_config()
    theirs = outcome(new_layer(stock(), config), config, new_cache(torch.float32))
    config = engine_config("mla=flashmla")
    layer = new_layer(AppendingLatentAttention, config)
    assert not layer.appends
    for left, right in zip(outcome(layer, config, new_cache(torch.float32)), theirs, strict=True):
        assert torch.equal(left.nan_to_num(), right.nan_to_num())


def test_vllm_makes_our_layer_when_it_is_installed_and_its_own_otherwise() -> None:
    assert type(new_layer(stock(), engine_config())) is stock()
    mla_append.install()
    mla_append.install()
    assert type(new_layer(stock(), engine_config())) is AppendingLatentAttention
    assert not new_layer(stock(), engine_config(None)).appends
    mla_append.remove()
    assert type(new_layer(stock(), engine_config())) is stock()
    assert mla_append.occupant() is None


def test_sparse_layers_are_told_by_what_they_have() -> None:
    modules = SimpleNamespace(indexer=object(), is_sparse=True, topk_indices_buffer=torch.zeros(1))
    layer = new_layer(AppendingLatentAttention, engine_config())
    reason = append_layer.fallback_reason(layer, modules)
    assert reason == "indexer, is_sparse, topk_indices_buffer, which only vLLM's layer knows,"
