# SPDX-License-Identifier: Apache-2.0
"""The shipped model families, declared from the fields of their Hugging Face configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from tokenspeed_plugin.placement.graph import ModelGraph
from tokenspeed_plugin.placement.models import blocks
from tokenspeed_plugin.placement.models.config_fields import ConfigFields
from tokenspeed_plugin.placement.models.decoder import entry, leave, pre_norm_layer, sandwich_layer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tokenspeed_plugin.placement.graph import Section

Sizes: TypeAlias = dict[str, int]


def dense(name: str, config: Mapping[str, Any]) -> ModelGraph:
    """Llama, Mistral, Qwen2 and Qwen3 dense models."""
    fields = ConfigFields(name, config)
    model_type = str(config.get("model_type", ""))
    attention = blocks.attention(
        "self_attn",
        fields.group,
        bias=bool(config.get("attention_bias", model_type == "qwen2")),
        output_bias=bool(config.get("attention_bias", False)) and model_type == "llama",
        head_norms=model_type == "qwen3",
        window=fields.window,
        wire_bytes=fields.wire_bytes,
    )
    mlp = blocks.mlp("mlp", bias=bool(config.get("mlp_bias", False)), wire_bytes=fields.wire_bytes)
    layer = pre_norm_layer("layer", attention, mlp)
    sizes = {**fields.attention_sizes, "ffn": fields.number("intermediate_size")}
    return _model(fields, "dense", (entry(), layer, leave()), ["layer"] * fields.num_layers, sizes)


def qwen3_moe(name: str, config: Mapping[str, Any]) -> ModelGraph:
    """Qwen3-MoE: attention with head norms, experts in every ``decoder_sparse_step``-th layer.

    Transformers 5 writes the number of experts under another name than before.
    """
    fields = ConfigFields(name, config)
    num_experts = fields.number("num_experts" if "num_experts" in config else "num_local_experts")
    attention = blocks.attention("self_attn", fields.group, head_norms=True, window=fields.window)
    routed = blocks.experts(
        "experts",
        num_experts,
        fields.number("num_experts_per_tok"),
        renormalise=bool(config.get("norm_topk_prob", False)),
    )
    sparse = pre_norm_layer("moe_layer", attention, routed)
    plain = pre_norm_layer("dense_layer", attention, blocks.mlp("mlp"))
    step, only_dense = int(config.get("decoder_sparse_step", 1)), set(config.get("mlp_only_layers") or ())
    order = [
        "moe_layer" if i not in only_dense and (i + 1) % step == 0 else "dense_layer" for i in range(fields.num_layers)
    ]
    sizes = {
        **fields.attention_sizes,
        "ffn": fields.number("intermediate_size"),
        "expert_ffn": fields.number("moe_intermediate_size"),
        "experts": num_experts,
        "all_experts": num_experts,
    }
    return _model(fields, "qwen3_moe", (entry(), sparse, plain, leave()), order, sizes)


def deepseek(name: str, config: Mapping[str, Any]) -> ModelGraph:
    """DeepSeek V2 and V3: latent attention, leading dense layers, routed and shared experts."""
    fields = ConfigFields(name, config)
    num_experts = fields.number("n_routed_experts")
    query_rank = config.get("q_lora_rank") is not None
    attention = blocks.latent_attention("self_attn", query_rank=query_rank, wire_bytes=fields.wire_bytes)
    routed = blocks.experts(
        "experts",
        num_experts,
        fields.number("num_experts_per_tok"),
        scoring=str(config.get("scoring_func", "softmax")),
        renormalise=bool(config.get("norm_topk_prob", False)),
        factor=float(config.get("routed_scaling_factor", 1.0)),
        correction=config.get("topk_method") == "noaux_tc" or config.get("scoring_func") == "sigmoid",
        num_groups=int(config.get("n_group") or 1),
        top_groups=int(config.get("topk_group") or 1),
    )
    num_shared = int(config.get("n_shared_experts") or 0)
    shared = (blocks.mlp("shared_experts", "shared_ffn"),) if num_shared else ()
    sparse = pre_norm_layer("moe_layer", attention, routed, *shared)
    plain = pre_norm_layer("dense_layer", attention, blocks.mlp("mlp", wire_bytes=fields.wire_bytes))
    first, frequency = int(config.get("first_k_dense_replace", 0)), int(config.get("moe_layer_freq", 1))
    order = ["moe_layer" if i >= first and i % frequency == 0 else "dense_layer" for i in range(fields.num_layers)]
    sizes = {
        **fields.latent_sizes(query_rank=query_rank),
        "ffn": fields.number("intermediate_size"),
        "expert_ffn": fields.number("moe_intermediate_size"),
        "experts": num_experts,
        "all_experts": num_experts,
    }
    if num_shared:
        sizes["shared_ffn"] = num_shared * fields.number("moe_intermediate_size")
    return _model(fields, "deepseek", (entry(), sparse, plain, leave()), order, sizes)


def gpt_oss(name: str, config: Mapping[str, Any]) -> ModelGraph:
    """GPT-OSS: biases and sinks in attention, sliding window in every other layer, experts with biases."""
    fields = ConfigFields(name, config)
    num_experts = fields.number("num_local_experts")
    routed = blocks.experts(
        "experts",
        num_experts,
        fields.number("num_experts_per_tok"),
        bias=True,
        scoring="softmax-of-chosen",
        activation="swiglu-oai",
    )
    kinds = fields.layer_types(lambda i: "sliding_attention" if i % 2 == 0 else "full_attention")
    layers = [
        pre_norm_layer(
            kind,
            blocks.attention(
                "self_attn",
                fields.group,
                bias=True,
                output_bias=True,
                sinks=True,
                window=fields.number("sliding_window") if kind == "sliding_attention" else None,
            ),
            routed,
        )
        for kind in dict.fromkeys(kinds)
    ]
    sizes = {
        **fields.attention_sizes,
        "expert_ffn": fields.number("intermediate_size"),
        "experts": num_experts,
        "all_experts": num_experts,
    }
    return _model(fields, "gpt_oss", (entry(), *layers, leave()), kinds, sizes)


def gemma3(name: str, config: Mapping[str, Any]) -> ModelGraph:
    """Gemma 3 text models: scaled embedding, norms on both sides of each half, five sliding layers to one full."""
    fields = ConfigFields(name, config)
    pattern = int(config.get("sliding_window_pattern", 6))
    kinds = fields.layer_types(lambda i: "full_attention" if (i + 1) % pattern == 0 else "sliding_attention")
    mlp = blocks.mlp("mlp", activation="gelu_tanh", wire_bytes=fields.wire_bytes)
    layers = [
        sandwich_layer(
            kind,
            blocks.attention(
                "self_attn",
                fields.group,
                bias=bool(config.get("attention_bias", False)),
                output_bias=bool(config.get("attention_bias", False)),
                head_norms=True,
                window=fields.number("sliding_window") if kind == "sliding_attention" else None,
                wire_bytes=fields.wire_bytes,
            ),
            mlp,
        )
        for kind in dict.fromkeys(kinds)
    ]
    sizes = {**fields.attention_sizes, "ffn": fields.number("intermediate_size")}
    start = entry(embedding_scale=float(fields.number("hidden_size")) ** 0.5)
    return _model(fields, "gemma3", (start, *layers, leave(unit_offset=True)), kinds, sizes)


def _model(
    fields: ConfigFields, family: str, sections: Iterable[Section], layers: Iterable[str], sizes: Sizes
) -> ModelGraph:
    order = ("entry", *layers, "exit")
    used = {section.name: section for section in sections if section.name in order}
    return ModelGraph(
        name=fields.name,
        sections=used,
        order=order,
        sizes={**sizes, "hidden": fields.number("hidden_size"), "vocab": fields.number("vocab_size")},
        activation_bytes=fields.activation_bytes,
        weight_bytes=fields.weight_bytes,
        family=family,
    )
