# SPDX-License-Identifier: Apache-2.0
"""Our attention backend inside vLLM's MLA classes on a Hopper GPU: captured once, replayed with other lengths and padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_host import PAGE_TOKENS, common_metadata, vllm_config

from tokenspeed_plugin.kernels.engine.mla_backend import MlaImpl, MlaMetadataBuilder
from tokenspeed_plugin.kernels.mla.reference import mla_decode_reference

HEADS, PAGES, SCALE = 16, 40, 0.07
DEVICE = torch.device("cuda")


def builder(**settings: Any) -> Any:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(block_size=PAGE_TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    return MlaMetadataBuilder(spec, ["layer"], vllm_config(HEADS, **settings), DEVICE)


def impl() -> Any:
    from vllm.config import VllmConfig, set_current_vllm_config

    sizes = {"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    with set_current_vllm_config(VllmConfig()):
        return MlaImpl(
            HEADS, 576, SCALE, 1, None, None, "auto", None, "decoder", None,
            **sizes, qk_head_dim=192, v_head_dim=128, kv_b_proj=None,
        )  # fmt: skip


class Runner:
    """The persistent buffers of a model runner, and one layer's queries as vLLM hands them over."""

    def __init__(self, requests: int, query_tokens: int) -> None:
        self.requests, self.query_tokens = requests, query_tokens
        self.tokens = requests * query_tokens
        self.table = torch.randperm(requests * PAGES, device=DEVICE).to(torch.int32).view(requests, PAGES)
        self.cache = torch.randn(requests * PAGES, PAGE_TOKENS, 576, device=DEVICE).to(torch.bfloat16)
        self.seq_lens = torch.zeros(requests, dtype=torch.int32, device=DEVICE)
        self.starts = torch.zeros(requests + 1, dtype=torch.int32, device=DEVICE)
        self.q_nope = torch.randn(self.tokens, HEADS, 512, device=DEVICE).to(torch.bfloat16)
        whole = torch.randn(self.tokens, HEADS, 192, device=DEVICE).to(torch.bfloat16)
        self.q_rope = whole[..., 128:]

    def describe(self, query_lens: list[int], seq_lens: list[int]) -> Any:
        common = common_metadata(query_lens, seq_lens, self.table)
        self.seq_lens.copy_(common.seq_lens)
        self.starts.copy_(common.query_start_loc)
        return common.replace(seq_lens=self.seq_lens, query_start_loc=self.starts, num_actual_tokens=self.tokens)

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        q = torch.cat((self.q_nope, self.q_rope), dim=-1)
        return mla_decode_reference(
            q, self.cache, self.table, self.seq_lens, SCALE, query_starts=self.starts, dtype=dtype
        )[0]

    def check(self, out: torch.Tensor) -> None:
        truth = self.reference(torch.float64)
        bound = 2 * (self.reference(torch.bfloat16).double() - truth).abs().max() + 1e-3
        assert (out.double() - truth).abs().max() <= bound


@pytest.mark.parametrize(("requests", "query_tokens"), [(1, 1), (4, 1), (4, 3), (4, 4), (2, 8)])
def test_a_graph_follows_other_lengths_and_padding(requests: int, query_tokens: int) -> None:
    runner = Runner(requests, query_tokens)
    built, layer = builder(kernels="mla=cuda_sm90", drafts=query_tokens - 1), impl()
    full = [query_tokens] * requests

    def step(metadata: Any) -> torch.Tensor:
        out: torch.Tensor = layer.forward_mqa((runner.q_nope, runner.q_rope), runner.cache, metadata, None)[0]
        return out

    metadata = built.build_for_cudagraph_capture(runner.describe(full, full))
    assert metadata.decode.step is not None
    step(metadata)
    metadata = built.build_for_cudagraph_capture(runner.describe(full, full))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(metadata)
    lengths = [[2400 - 311 * i for i in range(requests)], [64 * (i + 1) + query_tokens for i in range(requests)]]
    for seq_lens in lengths:
        built.build(0, runner.describe(full, seq_lens))
        out.fill_(torch.nan)
        graph.replay()
        runner.check(out)
    if requests > 1:
        built.build(0, runner.describe([*full[:-1], 0], [*lengths[0][:-1], 0]))
        out.fill_(torch.nan)
        graph.replay()
        runner.check(out)


def test_batches_of_both_kinds_in_turn_agree_with_the_reference() -> None:
    built, layer = builder(kernels="mla=cuda_sm90", drafts=3), impl()
    for query_lens in ([1, 1, 1], [1, 2, 4], [9, 1, 3], [1, 1, 1]):
        runner = Runner(3, max(query_lens))
        common = runner.describe(query_lens, [700, 65, 2000])
        common = common.replace(num_actual_tokens=sum(query_lens))
        metadata = built.build(0, common)
        assert (getattr(metadata.decode, "step", None) is None) == (max(query_lens) > 8)
        tokens = sum(query_lens)
        q = (runner.q_nope[:tokens], runner.q_rope[:tokens])
        out, _ = layer.forward_mqa(q, runner.cache, metadata, None)
        runner.q_nope, runner.q_rope = q
        runner.check(out)


def test_graphs_with_and_without_drafts_take_turns() -> None:
    """A step without drafts beside steps with them, as an engine has them when a request's drafts run out."""
    built, layer = builder(kernels="mla=cuda_sm90", drafts=3), impl()
    captured = []
    for query_tokens in (4, 1):
        runner = Runner(3, query_tokens)
        full = [query_tokens] * 3
        for _ in range(2):
            metadata = built.build_for_cudagraph_capture(runner.describe(full, full))
            layer.forward_mqa((runner.q_nope, runner.q_rope), runner.cache, metadata, None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer.forward_mqa((runner.q_nope, runner.q_rope), runner.cache, metadata, None)[0]
        captured.append((runner, graph, out))
    for lengths in ([2100, 300, 66], [70, 2300, 1029], [5, 2500, 64]):
        for runner, graph, out in captured:
            built.build(0, runner.describe([runner.query_tokens] * 3, lengths))
            out.fill_(torch.nan)
            graph.replay()
            runner.check(out)


@pytest.mark.parametrize("query_tokens", [1, 2, 4])
def test_ours_and_vllms_kernel_differ_by_rounding(query_tokens: int) -> None:
    """The same batch, drafts included, by both: the error of each against float64 is of the same size."""
    runner, layer = Runner(4, query_tokens), impl()
    full, lengths = [query_tokens] * 4, [2400, 1111, 65, 640]
    errors = []
    for ours in (True, False):
        built = builder(kernels="mla=cuda_sm90", drafts=query_tokens - 1)
        if not ours:
            built._steps = None
        metadata = built.build(0, runner.describe(full, lengths))
        assert (getattr(metadata.decode, "step", None) is not None) == ours
        out = layer.forward_mqa((runner.q_nope, runner.q_rope), runner.cache, metadata, None)[0]
        errors.append((out.double() - runner.reference(torch.float64)).abs().mean())
    assert errors[0] <= 1.5 * errors[1]
