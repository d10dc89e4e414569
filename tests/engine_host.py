# SPDX-License-Identifier: Apache-2.0
"""What a GPU would give our attention backends, on a CPU: FlashAttention 3's two functions, FlashMLA's, a kernel for each cache, a
layer and a configuration.

Import it before `tokenspeed_plugin.kernels.engine.mla_backend`: vLLM's FlashAttention MLA imports those functions by name.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.attention.backends.fa_utils as fa_utils
from vllm.config import CUDAGraphMode

from tokenspeed_plugin.kernels.mla.geometry import HEAD_DIMS, LATENT_DIMS, ROPE_DIMS
from tokenspeed_plugin.kernels.mla.prefill_reference import mla_prefill_reference
from tokenspeed_plugin.kernels.mla.reference import mla_decode_reference
from tokenspeed_plugin.kernels.mla.solutions import FP8
from tokenspeed_plugin.kernels.registry import Capability, KernelSpec, OperandFormat, Priority, ShapeTrait

PAGE_TOKENS, NOPE_DIMS = 64, 128
calls: list[str] = []
"""Which kernel ran, call by call: `flash`, or a solution's name."""


def flash_attention(
    *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_v: torch.Tensor | None = None, **given: Any
) -> Any:
    """FlashAttention 3 as vLLM's MLA and our prefill call it, by the torch references."""
    if q_v is None:
        calls.append("flash prefill")
        assert (given["causal"], given["fa_version"]) == (True, 3)
        starts, scale = (given["cu_seqlens_q"], given["cu_seqlens_k"]), given["softmax_scale"]
        assert given["max_seqlen_q"] == (starts[0][1:] - starts[0][:-1]).max()
        assert given["max_seqlen_k"] == (starts[1][1:] - starts[1][:-1]).max()
        return given["out"].copy_(mla_prefill_reference(q, k, v, *starts, scale, dtype=torch.float32)[0])
    calls.append("flash")
    cache = torch.cat((v.squeeze(-2), k.squeeze(-2)), dim=-1)
    out, lse = mla_decode_reference(
        torch.cat((q_v, q), dim=-1),
        cache,
        given["block_table"],
        given["seqused_k"],
        given["softmax_scale"],
        query_starts=given["cu_seqlens_q"],
        dtype=torch.bfloat16,
    )
    return (out, lse.transpose(0, 1)) if given["return_softmax_lse"] else out


if not hasattr(fa_utils, "flash_attn_varlen_func"):  # on a CPU
    fa_utils.flash_attn_varlen_func = flash_attention
    fa_utils.get_scheduler_metadata = None
    fa_utils.flash_attn_supports_mla = lambda: True


class TorchPlan:
    """The plan of the kernel below: it remembers what it was updated with, and how often."""

    def __init__(self, workspace: dict[str, int], num_requests: int) -> None:
        self.workspace, self.num_requests, self.num_updates = workspace, num_requests, 0

    def update(self, seq_lens: torch.Tensor, block_table: torch.Tensor, page_tokens: int) -> None:
        assert seq_lens.shape == (self.num_requests,)
        assert page_tokens == PAGE_TOKENS
        self.seq_lens, self.block_table = seq_lens, block_table
        self.num_updates += 1


