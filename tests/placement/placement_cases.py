# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every family, the specifications they are tried with, and how to compile one."""

from __future__ import annotations

from typing import Any

from tokenspeed_plugin.placement import Compiler, ModelGraph, ModelPlan, PlacementSpec, Residual
from tokenspeed_plugin.placement.algebra import COLLECTIVES
from tokenspeed_plugin.placement.cost import CostModel, CostTable, LinkCost
from tokenspeed_plugin.placement.models import declare

TABLE = CostTable.load()
BY_BYTES = TABLE.model_copy(
    update={
        "links": {
            name: {kind: {2: LinkCost(latency_us=latency_us, gbytes_per_s=speed)} for kind in COLLECTIVES}
            for name, latency_us, speed in (("node", 8.0, 310.0), ("network", 24.0, 42.0))
        }
    }
)
"""All collectives go at one speed, so that the cheapest plan is one that sends little."""

_BASE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
_LATENT: dict[str, Any] = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
_DEEPSEEK: dict[str, Any] = {**_MOE, **_LATENT, "n_routed_experts": 8, "first_k_dense_replace": 1}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **_BASE,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
    },
    "qwen3": {**_BASE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3_moe": {
        **_BASE,
        **_MOE,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "mlp_only_layers": [0],
    },
    "deepseek_v2": {
        **_BASE,
        **_DEEPSEEK,
        "architectures": ["DeepseekV2ForCausalLM"],
        "n_shared_experts": 2,
        "q_lora_rank": None,
    },
    "deepseek_v3": {
        **_BASE,
        **_DEEPSEEK,
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_shared_experts": 1,
        "q_lora_rank": 12,
        "n_group": 2,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
    },
    "gpt_oss": {
        **_BASE,
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 3,
    },
    "gemma3": {**_BASE, "architectures": ["Gemma3ForCausalLM"], "sliding_window": 3, "sliding_window_pattern": 3},
}
FAMILIES = tuple(CONFIGS)

SPECS: tuple[tuple[str, int], ...] = (
    ("attn=tp2,dense=tp2,moe=tp2", 2),
    ("attn=tp2,dense=tp2,moe=ep2", 2),
    ("attn=tp1,dense=tp2,moe=ep2", 2),
    ("attn=tp4,dense=tp4,moe=tp2ep2", 4),
    ("attn=tp4,dense=tp1,moe=ep4", 4),
    ("attn=tp2,dense=tp2,moe=ep8", 8),
    ("attn=tp4,dense=tp2,moe=ep4", 8),
    ("attn=tp1,dense=tp8,moe=tp4", 8),
)


def model(family: str, **changes: Any) -> ModelGraph:
    """The declared tiny model of a family, with fields of its configuration changed."""
    return declare(family, {**CONFIGS[family], **changes})


def compile_plan(
    graph: ModelGraph,
    spec: str = "attn=tp2,dense=tp2,moe=tp2",
    world_size: int = 2,
    *,
    num_tokens: int = 40,
    num_rows: int = 8,
    residual: Residual = Residual.AUTO,
) -> ModelPlan:
    """The plan for a step of ``num_tokens`` tokens."""
    parsed = PlacementSpec.parse(spec)
    parsed.check_model(graph)
    cost = CostModel(graph, parsed.mesh(world_size, graph), TABLE, num_tokens, num_rows)
    return Compiler(cost, residual).compile()
