# SPDX-License-Identifier: Apache-2.0
"""A tiny random LLaVA, and the stand-in for torchvision that vLLM needs to load one on a machine without it."""

import hashlib
import importlib.machinery
import shutil
import sys
import types
from pathlib import Path
from typing import Any

from filelock import FileLock

from real_vllm import models

IMAGE_PIXELS = 56
PATCH_PIXELS = 14
IMAGE_TOKENS = (IMAGE_PIXELS // PATCH_PIXELS) ** 2
IMAGE_TOKEN_ID = models.VOCABULARY_TOKENS
_VOCABULARY_TOKENS = models.VOCABULARY_TOKENS + 64
_STUBS = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


def llava_model() -> Path:
    """Folder of the model, built under ``.cache`` unless this version of it is there already."""
    recipe = hashlib.sha256(Path(__file__).read_bytes() + Path(models.__file__).read_bytes()).hexdigest()[:12]
    target = models.CACHE_DIR / f"tiny-llava-{recipe}"
    models.CACHE_DIR.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not target.exists():
            _build(target)
    return target


def stand_in_for_torchvision() -> None:
    """Let vLLM import the processors of transformers that are written for torchvision; none of them is used.

    transformers decides first that there is no torchvision, so it picks its processors for PIL.
    """
    from transformers.utils import import_utils

    if import_utils.is_torchvision_available():
        return
    for name in _STUBS:
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def image(seed: int) -> Any:
    """An image of noise."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(seed)
    return Image.fromarray(draw.integers(0, 256, (IMAGE_PIXELS, IMAGE_PIXELS, 3), dtype=np.uint8))


def _build(target: Path) -> None:
    import torch
    from transformers import LlavaForConditionalGeneration

    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    torch.manual_seed(8)
    model = LlavaForConditionalGeneration(_config()).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.uniform_(-0.2, 0.2).add_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            else:
                # Image features weigh as much as words: otherwise the answers would not depend on them.
                parameter.normal_(0.0, 0.02 if "embed_tokens" in name else 0.12)
    model.save_pretrained(partial)
    _rename_vision_weights(partial / "model.safetensors")
    _processor().save_pretrained(partial)
    partial.rename(target)


def _rename_vision_weights(path: Path) -> None:
    """From the names of transformers 5 to those of the checkpoints that vLLM reads."""
    from safetensors.torch import load_file, save_file

    new, old = "vision_tower.", "vision_tower.vision_model."
    weights = {name.replace(new, old) if old not in name else name: weight for name, weight in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})


def _config() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    text = {**models._shared_settings(2), "vocab_size": _VOCABULARY_TOKENS, "tie_word_embeddings": False}
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": IMAGE_PIXELS,
        "patch_size": PATCH_PIXELS,
        "projection_dim": 64,
    }
    return LlavaConfig(
        text_config={**LlamaConfig(**text).to_dict(), "model_type": "llama"},
        vision_config={**CLIPVisionConfig(**vision).to_dict(), "model_type": "clip_vision_model"},
        image_token_index=IMAGE_TOKEN_ID,
        vision_feature_layer=-2,
    )


def _processor() -> Any:
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    tokenizer = models._tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": IMAGE_PIXELS}, crop_size=size),
        tokenizer=tokenizer,
        patch_size=PATCH_PIXELS,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )
