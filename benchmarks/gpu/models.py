# SPDX-License-Identifier: Apache-2.0
"""Models of the benchmark: a config and a tokenizer written on the spot; weights are vLLM's dummy ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY_TOKENS = 8192
BOS_TOKEN, PAD_TOKEN, EOS_TOKEN = 0, 1, 2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY_TOKENS,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": BOS_TOKEN,
    "eos_token_id": EOS_TOKEN,
}
_DENSE: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
}
_MLA_MOE: dict[str, Any] = {
    **_COMMON,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "max_position_embeddings": 163_840,
    "rope_theta": 10_000,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
}


def _dense(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, head: int) -> dict[str, Any]:
    return {
        **_DENSE,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
    }


def _mla_moe(layers: int, hidden: int, intermediate: int, moe: int, heads: int, experts: int) -> dict[str, Any]:
    return {
        **_MLA_MOE,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "moe_intermediate_size": moe,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_routed_experts": experts,
        "num_experts_per_tok": min(6, experts),
    }


@dataclass(frozen=True)
class Model:
    """A model of the benchmark."""

    name: str
    config: dict[str, Any]
    kv_cache_bytes: int


_GIB = 1 << 30
MODELS = {
    "dense": Model("dense", _dense(16, 2048, 6144, 16, 8, 128), 20 * _GIB),
    "mla": Model("mla", _mla_moe(8, 2048, 10_944, 1408, 16, 64), 6 * _GIB),
}
TINY_MODELS = {
    "dense": Model("dense", _dense(2, 128, 256, 4, 2, 32), _GIB // 8),
    "mla": Model("mla", _mla_moe(2, 128, 256, 64, 4, 4), _GIB // 8),
}


def write_model(model: Model, folder: Path) -> Path:
    """Write config and tokenizer of `model` under `folder`; return the model's folder."""
    target = folder / model.name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(model.config, indent=1))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN}))
    _write_tokenizer(target)
    return target


def _write_tokenizer(target: Path) -> None:
    """Write a byte-level BPE tokenizer: three special tokens, 256 bytes, then pairs of bytes as merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<s>", "<pad>", "</s>"]
    num_merges = VOCABULARY_TOKENS - len(special) - len(alphabet)
    merges = [(alphabet[i // len(alphabet)], alphabet[i % len(alphabet)]) for i in range(num_merges)]
    words = [*special, *alphabet, *(first + second for first, second in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>", eos_token="</s>")
    fast.save_pretrained(str(target))
