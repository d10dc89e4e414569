# SPDX-License-Identifier: Apache-2.0
"""Reads the fields of a Hugging Face configuration and names the one that is missing or wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tokenspeed_plugin.placement.algebra import PlacementError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SCALE_BYTES: Final = 4
ACTIVATION_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
WEIGHT_BYTES: Final = {"fp8": 1.0, "mxfp4": 0.5 + 1 / 32, "compressed-tensors": 1.0, "awq": 0.5, "gptq": 0.5}


@dataclass(frozen=True)
class ConfigFields:
    """A configuration as a mapping, with the model's name for messages."""

    name: str
    config: Mapping[str, Any]

    def number(self, key: str) -> int:
        """A positive whole number.

        Raises:
            PlacementError: the key is missing or not a positive whole number.
        """
        value = self.config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            message = f"config of {self.name!r}: {key} is {value!r}, a positive whole number is needed"
            raise PlacementError(message)
        return value

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.number("num_hidden_layers")

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads; as many as query heads when the configuration does not say."""
        given = self.config.get("num_key_value_heads") is not None
        return self.number("num_key_value_heads" if given else "num_attention_heads")

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        heads = self.number("num_attention_heads")
        if heads % self.num_kv_heads:
            message = (
                f"config of {self.name!r}: {heads} query heads do not divide over {self.num_kv_heads} key-value heads"
            )
            raise PlacementError(message)
        return heads // self.num_kv_heads

    @property
    def window(self) -> int | None:
        """Sliding window of all layers, if there is one."""
        used = self.config.get("use_sliding_window", True) and self.config.get("sliding_window") is not None
        return self.number("sliding_window") if used else None

    @property
    def attention_sizes(self) -> dict[str, int]:
        """Lengths of the dimensions of grouped-query attention."""
        heads = self.number("num_attention_heads")
        given = self.config.get("head_dim") is not None
        head_dim = self.number("head_dim") if given else self.number("hidden_size") // heads
        return {"heads": heads, "kv_heads": self.num_kv_heads, "head_dim": head_dim}

    def latent_sizes(self, *, query_rank: bool) -> dict[str, int]:
        """Lengths of the dimensions of multi-head latent attention."""
        nope, rope, value = (self.number(k) for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        latent = self.number("kv_lora_rank")
        sizes = {
            "heads": self.number("num_attention_heads"),
            "qk_dim": nope + rope,
            "kv_dim": nope + value,
            "v_dim": value,
            "kv_lora": latent,
            "latent": latent + rope,
        }
        return {**sizes, "q_lora": self.number("q_lora_rank")} if query_rank else sizes

    def layer_types(self, otherwise: Callable[[int], str]) -> list[str]:
        """``layer_types`` of the configuration, or what ``otherwise`` says for each layer."""
        given = self.config.get("layer_types")
        kinds = list(given) if given else [otherwise(i) for i in range(self.num_layers)]
        allowed = ("sliding_attention", "full_attention")
        wrong = [kind for kind in kinds if kind not in allowed]
        if wrong or len(kinds) != self.num_layers:
            message = (
                f"config of {self.name!r}: layer_types has {len(kinds)} entries, e.g. {(wrong or kinds)[:1]}; "
                f"{self.num_layers} of {' or '.join(allowed)} are needed"
            )
            raise PlacementError(message)
        return kinds

    @property
    def activation_bytes(self) -> int:
        """Size of an activation element."""
        dtype = str(self.config.get("dtype") or self.config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        if dtype not in ACTIVATION_BYTES:
            message = f"config of {self.name!r}: dtype {dtype!r} is not one of {', '.join(ACTIVATION_BYTES)}"
            raise PlacementError(message)
        return ACTIVATION_BYTES[dtype]

    @property
    def _quantisation(self) -> Mapping[str, Any]:
        return self.config.get("quantization_config") or {}

    @property
    def weight_bytes(self) -> float:
        """Average size of a weight element, scales of the common schemes included."""
        return WEIGHT_BYTES.get(str(self._quantisation.get("quant_method")), float(self.activation_bytes))

    @property
    def wire_bytes(self) -> float | None:
        """Size of an input element of a linear layer after dynamic fp8 quantisation; None without it."""
        if self._quantisation.get("quant_method") != "fp8":
            return None
        block = self._quantisation.get("weight_block_size")
        group = block[-1] if block else self.number("hidden_size")
        return 1.0 + SCALE_BYTES / group
