# SPDX-License-Identifier: Apache-2.0
"""vLLM's MLA layer on a CPU, around an attention that keeps what it is given and writes the cache as vLLM's backends do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

HIDDEN, HEADS, NOPE, ROPE, LATENT, COMPRESSED, VALUE = 32, 3, 16, 64, 512, 48, 16
PREFIX = "model.layers.0.self_attn"
LAYER = f"{PREFIX}.attn"
PAGES, PAGE_TOKENS = 3, 16
E4M3 = torch.float8_e4m3fn
YARN = {
    "rope_type": "deepseek_yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}


class Projection(nn.Linear):
    """A linear layer that answers as vLLM's do."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, values: torch.Tensor) -> Any:
        return super().forward(values), None


class Write:
    """The cache write of a backend, in torch."""

    def do_kv_cache_update(self, latent: torch.Tensor, key: torch.Tensor, cache: torch.Tensor, *rest: Any) -> None:
        slots, cache_dtype, scale = rest[0], rest[1], rest[2]
        tokens = torch.cat((latent, key.squeeze(1)), dim=-1)[: slots.shape[0]]
        if cache_dtype.startswith("fp8"):
            tokens = (tokens.float() / scale).clamp(-448, 448).to(E4M3).view(torch.uint8)
        for slot, token in zip(slots.tolist(), tokens, strict=True):
            if slot >= 0:
                cache[slot // PAGE_TOKENS, slot % PAGE_TOKENS] = token


class Attention(nn.Module):
    """Stands for vLLM's MLAAttention: writes the cache through its `impl` and answers with something of all it was given."""

    cache_dtype = "auto"
    backend = "CPU_MLA"

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.layer_name, self.kv_cache_dtype = given["prefix"], type(self).cache_dtype
        self.impl = Write()
        self.attn_backend = SimpleNamespace(get_name=lambda: type(self).backend)
        self._k_scale = torch.tensor([0.5])
        self.kv_cache = torch.tensor([])
        self.seen: tuple[torch.Tensor, ...] = ()
        current_config().compilation_config.static_forward_context[self.layer_name] = self

    def forward(self, q: torch.Tensor, latent: torch.Tensor, key: torch.Tensor, output_shape: Any, **_: Any) -> Any:
        from vllm.model_executor.layers.attention.attention import get_attention_context

        _, _, cache, slots = get_attention_context(self.layer_name)
        if slots is not None:
            self.impl.do_kv_cache_update(latent, key, cache, slots, self.kv_cache_dtype, self._k_scale)
        self.seen = (q.detach().clone(), latent.detach().clone(), key.detach().clone())
        per_token = q[..., -VALUE:] + latent[:, None, :VALUE] * key[:, :, :VALUE]
        return per_token.reshape(output_shape)


def current_config() -> Any:
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config()


def engine_config(kernels: str | None = "append=reference") -> Any:
    """vLLM's configuration of an engine that asks for `kernels`, None for nothing."""
    from vllm.config import VllmConfig

    return VllmConfig(additional_config={"tokenspeed": {"kernels": kernels}} if kernels else {})


def new_layer(
    cls: type, config: Any, *, compressed: bool = True, dtype: torch.dtype = torch.float32, **parts: Any
) -> Any:
    """A layer of class `cls` with random weights, the same ones in every call; `parts` replace fields of `MLAModules`."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.mla import MLAModules
    from vllm.model_executor.layers.rotary_embedding import get_rope

    torch.manual_seed(5)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with set_current_vllm_config(config):
            latent = LATENT + ROPE
            fields: dict[str, Any] = {
                "kv_a_layernorm": RMSNorm(LATENT),
                "kv_b_proj": Projection(LATENT, HEADS * (NOPE + VALUE)),
                "rotary_emb": get_rope(ROPE, max_position=256, rope_parameters=YARN, is_neox_style=False, dtype=dtype),
                "o_proj": Projection(HEADS * VALUE, HIDDEN),
                "fused_qkv_a_proj": Projection(HIDDEN, COMPRESSED + latent) if compressed else None,
                "kv_a_proj_with_mqa": None if compressed else Projection(HIDDEN, latent),
                "q_a_layernorm": RMSNorm(COMPRESSED) if compressed else None,
                "q_b_proj": Projection(COMPRESSED, HEADS * (NOPE + ROPE)) if compressed else None,
                "q_proj": None if compressed else Projection(HIDDEN, HEADS * (NOPE + ROPE)),
                "indexer": None,
                "is_sparse": False,
                "topk_indices_buffer": None,
            }
            nn.init.uniform_(fields["kv_a_layernorm"].weight, 0.5, 1.5)
            replaced = {name: part() if isinstance(part, type) else part for name, part in parts.items()}
            config.compilation_config.static_forward_context.pop(LAYER, None)
            rank = COMPRESSED if compressed else None
            modules = MLAModules(**{**fields, **replaced})
            return cls(HIDDEN, HEADS, 0.1, NOPE, ROPE, VALUE, rank, LATENT, modules, prefix=PREFIX)
    finally:
        torch.set_default_dtype(before)


@contextmanager
def step(config: Any, slots: torch.Tensor | None) -> Iterator[None]:
    """vLLM's forward context of a step that writes to `slots`; None as in a profile run."""
    from vllm.forward_context import set_forward_context

    with set_forward_context(None, config, slot_mapping={} if slots is None else {LAYER: slots}):
        yield


def new_cache(dtype: torch.dtype) -> torch.Tensor:
    """An empty cache of one layer, poisoned; FP8 as vLLM keeps it, in bytes."""
    if dtype == torch.uint8:
        return torch.full((PAGES, PAGE_TOKENS, LATENT + ROPE), 0x7F, dtype=torch.uint8)
    return torch.full((PAGES, PAGE_TOKENS, LATENT + ROPE), float("nan"), dtype=dtype)
