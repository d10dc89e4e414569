# SPDX-License-Identifier: Apache-2.0
"""Our attention backend inside vLLM's MLA classes: who decodes which batch, with which plan, and whether the numbers are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_host
import pytest
import torch
from engine_host import PAGE_TOKENS, TORCH_SPEC, calls, common_metadata, vllm_config

from tokenspeed_plugin.kernels.autotune import TuningStore
from tokenspeed_plugin.kernels.engine import start
from tokenspeed_plugin.kernels.engine.mla_backend import MlaBackend, MlaImpl, MlaMetadataBuilder
from tokenspeed_plugin.kernels.mla.reference import mla_decode_reference
from tokenspeed_plugin.kernels.mla.solutions import BF16, decode_shape
from tokenspeed_plugin.kernels.registry import Registry, default_registry

pytestmark = pytest.mark.host_matrix

HEADS, SCALE = 16, 0.07


@pytest.fixture(autouse=True)
def torch_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A registry with a kernel for the CPU that was measured faster than vLLM's up to four requests."""
    registry = Registry([*default_registry(), TORCH_SPEC])
    monkeypatch.setattr(start, "default_registry", lambda: registry)
    monkeypatch.setattr("tokenspeed_plugin.kernels.select.default_registry", lambda: registry)
    monkeypatch.setenv("TOKENSPEED_KERNEL_TUNING", str(tmp_path / "tuning.json"))
    table = TuningStore(tmp_path / "none.json").load("none")
    for query_tokens in (1, 2, 4):
        for requests, ours in ((1, 10.0), (4, 15.0), (16, 30.0)):
            shape = decode_shape(HEADS, query_tokens, PAGE_TOKENS, requests, 8192)
            table.record("mla", "decode", BF16, shape, {"torch": ours, "flashattn3": 20.0})
    monkeypatch.setattr(start, "_tuning", lambda _: table)
    calls.clear()


