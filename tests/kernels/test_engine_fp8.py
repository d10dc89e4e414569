# SPDX-License-Identifier: Apache-2.0
"""Our attention backend for e4m3 caches inside vLLM's MLA classes: who decodes which batch, and whether the numbers are right."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_host import (
    PAGE_TOKENS,
    TORCH_FP8_SPEC,
    TORCH_SPEC,
    calls,
    common_metadata,
    put_flashmla_in,
    vllm_config,
)

from tokenspeed_plugin.kernels.autotune import TuningStore
from tokenspeed_plugin.kernels.engine import start
from tokenspeed_plugin.kernels.engine.fp8_backend import Fp8MlaBackend, Fp8MlaImpl, Fp8MlaMetadataBuilder
from tokenspeed_plugin.kernels.mla.reference import mla_decode_reference
from tokenspeed_plugin.kernels.mla.solutions import BF16, FP8, decode_shape
from tokenspeed_plugin.kernels.registry import Registry, default_registry

pytestmark = pytest.mark.host_matrix

HEADS, SCALE, E4M3 = 16, 0.07, torch.float8_e4m3fn
LAYER = SimpleNamespace(_q_scale=torch.tensor(0.37), _k_scale=torch.tensor(0.71))


@pytest.fixture(autouse=True)
def torch_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel for each cache; the one for e4m3 was measured faster than FlashMLA up to four requests, the other one never."""
    registry = Registry([*default_registry(), TORCH_SPEC, TORCH_FP8_SPEC])
    monkeypatch.setattr(start, "default_registry", lambda: registry)
    monkeypatch.setattr("tokenspeed_plugin.kernels.select.default_registry", lambda: registry)
    monkeypatch.setenv("TOKENSPEED_KERNEL_TUNING", str(tmp_path / "tuning.json"))
    table = TuningStore(tmp_path / "none.json").load("none")
    for query_tokens in (1, 2, 4):
        for requests, ours in ((1, 10.0), (4, 15.0), (16, 30.0)):
            shape = decode_shape(HEADS, query_tokens, PAGE_TOKENS, requests, 8192)
            table.record("mla", "decode", FP8, shape, {"torch_fp8": ours, "flashmla": 20.0})
            table.record("mla", "decode", BF16, shape, {"torch_fp8": 1.0, "torch": 30.0, "flashattn3": 20.0})
    monkeypatch.setattr(start, "_tuning", lambda _: table)
    put_flashmla_in(monkeypatch)
    calls.clear()


def builder(dtype: torch.dtype = torch.uint8, **settings: Any) -> Any:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(block_size=PAGE_TOKENS, num_kv_heads=1, head_size=576, dtype=dtype, cache_dtype_str="fp8")
    return Fp8MlaMetadataBuilder(
        spec, ["layer"], vllm_config(HEADS, cache_dtype="fp8", **settings), torch.device("cpu")
    )


def impl() -> Any:
    from vllm.config import VllmConfig, set_current_vllm_config

    sizes = {"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    with set_current_vllm_config(VllmConfig()):
        return Fp8MlaImpl(
            HEADS, 576, SCALE, 1, None, None, "fp8", None, "decoder", None,
            **sizes, qk_head_dim=192, v_head_dim=128, kv_b_proj=None,
        )  # fmt: skip


class Batch:
    """Random e4m3 queries and cache for a batch, and the truth about it."""

    def __init__(self, query_lens: list[int], seq_lens: list[int]) -> None:
        generator = torch.Generator().manual_seed(7)
        self.query_lens, self.seq_lens = query_lens, seq_lens
        pages_per_request = -(-max(seq_lens) // PAGE_TOKENS)
        pages = torch.randperm(len(seq_lens) * pages_per_request, generator=generator).to(torch.int32)
        self.table = pages.view(len(seq_lens), pages_per_request)
        self.cache = (2 * torch.randn(pages.numel(), PAGE_TOKENS, 576, generator=generator)).to(E4M3)
        self.q = (3 * torch.randn(sum(query_lens), HEADS, 576, generator=generator)).to(E4M3)
        self.common = common_metadata(query_lens, seq_lens, self.table)

    def decode(self, metadata: Any) -> torch.Tensor:
        out, lse = impl().forward_mqa(self.q[: metadata.num_decode_tokens], self.cache, metadata, LAYER)
        assert lse is None or calls == ["flashmla"]
        truth = self._reference(torch.float64)[: metadata.num_decode_tokens]
        same = self._reference(torch.bfloat16)[: metadata.num_decode_tokens]
        assert (out.double() - truth).abs().max() <= 2 * (same.double() - truth).abs().max() + 1e-3
        return out

    def _reference(self, dtype: torch.dtype) -> torch.Tensor:
        starts = self.common.query_start_loc
        return mla_decode_reference(
            self.q,
            self.cache,
            self.table,
            self.common.seq_lens,
            SCALE,
            query_starts=starts,
            query_scale=LAYER._q_scale.reshape(1),
            kv_scale=LAYER._k_scale.reshape(1),
            dtype=dtype,
        )[0]


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ([1], [700]),
        ([1, 1, 1], [1, 64, 700]),
        ([4, 4], [300, 65]),
        ([3, 3], [300, 65]),
        ([1, 1, 0, 0], [129, 700, 0, 0]),
    ],
)
def test_batches_that_it_takes_are_decoded_with_the_scales_of_the_layer(
    query_lens: list[int], seq_lens: list[int]
) -> None:
    batch = Batch(query_lens, seq_lens)
    metadata = builder(drafts=3).build(0, batch.common)
    assert (metadata.num_decodes, metadata.num_prefills) == (len(query_lens), 0)
    batch.decode(metadata)
    assert calls == ["torch fp8"]


