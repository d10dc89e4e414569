# SPDX-License-Identifier: Apache-2.0
"""Prefills on a cached prefix inside vLLM's MLA classes: which go to our kernel, with which plan, and whether the numbers are right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import engine_host
import pytest
import torch
from cached_prefill_case import SCALE, Case, make_case
from engine_host import PAGE_TOKENS, calls, common_metadata, vllm_config

from tokenspeed_plugin.kernels.autotune import TuningTable
from tokenspeed_plugin.kernels.engine import mla_backend, prefill_steps
from tokenspeed_plugin.kernels.engine.log_once import log_once
from tokenspeed_plugin.kernels.engine.mla_backend import MlaImpl, MlaMetadataBuilder
from tokenspeed_plugin.kernels.mla.cached_prefill.groups import workspace_bytes
from tokenspeed_plugin.kernels.mla.cached_prefill.solutions import MODE
from tokenspeed_plugin.kernels.mla.solutions import BF16, decode_shape

pytestmark = pytest.mark.host_matrix

HEADS = 3
CONTEXT = 1024
TIMES = {64: (20.0, 10.0, 30.0), 128: (15.0, 16.0, 30.0), 512: (20.0, 40.0, 25.0), 1024: (30.0, 90.0, 29.0)}
"""Microseconds of ours, of vLLM's absorbed and of its unfolded way, by new tokens."""


@pytest.fixture(autouse=True)
def measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is the fastest from 128 to 512 new tokens on about a thousand; vLLM's prefill notes that it ran."""
    table = TuningTable()
    for query_tokens, times in TIMES.items():
        shape = decode_shape(16, query_tokens, PAGE_TOKENS, 1, CONTEXT)
        table.record("mla", MODE, BF16, shape, dict(zip(("head_groups", "flashattn3", "unfolded"), times, strict=True)))
    monkeypatch.setattr(prefill_steps, "tuning_of_this_gpu", lambda: table)
    monkeypatch.setattr(mla_backend.FlashAttnMLAImpl, "forward_mha", lambda *_: calls.append("vllm"))
    calls.clear()


def config(weights: torch.Tensor | None, **settings: Any) -> Any:
    made = vllm_config(HEADS, **settings)
    layer = made.compilation_config.static_forward_context["layer"]
    layer.kv_b_proj = SimpleNamespace(weight=None if weights is None else weights.view(HEADS * 256, 512))
    return made