def builder(**settings: Any) -> Any:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(block_size=PAGE_TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    return MlaMetadataBuilder(spec, ["layer"], vllm_config(HEADS, **settings), torch.device("cpu"))


def impl() -> Any:
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        return MlaImpl(
            num_heads=HEADS,
            head_size=576,
            scale=SCALE,
            num_kv_heads=1,
            alibi_slopes=None,
            sliding_window=None,
            kv_cache_dtype="auto",
            logits_soft_cap=None,
            attn_type="decoder",
            kv_sharing_target_layer_name=None,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            qk_head_dim=192,
            v_head_dim=128,
            kv_b_proj=None,
        )


class Batch:
    """Random queries and cache for a batch, and the truth about it."""

    def __init__(self, query_lens: list[int], seq_lens: list[int]) -> None:
        generator = torch.Generator().manual_seed(7)
        self.query_lens, self.seq_lens = query_lens, seq_lens
        pages_per_request = -(-max(seq_lens) // PAGE_TOKENS)
        pages = torch.randperm(len(seq_lens) * pages_per_request, generator=generator).to(torch.int32)
        self.table = pages.view(len(seq_lens), pages_per_request)
        self.cache = torch.randn(pages.numel(), PAGE_TOKENS, 576, generator=generator).to(torch.bfloat16)
        self.q = torch.randn(sum(query_lens), HEADS, 576, generator=generator).to(torch.bfloat16)
        self.common = common_metadata(query_lens, seq_lens, self.table)

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        return mla_decode_reference(
            self.q,
            self.cache,
            self.table,
            self.common.seq_lens,
            SCALE,
            query_starts=self.common.query_start_loc,
            dtype=dtype,
        )[0]

    def error(self, out: torch.Tensor) -> float:
        return float((out.double() - self.reference(torch.float64)).abs().max())


def decoded(batch: Batch, metadata: Any, *, split: bool = True) -> tuple[torch.Tensor, Any]:
    q = tuple(batch.q.split((512, 64), dim=-1)) if split else batch.q
    return impl().forward_mqa(q, batch.cache, metadata, None)


BATCHES = {
    "one": ([1], [700]),
    "uneven": ([1, 1, 1], [1, 64, 700]),
    "drafts": ([4, 4], [300, 65]),
    "drafts that differ": ([3, 1, 2], [300, 65, 2]),
    "padded": ([1, 1, 0, 0], [129, 700, 0, 0]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_that_it_takes_are_decoded_within_the_error_of_the_same_arithmetic(name: str) -> None:
    batch = Batch(*BATCHES[name])
    metadata = builder(drafts=3).build(0, batch.common)
    assert (metadata.num_decodes, metadata.num_prefills) == (len(batch.query_lens), 0)
    out, lse = decoded(batch, metadata)
    assert calls == ["torch"]
    assert lse is None
    assert batch.error(out) <= 2 * batch.error(batch.reference(torch.bfloat16)) + 1e-3
    assert torch.equal(decoded(batch, metadata, split=False)[0], out)


@pytest.mark.parametrize(
    ("query_lens", "why"), [([1] * 16, "many requests"), ([9, 1], "a chunk's tail"), ([8], "not measured")]
)
def test_other_batches_go_to_vllm(query_lens: list[int], why: str) -> None:
    batch = Batch(query_lens, [100] * len(query_lens))
    metadata = builder(max_requests=16).build(0, batch.common)
    out, _ = decoded(batch, metadata)
    assert calls == ["flash"], why
    assert batch.error(out) <= 2 * batch.error(batch.reference(torch.bfloat16)) + 1e-3


def test_a_kernel_that_was_named_takes_every_batch_that_it_can_run() -> None:
    named = builder(kernels="mla=torch", max_requests=16)
    for query_lens, ran in (([1] * 16, "torch"), ([8], "torch"), ([9, 1], "flash")):
        batch = Batch(query_lens, [100] * len(query_lens))
        calls.clear()
        decoded(batch, named.build(0, batch.common))
        assert calls == [ran]


def test_a_prompt_stays_with_vllms_prefill_and_decodes_beside_it_are_taken() -> None:
    batch = Batch([1, 1, 600], [300, 65, 700])
    built = builder()
    built._prefill_backend.prepare_metadata = lambda _: None
    built._prefill_backend.get_name = lambda: "FLASH_ATTN"
    metadata = built.build(0, batch.common.replace(seq_lens_cpu_upper_bound=batch.common.seq_lens))
    assert (metadata.num_decodes, metadata.num_prefills, metadata.num_decode_tokens) == (2, 1, 2)
    batch.q, batch.table, batch.common = (
        batch.q[:2],
        batch.table[:2],
        common_metadata([1, 1], [300, 65], batch.table[:2]),
    )
    out, _ = decoded(batch, metadata)
    assert calls == ["torch"]
    assert torch.equal(out, batch.reference(torch.bfloat16))


def test_a_replay_updates_the_plan_that_its_graph_was_captured_with() -> None:
    built = builder(drafts=3)
    captured = built.build_for_cudagraph_capture(Batch([4, 4], [4, 4]).common).decode.step
    assert captured.persistent
    replayed = built.build(0, Batch([4, 4], [300, 65]).common).decode.step
    padded = built.build(0, Batch([4, 0], [300, 0]).common).decode.step
    assert replayed.plan is padded.plan is captured.plan
    assert captured.plan.num_updates == 3
    other = built.build(0, Batch([1, 1], [300, 65]).common).decode.step
    assert (other.plan is captured.plan, other.persistent) == (False, False)


def test_one_plan_serves_all_layers_and_one_workspace_all_steps() -> None:
    built = builder(drafts=3)
    steps = [built.build(0, Batch(q, [300] * len(q)).common).decode.step for q in ([1], [1, 1], [3], [4, 2], [2])]
    workspaces = {id(step.plan.workspace): step.plan.workspace["query_tokens"] for step in steps}
    assert sorted(workspaces.values()) == [1, 2, 4]
    assert all(step.plan.num_updates == 1 for step in steps)
    assert {step.plan.workspace["requests"] for step in steps} == {16}
    assert [step.query_starts is None for step in steps] == [True, True, False, False, False]


@pytest.mark.parametrize(
    "change",
    [{"block_size": 16}, {"dtype": torch.float16}],
    ids=lambda change: next(iter(change)),
)
def test_layers_that_it_cannot_serve_stay_with_vllm(change: dict[str, Any]) -> None:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    fields = {"block_size": PAGE_TOKENS, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16, **change}
    built = MlaMetadataBuilder(MLAAttentionSpec(**fields), ["layer"], vllm_config(HEADS), torch.device("cpu"))
    metadata = built.build(0, Batch([1], [10]).common)
    assert getattr(metadata.decode, "step", None) is None


def test_a_capture_with_a_plan_that_will_be_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    step = builder().build(0, Batch([1], [10]).common).decode.step
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    cache = type("OnDevice", (), {"is_cuda": True})()
    with pytest.raises(RuntimeError, match="its metadata was not built for capture"):
        step.run(None, None, cache, 1.0)


def test_the_backend_says_what_it_is() -> None:
    from vllm.v1.attention.backend import AttentionCGSupport

    assert MlaBackend.get_name() == "CUSTOM"
    assert MlaBackend.get_supported_kernel_block_sizes() == [PAGE_TOKENS]
    assert (MlaBackend.get_builder_cls(), MlaBackend.get_impl_cls()) == (MlaMetadataBuilder, MlaImpl)
    assert not MlaBackend.supports_batch_invariance()
    assert not MlaBackend.supports_dcp()
    assert MlaMetadataBuilder._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH
    assert MlaMetadataBuilder.query_len_support.name == "VARLEN"
    assert engine_host.PAGE_TOKENS == start.PAGE_TOKENS
