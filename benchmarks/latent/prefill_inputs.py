# SPDX-License-Identifier: Apache-2.0
"""One request's new tokens on its cached ones, in vLLM's own structures, and one call of each implementation on them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.latent.cells import PrefillCell
from benchmarks.latent.peers import PeerUnavailableError
from tokenspeed_plugin.kernels.mla.cached_prefill.groups import KEY_DIMS, NOPE_DIMS, VALUE_DIMS
from tokenspeed_plugin.kernels.mla.cached_prefill.solutions import (
    ABSORBED,
    ABSORBED_QUERY_TOKENS,
    MODE,
    OURS,
    OURS_TMA,
    UNFOLDED,
)
from tokenspeed_plugin.kernels.mla.geometry import HEAD_DIMS, LATENT_DIMS, ROPE_DIMS
from tokenspeed_plugin.kernels.mla.share import PAGE_TOKENS
from tokenspeed_plugin.kernels.registry import KernelSpec, default_registry

SCALE = KEY_DIMS**-0.5


class Projection(torch.nn.Module):
    """kv_b_proj as vLLM calls it: one dense product, and no bias."""

    def __init__(self, heads: int, generator: torch.Generator) -> None:
        super().__init__()
        shape = (heads * (NOPE_DIMS + VALUE_DIMS), LATENT_DIMS)
        weight = torch.randn(shape, device="cuda", generator=generator) * LATENT_DIMS**-0.5
        self.weight = torch.nn.Parameter(weight.to(torch.bfloat16), requires_grad=False)

    def forward(self, latents: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[tokens, 512] to [tokens, heads x 256]."""
        return torch.nn.functional.linear(latents, self.weight), None


class VllmPrefill:
    """What is called of vLLM, and our backend inside it.

    Raises:
        PeerUnavailableError: vLLM cannot be imported here, or its FlashAttention 3 does not run.
    """

    def __init__(self) -> None:
        try:
            import vllm.v1.attention.backends.mla.flashattn_mla as flash
            from vllm.v1.attention.backends.mla.prefill.flash_attn import FlashAttnPrefillBackend

            from tokenspeed_plugin.kernels.engine import mla_backend
        except ImportError as error:
            raise PeerUnavailableError(f"vLLM's FlashAttention MLA: {error}") from error
        if not flash.flash_attn_supports_mla():
            raise PeerUnavailableError("vLLM's FlashAttention MLA does not run here")
        self.builder, self.layer = flash.FlashAttnMLAMetadataBuilder, flash.FlashAttnMLAImpl
        self.prefill_backend, self.our_layer = FlashAttnPrefillBackend, mla_backend.MlaImpl