def builder(weights: torch.Tensor | None, **settings: Any) -> Any:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(block_size=PAGE_TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    built = MlaMetadataBuilder(spec, ["layer"], config(weights, **settings), torch.device("cpu"))
    built._prefill_backend.prepare_metadata = lambda _: None
    built._prefill_backend.get_name = lambda: "FLASH_ATTN"
    return built


def impl(weights: torch.Tensor) -> Any:
    from vllm.config import VllmConfig, set_current_vllm_config

    sizes = {"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    with set_current_vllm_config(VllmConfig()):
        return MlaImpl(
            HEADS, 576, SCALE, 1, None, None, "auto", None, "decoder", None,
            **sizes, qk_head_dim=192, v_head_dim=128, kv_b_proj=SimpleNamespace(weight=weights.view(HEADS * 256, 512)),
        )  # fmt: skip


def built_for(case: Case, built: Any) -> Any:
    common = common_metadata(case.query_lens, case.kv_lens, case.table)
    return built.build(0, common.replace(seq_lens_cpu_upper_bound=common.seq_lens))


def prefilled(case: Case, metadata: Any, **changes: Any) -> torch.Tensor:
    rows = case.q[metadata.num_decode_tokens :]
    output = torch.full((len(rows), HEADS * 128), torch.nan, dtype=torch.bfloat16)
    one = torch.ones(())
    # The latents of the new tokens are in the cache already: what comes beside it must not be needed.
    impl(case.weights).forward_mha(rows, None, None, case.cache, metadata, one, output, **changes)
    return output.view(-1, HEADS, 128)


def test_prefills_and_decodes_of_one_step_part_ways_and_the_prefills_come_out_right() -> None:
    case = make_case([1, 2, 140, 300], [70, 65, 1200, 1000], HEADS, PAGE_TOKENS)
    metadata = built_for(case, builder(case.weights))
    assert (metadata.num_decodes, metadata.num_prefills, metadata.num_decode_tokens) == (2, 2, 3)
    out = prefilled(case, metadata)
    assert calls == ["flash prefill"]
    case.check(out, slice(3, None))


@pytest.mark.parametrize(
    ("query_lens", "kv_lens", "prefills", "why"),
    [
        ([1, 90], [70, 1100], 0, "few new tokens are better absorbed"),
        ([1, 300], [70, 400], 0, "so short a prefix was not measured"),
        ([300], [300], 0, "nothing is cached"),
        ([600], [600], 1, "nothing is cached"),
        ([1000], [2000], 1, "vLLM's own is faster"),
        ([600], [8000], 1, "so long a prefix was not measured"),
    ],
)
def test_other_batches_stay_with_vllm_and_as_vllm_sorts_them(
    query_lens: list[int], kv_lens: list[int], prefills: int, why: str
) -> None:
    case = make_case(query_lens, kv_lens, HEADS, PAGE_TOKENS)
    built = builder(case.weights)
    metadata = built_for(case, built)
    assert metadata.num_prefills == prefills, why
    if prefills:
        prefilled(case, metadata)
        assert calls == ["vllm"], why
    assert built.reorder_batch_threshold == 90


def test_a_fused_quantized_output_is_left_to_vllm() -> None:
    case = make_case([300], [1300], HEADS, PAGE_TOKENS)
    metadata = built_for(case, builder(case.weights))
    prefilled(case, metadata, output_scale=torch.ones(()))
    assert calls == ["vllm"]


@pytest.mark.parametrize("weights", [None, torch.zeros(HEADS, 256, 512), torch.zeros(1).bfloat16()])
def test_weights_that_it_cannot_read_leave_all_to_vllm(
    weights: torch.Tensor | None, caplog: pytest.LogCaptureFixture
) -> None:
    log_once.cache_clear()
    given = weights if weights is None or weights.numel() > 1 else torch.zeros(HEADS * 256, 512).bfloat16().t()
    projection = SimpleNamespace(weight=given if given is None or given.dim() == 2 else given.view(HEADS * 256, 512))
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(block_size=PAGE_TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    made = config(None)
    layer = made.compilation_config.static_forward_context["layer"]
    assert prefill_steps.prefill_steps(made, HEADS, layer, spec, [projection]) is None
    assert "kv_b_proj is no dense bfloat16 matrix" in caplog.text


def test_without_measurements_vllms_threshold_and_memory_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_steps, "tuning_of_this_gpu", TuningTable)
    case = make_case([300], [1300], HEADS, PAGE_TOKENS)
    built = builder(case.weights)
    assert built.reorder_batch_threshold == 512
    layer = built.vllm_config.compilation_config.static_forward_context["layer"]
    assert prefill_steps.reserved_bytes(built.vllm_config, HEADS, layer) == 0


def test_room_is_for_what_the_engine_allows() -> None:
    made = config(None)
    layer = made.compilation_config.static_forward_context["layer"]
    made.model_config.max_model_len = 1000
    assert prefill_steps.reserved_bytes(made, HEADS, layer) == workspace_bytes(8000, HEADS)
    made.model_config.max_model_len = 1 << 18
    assert prefill_steps.reserved_bytes(made, 16, layer) == 2 << 30
    made.model_config.max_model_len = 1 << 20
    assert prefill_steps.reserved_bytes(made, 16, layer) == workspace_bytes(1 << 20, 2)


def test_vllm_sees_the_room_while_it_measures_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = impl(torch.zeros(HEADS, 256, 512).bfloat16())
    layer._vllm_config = config(None)
    layer._vllm_config.model_config.max_model_len = 100
    asked: list[tuple[int, torch.dtype]] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda n, **given: asked.append((n, given["dtype"])) or empty(n, **given))
    layer.reserve_workspace()
    assert asked == [(workspace_bytes(800, HEADS), torch.uint8)]


def test_drafts_are_never_prefills() -> None:
    from vllm.v1.attention.backends.mla.flashattn_mla import FlashAttnMLAMetadataBuilder

    case = make_case([300], [1300], HEADS, PAGE_TOKENS)
    assert builder(case.weights, drafts=100).reorder_batch_threshold == 101
    assert FlashAttnMLAMetadataBuilder.reorder_batch_threshold == 512
    assert engine_host.PAGE_TOKENS == PAGE_TOKENS
