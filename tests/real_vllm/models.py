# SPDX-License-Identifier: Apache-2.0
"""Tiny random models that vLLM runs on CPU, written as ordinary checkpoints the first time a test asks for one.

Real checkpoints rather than vLLM's dummy weights: those lie within 0.001 of zero, which makes the output depend on the last
token alone, so that equality between two schedulers would prove nothing. Weights here are float32 and of unequal size.
"""

import hashlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

CACHE_DIR = Path(__file__).resolve().parents[2] / ".cache" / "models"
GEMMA_DIR = CACHE_DIR / "gemma-3-270m"

VOCABULARY_TOKENS = 8192
BOS_AND_PAD_ID, UNKNOWN_ID, EOS_ID = 0, 1, 2
FIRST_TEXT_ID = 3
SLIDING_WINDOW_TOKENS = 128

# Small embeddings under large matrices: otherwise the last token outweighs everything that attention brings in.
_EMBEDDING_STD = 0.02
_MATRIX_STD = 0.12
_SPREAD = 0.2
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


def tiny_model(name: str) -> Path:
    """Folder of the tiny model ``name``, built under ``.cache`` unless this version of it is there already.

    Raises:
        ValueError: no such model; the message lists those there are.
    """
    if name not in _CONFIGS:
        message = f"no tiny model {name!r}; there are {', '.join(sorted(_CONFIGS))}"
        raise ValueError(message)
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    target = CACHE_DIR / f"tiny-{name}-{recipe}"
    CACHE_DIR.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not target.exists():
            _build(name, target)
    return target


def gemma_model() -> Path:
    """Folder of Gemma 3 270M.

    Raises:
        FileNotFoundError: it has not been built; the message names the command that does.
    """
    if not (GEMMA_DIR / "config.json").exists():
        message = f"{GEMMA_DIR} is missing: run `make gemma`"
        raise FileNotFoundError(message)
    return GEMMA_DIR


def _build(name: str, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    torch.manual_seed(int.from_bytes(name.encode()[:7], "big"))
    model = AutoModelForCausalLM.from_config(_CONFIGS[name](), dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("norm.weight"):
                # Gemma stores the weight of a norm as its distance from one.
                parameter.uniform_(-_SPREAD, _SPREAD).add_(0.0 if name == "gemma3" else 1.0)
            elif parameter.dim() == 1:
                parameter.uniform_(-_SPREAD, _SPREAD)
            else:
                parameter.normal_(0.0, _EMBEDDING_STD if "embed" in parameter_name else _MATRIX_STD)
    model.save_pretrained(partial)
    _tokenizer().save_pretrained(partial)
    partial.rename(target)


def _tokenizer() -> Any:
    """A byte-level tokenizer of exactly 8,192 tokens, trained on words put together from syllables."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    syllables = [first + vowel + last for first in "bdfgklmnprst" for vowel in "aeiou" for last in ("", "n", "r", "s")]
    draw = random.Random(8192)
    words = ("".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(60_000))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS,
        special_tokens=["<s>", "<unk>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    if tokenizer.get_vocab_size() != VOCABULARY_TOKENS:
        message = f"the tokenizer has {tokenizer.get_vocab_size()} tokens, not {VOCABULARY_TOKENS}"
        raise AssertionError(message)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        pad_token="<s>",
        unk_token="<unk>",
        eos_token="</s>",
        chat_template=_CHAT_TEMPLATE,
    )


def _shared_settings(num_layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY_TOKENS,
        "bos_token_id": BOS_AND_PAD_ID,
        "pad_token_id": BOS_AND_PAD_ID,
        "eos_token_id": EOS_ID,
        "tie_word_embeddings": True,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 32768,
    }


def _dense() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_shared_settings(3))


def _moe() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **_shared_settings(3),
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        norm_topk_prob=True,
    )


def _all_sliding() -> Any:
    from transformers import MistralConfig

    return MistralConfig(**_shared_settings(4), sliding_window=SLIDING_WINDOW_TOKENS)


def _five_sliding_one_full() -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        **_shared_settings(6),
        sliding_window=SLIDING_WINDOW_TOKENS,
        query_pre_attn_scalar=32,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    )


def _sliding_and_full_moe() -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(
        **{**_shared_settings(4), "head_dim": 64, "intermediate_size": 128, "tie_word_embeddings": False},
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=SLIDING_WINDOW_TOKENS,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )


def _states_and_full_moe() -> Any:
    from transformers import Qwen3NextConfig

    # vLLM's CPU kernel takes heads of 64 and 128; with 64 a state fits into a block of 128 tokens.
    return Qwen3NextConfig(
        **{**_shared_settings(4), "head_dim": 64},
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )


_CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3": _dense,
    "qwen3_moe": _moe,
    "mistral": _all_sliding,
    "gemma3": _five_sliding_one_full,
    "gpt_oss": _sliding_and_full_moe,
    "qwen3_next": _states_and_full_moe,
}