@pytest.mark.parametrize(("requests", "query_tokens"), [(16, 1), (1, 8), (2, 9)])
def test_other_batches_go_to_flashmla(requests: int, query_tokens: int) -> None:
    batch = Batch([query_tokens] * requests, [100] * requests)
    batch.decode(builder(max_requests=16).build(0, batch.common))
    assert calls == ["flashmla"]


def test_a_kernel_that_was_named_takes_every_batch_that_it_can_run() -> None:
    named = builder(kernels="mla=torch_fp8", max_requests=16)
    for query_lens, ran in (([1] * 16, "torch fp8"), ([8], "torch fp8"), ([9], "flashmla")):
        batch = Batch(query_lens, [100] * len(query_lens))
        calls.clear()
        batch.decode(named.build(0, batch.common))
        assert calls == [ran]


def test_requests_with_other_query_counts_are_prefills_for_both() -> None:
    """FlashMLA takes equally many query tokens only, so vLLM sorts a chunk's tail, or fewer drafts, among the prefills."""
    batch = Batch([1, 1, 5], [300, 65, 70])
    built = builder()
    built._prefill_backend.prepare_metadata = lambda _: None
    built._prefill_backend.get_name = lambda: "FLASH_ATTN"
    metadata = built.build(0, batch.common.replace(seq_lens_cpu_upper_bound=batch.common.seq_lens))
    assert (metadata.num_decodes, metadata.num_prefills, metadata.num_decode_tokens) == (2, 1, 2)
    assert getattr(metadata.prefill, "step", None) is None
    batch.decode(metadata)
    assert calls == ["torch fp8"]


def test_a_replay_updates_the_plan_that_its_graph_was_captured_with() -> None:
    built = builder(drafts=3)
    captured = built.build_for_cudagraph_capture(Batch([4, 4], [4, 4]).common).decode.step
    replayed = built.build(0, Batch([4, 4], [300, 65]).common).decode.step
    padded = built.build(0, Batch([4, 0], [300, 0]).common).decode.step
    assert (captured.persistent, captured.plan.num_updates) == (True, 3)
    assert replayed.plan is padded.plan is captured.plan


def test_a_cache_of_another_type_stays_with_vllm() -> None:
    metadata = builder(torch.bfloat16).build(0, Batch([1], [10]).common)
    assert getattr(metadata.decode, "step", None) is None


def test_the_log_names_who_takes_what(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(start, "log_once", said.append)
    monkeypatch.setattr("tokenspeed_plugin.kernels.engine.fp8_backend.log_once", said.append)
    builder()
    assert said == [
        "MLA decode, 16 heads: torch_fp8 takes "
        + "; ".join(f"{count} query tokens: up to 7 requests" for count in (1, 2, 4))
        + "; others go to FLASHMLA.",
        "MLA prefill on a cached prefix stays with vLLM: head_groups reads bfloat16 caches, this one is e4m3.",
    ]


def test_the_backend_says_what_it_is() -> None:
    from vllm.v1.attention.backend import AttentionCGSupport

    assert Fp8MlaBackend.get_name() == "CUSTOM"
    assert Fp8MlaBackend.get_supported_kernel_block_sizes() == [PAGE_TOKENS]
    assert (Fp8MlaBackend.get_builder_cls(), Fp8MlaBackend.get_impl_cls()) == (Fp8MlaMetadataBuilder, Fp8MlaImpl)
    assert [Fp8MlaBackend.supports_kv_cache_dtype(name) for name in ("fp8", "fp8_e4m3", "auto", "fp8_e5m2")] == [
        True,
        True,
        False,
        False,
    ]
    assert not Fp8MlaBackend.supports_batch_invariance()
    assert not Fp8MlaBackend.supports_dcp()
    assert Fp8MlaMetadataBuilder._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH
    assert Fp8MlaMetadataBuilder.query_len_support.name == "UNIFORM"
    assert impl().supports_quant_query_input