def torch_decode(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    plan: TorchPlan,
    softmax_scale: float,
    *,
    query_starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """MLA decode with the signature of the Hopper kernel."""
    calls.append("torch")
    if query_starts is None:
        assert q_nope.shape[0] == plan.num_requests
    return mla_decode_reference(
        torch.cat((q_nope, q_rope), dim=-1),
        kv_cache,
        plan.block_table,
        plan.seq_lens,
        softmax_scale,
        query_starts=query_starts,
        dtype=torch.bfloat16,
    )


def _workspace(heads: int, query_tokens: int, requests: int, device: torch.device) -> dict[str, Any]:
    return {"heads": heads, "query_tokens": query_tokens, "requests": requests, "device": device}


TORCH_SPEC = KernelSpec(
    "mla",
    "decode",
    "torch",
    capabilities=(Capability("cpu"),),
    signatures=({operand: OperandFormat("bfloat16") for operand in ("q", "kv")},),
    load=lambda: torch_decode,
    priority=Priority.PLUGIN,
    traits=(ShapeTrait("query_tokens", 1, 8),),
    plan=TorchPlan,
    workspace=_workspace,
    serves_engine=True,
)


def torch_decode_fp8(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    plan: TorchPlan,
    softmax_scale: float,
    query_scale: torch.Tensor,
    kv_scale: torch.Tensor,
    *,
    query_starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """MLA decode with the signature of the Hopper kernel for e4m3 caches."""
    calls.append("torch fp8")
    assert (q.dtype, kv_cache.dtype) == (torch.float8_e4m3fn,) * 2
    assert query_scale.shape == kv_scale.shape == (1,)
    if query_starts is None:
        assert q.shape[0] == plan.num_requests
    return mla_decode_reference(
        q,
        kv_cache,
        plan.block_table,
        plan.seq_lens,
        softmax_scale,
        query_starts=query_starts,
        query_scale=query_scale,
        kv_scale=kv_scale,
        dtype=torch.bfloat16,
    )


TORCH_FP8_SPEC = dataclasses.replace(TORCH_SPEC, solution="torch_fp8", signatures=(FP8,), load=lambda: torch_decode_fp8)


def flashmla_fp8(
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    softmax_scale: float,
    descale_q: torch.Tensor,
    descale_k: torch.Tensor,
    **given: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashMLA as vLLM calls it for an e4m3 cache: [requests, query tokens, heads, 576] queries, equally many of each request."""
    calls.append("flashmla")
    assert (given["causal"], given["head_dim_v"], k_cache.shape[2]) == (True, LATENT_DIMS, 1)
    assert given["tile_scheduler_metadata"] is not None
    out, lse = mla_decode_reference(
        q.flatten(0, 1),
        k_cache.squeeze(2),
        block_table,
        cache_seqlens,
        softmax_scale,
        query_scale=descale_q,
        kv_scale=descale_k,
        dtype=torch.bfloat16,
    )
    return out.view(*q.shape[:3], LATENT_DIMS), lse.view(*q.shape[:3]).transpose(1, 2)


def put_flashmla_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give vLLM's FlashMLA backend the functions of a GPU."""
    import vllm.v1.attention.backends.mla.flashmla as flashmla

    monkeypatch.setattr(flashmla, "is_flashmla_dense_supported", lambda: (True, None))
    monkeypatch.setattr(flashmla, "num_compute_units", lambda _: 4)
    monkeypatch.setattr(flashmla, "flash_mla_with_kvcache_fp8", flashmla_fp8)
    monkeypatch.setattr(flashmla, "get_mla_metadata", lambda *_, **__: (SimpleNamespace(), None))
    monkeypatch.setattr(
        flashmla,
        "get_mla_metadata_dense_fp8",
        lambda lengths, *_: (torch.ones(2, 8, dtype=torch.int32), torch.ones(len(lengths) + 1, dtype=torch.int32)),
    )


def vllm_config(
    heads: int = 16, *, kernels: str = "auto", drafts: int = 0, max_requests: int = 8, cache_dtype: str = "auto"
) -> Any:
    """vLLM's configuration, as far as a metadata builder reads it, with one MLA layer of `heads` heads."""
    layer = SimpleNamespace(
        q_lora_rank=None,
        kv_lora_rank=LATENT_DIMS,
        qk_nope_head_dim=NOPE_DIMS,
        qk_rope_head_dim=ROPE_DIMS,
        v_head_dim=NOPE_DIMS,
        num_heads=heads,
        kv_b_proj=SimpleNamespace(weight=None),
        prefill_backend=SimpleNamespace(clone=SimpleNamespace),
    )
    model = SimpleNamespace(
        dtype=torch.bfloat16,
        max_model_len=65536,
        get_num_attention_heads=lambda _: heads,
        get_head_size=lambda: HEAD_DIMS,
    )
    parallel = SimpleNamespace(
        cp_kv_cache_interleave_size=1, prefill_context_parallel_size=1, decode_context_parallel_size=1
    )
    speculative = SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False, method="ngram")
    return SimpleNamespace(
        model_config=model,
        parallel_config=parallel,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype, block_size=PAGE_TOKENS),
        scheduler_config=SimpleNamespace(max_num_seqs=max_requests),
        attention_config=SimpleNamespace(
            use_prefill_query_quantization=False, flash_attn_max_num_splits_for_cuda_graph=32
        ),
        compilation_config=SimpleNamespace(
            static_forward_context={"layer": layer},
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
            max_cudagraph_capture_size=16,
        ),
        speculative_config=speculative if drafts else None,
        additional_config={"tokenspeed": {"kernels": kernels}},
        use_v2_model_runner=True,
    )


def common_metadata(query_lens: list[int], seq_lens: list[int], table: torch.Tensor) -> Any:
    """A batch as the runner describes it; requests without query tokens pad."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(query_lens),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table,
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
    )
