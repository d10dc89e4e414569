# SPDX-License-Identifier: Apache-2.0
"""What goes with the tiny models: LoRA adapters, an EAGLE3 drafter, and a DeepSeek of dummy weights with an MTP layer."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from real_vllm.models import BOS_AND_PAD_ID, CACHE_DIR, EOS_ID, VOCABULARY_TOKENS, tiny_model

HIDDEN = 128
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
TARGET_LAYERS = 3
LORA_RANK = 8
# Between the layers of a target of three: with vLLM's default numbers they would all be the same.
AUXILIARY_LAYERS = [1, 2, 3]


def adapter(number: int) -> Path:
    """Folder of a LoRA adapter for the tiny `qwen3`; adapters of different numbers answer differently."""

    def build(folder: Path) -> None:
        widths = {"q_proj": HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
        shapes = {}
        for layer in range(TARGET_LAYERS):
            for module, width in widths.items():
                name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                shapes |= {f"{name}.lora_A.weight": (LORA_RANK, HIDDEN), f"{name}.lora_B.weight": (width, LORA_RANK)}
        _write_weights(folder / "adapter_model.safetensors", shapes, seed=number, std=0.3)
        settings = {"peft_type": "LORA", "r": LORA_RANK, "lora_alpha": LORA_RANK, "target_modules": sorted(widths)}
        _write_json(folder / "adapter_config.json", {**settings, "bias": "none", "task_type": "CAUSAL_LM"})

    return _built(f"adapter{number}", build)


def eagle_drafter() -> Path:
    """Folder of an EAGLE3 drafter for the tiny `qwen3`, of random weights: nearly everything it proposes is rejected."""

    def build(folder: Path) -> None:
        layer, attention, mlp = "midlayer", "midlayer.self_attn", "midlayer.mlp"
        shapes = {
            "fc.weight": (HIDDEN, len(AUXILIARY_LAYERS) * HIDDEN),
            f"{attention}.q_proj.weight": (HEADS * HEAD_DIM, 2 * HIDDEN),
            f"{attention}.k_proj.weight": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
            f"{attention}.v_proj.weight": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
            f"{attention}.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{mlp}.gate_proj.weight": (256, HIDDEN),
            f"{mlp}.up_proj.weight": (256, HIDDEN),
            f"{mlp}.down_proj.weight": (HIDDEN, 256),
            "lm_head.weight": (VOCABULARY_TOKENS, HIDDEN),
            **{f"{layer}.{norm}.weight": (HIDDEN,) for norm in ("hidden_norm", "input_layernorm")},
            f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
            "norm.weight": (HIDDEN,),
        }
        _write_weights(folder / "model.safetensors", shapes, seed=3, std=0.12)
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **_sizes(1),
            "draft_vocab_size": VOCABULARY_TOKENS,
            "eagle_aux_hidden_state_layer_ids": AUXILIARY_LAYERS,
        }
        _write_json(folder / "config.json", config)

    return _built("eagle3", build)


def deepseek_with_mtp() -> Path:
    """Folder of a DeepSeek V3 configuration with one MTP layer and no weights (`load_format="dummy"`)."""

    def build(folder: Path) -> None:
        config = {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            **_sizes(TARGET_LAYERS),
            "num_key_value_heads": HEADS,
            "moe_intermediate_size": 64,
            # vLLM's CPU attention takes no other sizes of the latent.
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "q_lora_rank": 64,
            "qk_nope_head_dim": HIDDEN,
            "v_head_dim": HIDDEN,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "n_group": 2,
            "topk_group": 1,
            "num_nextn_predict_layers": 1,
        }
        del config["head_dim"]
        _write_json(folder / "config.json", config)

    return _built("deepseek-mtp", build)


def encoder() -> Path:
    """Folder of a tiny BERT of random weights: it keeps no KV."""

    def build(folder: Path) -> None:
        import torch
        from transformers import BertConfig, BertModel

        torch.manual_seed(11)
        config = BertConfig(
            vocab_size=VOCABULARY_TOKENS,
            hidden_size=HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            intermediate_size=256,
            max_position_embeddings=512,
            initializer_range=0.2,
        )
        BertModel(config).save_pretrained(folder)

    return _built("bert", build)


def _sizes(num_layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY_TOKENS,
        "bos_token_id": BOS_AND_PAD_ID,
        "pad_token_id": BOS_AND_PAD_ID,
        "eos_token_id": EOS_ID,
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def _built(name: str, build: Callable[[Path], None]) -> Path:
    """The folder of `name`, built unless this version of it is there already."""
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    target = CACHE_DIR / f"tiny-{name}-{recipe}"
    CACHE_DIR.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not target.exists():
            partial = target.with_name(target.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            build(partial)
            for file in tiny_model("qwen3").glob("*token*"):
                shutil.copy(file, partial)
            partial.rename(target)
    return target


def _write_weights(path: Path, shapes: Mapping[str, tuple[int, ...]], seed: int, std: float) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    weights = {
        name: torch.empty(shape).uniform_(0.8, 1.2) if len(shape) == 1 else torch.empty(shape).normal_(0.0, std)
        for name, shape in shapes.items()
    }
    save_file(weights, path)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))