class PrefillInputs:
    """Random inputs of a cell, in vLLM's own structures."""

    def __init__(self, cell: PrefillCell, vllm: VllmPrefill) -> None:
        self.cell, self._vllm = cell, vllm
        generator = torch.Generator("cuda").manual_seed(0)
        total = cell.context_tokens + cell.query_tokens
        pages = -(-total // PAGE_TOKENS)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)

        self.cache = random(pages, PAGE_TOKENS, HEAD_DIMS)
        self.table = torch.randperm(pages, device="cuda", generator=generator).to(torch.int32).view(1, pages)
        slots = torch.arange(cell.context_tokens, total, device="cuda")
        fresh = self.cache[self.table[0, slots // PAGE_TOKENS].long(), slots % PAGE_TOKENS]
        self.latents, self.rope = fresh[:, :LATENT_DIMS].contiguous(), fresh[:, None, LATENT_DIMS:].contiguous()
        self.q = random(cell.query_tokens, cell.heads, KEY_DIMS)
        self.output = torch.empty(cell.query_tokens, cell.heads * VALUE_DIMS, device="cuda", dtype=torch.bfloat16)
        self.projection = Projection(cell.heads, generator)
        weights = self.projection.weight.view(cell.heads, NOPE_DIMS + VALUE_DIMS, LATENT_DIMS)
        self.to_latents, self.to_values = weights[:, :NOPE_DIMS], weights[:, NOPE_DIMS:].transpose(1, 2)
        self.config = _vllm_config(cell, self.projection, vllm.prefill_backend)
        self.one = torch.ones((), device="cuda")

    def launches(self) -> dict[str, Callable[[], None]]:
        """One call of each implementation, by its solution and, where there are several, its setting."""
        own = {spec.solution: spec for spec in default_registry().candidates("mla", MODE)}
        found = {UNFOLDED: self._unfolded(), OURS: self._ours(own[OURS])}
        if own[OURS_TMA].unavailable() is None:
            found[OURS_TMA] = self._ours(own[OURS_TMA])
        if self.cell.query_tokens <= ABSORBED_QUERY_TOKENS:
            found |= {f"{ABSORBED} {splits} splits": self._absorbed(splits) for splits in (0, 32)}
        return found

    def _metadata(self, threshold: int) -> tuple[Any, Any]:
        """A builder of vLLM's, and its metadata of the cell's batch; up to `threshold` new tokens it is a decode batch."""
        from vllm.v1.kv_cache_interface import MLAAttentionSpec

        class Builder(self._vllm.builder):  # type: ignore[misc, name-defined]
            reorder_batch_threshold = threshold

        spec = MLAAttentionSpec(block_size=PAGE_TOKENS, num_kv_heads=1, head_size=HEAD_DIMS, dtype=torch.bfloat16)
        builder = Builder(spec, ["layer"], self.config, torch.device("cuda"))
        return builder, builder.build(0, self._common())

    def _made(self, layer: Any) -> Any:
        from vllm.config import VllmConfig, set_current_vllm_config

        sizes = {
            "q_lora_rank": None,
            "kv_lora_rank": LATENT_DIMS,
            "qk_nope_head_dim": NOPE_DIMS,
            "qk_rope_head_dim": 64,
        }
        with set_current_vllm_config(VllmConfig()):
            return layer(
                self.cell.heads, HEAD_DIMS, SCALE, 1, None, None, "auto", None, "decoder", None,
                **sizes, qk_head_dim=KEY_DIMS, v_head_dim=VALUE_DIMS, kv_b_proj=self.projection,
            )  # fmt: skip

    def _common(self) -> Any:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = torch.tensor([0, self.cell.query_tokens], dtype=torch.int32)
        total = self.cell.context_tokens + self.cell.query_tokens
        return CommonAttentionMetadata(
            query_start_loc=starts.cuda(),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([total], dtype=torch.int32, device="cuda"),
            num_reqs=1,
            num_actual_tokens=self.cell.query_tokens,
            max_query_len=self.cell.query_tokens,
            max_seq_len=total,
            block_table_tensor=self.table,
            slot_mapping=torch.zeros(self.cell.query_tokens, dtype=torch.int64, device="cuda"),
            seq_lens_cpu_upper_bound=torch.tensor([total], dtype=torch.int32),
        )

    def _prefill(self, layer: Any, metadata: Any) -> Callable[[], None]:
        arguments = (self.q, self.latents, self.rope, self.cache, metadata, self.one)
        return functools.partial(layer.forward_mha, *arguments, output=self.output)

    def _unfolded(self) -> Callable[[], None]:
        return self._prefill(self._made(self._vllm.layer), self._metadata(1)[1])

    def _ours(self, spec: KernelSpec) -> Callable[[], None]:
        from tokenspeed_plugin.kernels.engine.prefill_steps import WORKSPACE_BYTES, PrefillStep

        cell = self.cell
        total = cell.context_tokens + cell.query_tokens
        plan = spec.plan([cell.query_tokens], [total], self.table, PAGE_TOKENS, cell.heads, WORKSPACE_BYTES)
        metadata = SimpleNamespace(prefill=SimpleNamespace(step=PrefillStep(plan, WORKSPACE_BYTES)))
        return self._prefill(self._made(self._vllm.our_layer), metadata)

    def _absorbed(self, splits: int) -> Callable[[], None]:
        layer = self._made(self._vllm.layer)
        layer.need_to_return_lse_for_decode = False
        builder, metadata = self._metadata(ABSORBED_QUERY_TOKENS)
        decode = metadata.decode
        decode.max_num_splits = splits
        decode.scheduler_metadata = builder._schedule_decode(
            num_reqs=1,
            cu_query_lens=decode.query_start_loc,
            max_query_len=decode.max_query_len,
            seqlens=decode.seq_lens,
            max_seq_len=decode.max_seq_len,
            causal=True,
            max_num_splits=splits,
        )
        q_nope, q_rope = self.q.split((NOPE_DIMS, ROPE_DIMS), dim=-1)
        out = self.output.view(-1, self.cell.heads, VALUE_DIMS)

        def launch() -> None:
            latent_q = q_nope.new_empty(*q_nope.shape[:2], LATENT_DIMS)
            torch.bmm(q_nope.transpose(0, 1), self.to_latents, out=latent_q.transpose(0, 1))
            result, _ = layer.forward_mqa((latent_q, q_rope), self.cache, metadata, None)
            torch.bmm(result.transpose(0, 1), self.to_values, out=out.transpose(0, 1))

        return launch


def _vllm_config(cell: PrefillCell, projection: Projection, prefill_backend: Any) -> Any:
    """vLLM's configuration, as far as builders and prefill backends read it."""
    from vllm.config import CUDAGraphMode

    sizes = {"kv_lora_rank": LATENT_DIMS, "qk_nope_head_dim": NOPE_DIMS, "qk_rope_head_dim": ROPE_DIMS}
    layer = SimpleNamespace(
        q_lora_rank=None, v_head_dim=VALUE_DIMS, num_heads=cell.heads, kv_b_proj=projection, **sizes
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=torch.bfloat16,
            max_model_len=2 * cell.context_tokens,
            get_num_attention_heads=lambda _: cell.heads,
            get_head_size=lambda: HEAD_DIMS,
        ),
        parallel_config=SimpleNamespace(
            cp_kv_cache_interleave_size=1, prefill_context_parallel_size=1, decode_context_parallel_size=1
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=PAGE_TOKENS),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
        attention_config=SimpleNamespace(
            use_prefill_query_quantization=False, flash_attn_max_num_splits_for_cuda_graph=32
        ),
        compilation_config=SimpleNamespace(
            static_forward_context={"layer": layer}, cudagraph_mode=CUDAGraphMode.NONE, max_cudagraph_capture_size=16
        ),
        speculative_config=None,
        additional_config={"tokenspeed": {"kernels": "auto"}},
        use_v2_model_runner=True,
    )
    layer.prefill_backend = prefill_backend(
        num_heads=cell.heads, scale=SCALE, v_head_dim=VALUE_DIMS, vllm_config=config, **sizes
    )
    return config
