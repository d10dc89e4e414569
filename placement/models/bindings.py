# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's model classes keep the modules that a declaration names.

Other packages add an architecture through the pluggy hook ``tokenspeed_bind_models`` (``docs/placement.md``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tokenspeed_plugin.placement.algebra import PlacementError
from tokenspeed_plugin.placement.models.registry import HookCaller, with_added

if TYPE_CHECKING:
    from collections.abc import Mapping

HOOK: Final = "tokenspeed_bind_models"


@dataclass(frozen=True)
class ModelBinding:
    """Paths from declared modules to attributes of a vLLM model class.

    Attributes:
        inner: the module with embedding, layers and final norm, as an attribute of the registered class.
        layers: its list of decoder layers.
        paths: declared module -> attribute path from the inner model (first and last section) or from the decoder layer;
            a module that is not here has an attribute of its own name.
        together: declared modules that one layer of vLLM computes, the one whose path counts first.
        absent: fields of the configuration under which vLLM's forward pass does more than is declared; a model that sets one
            is refused.
        refused_dtypes: types for which it does more than is declared.
    """

    inner: str = "model"
    layers: str = "layers"
    paths: Mapping[str, str] = field(default_factory=dict)
    together: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    refused_dtypes: tuple[str, ...] = ()

    def check(self, name: str, config: Mapping[str, Any]) -> None:
        """Whether vLLM computes the model of ``config`` as it is declared.

        Raises:
            PlacementError: names the field and its value.
        """
        for key in self.absent:
            if config.get(key):
                message = (
                    f"config of {name!r}: {key} is {config[key]!r}, which no declaration covers; it must not be set"
                )
                raise PlacementError(message)
        if config.get("dtype") in self.refused_dtypes:
            message = (
                f"{name!r} in {config['dtype']}: vLLM rescales this model in that type, which no declaration covers"
            )
            raise PlacementError(message)

    def path(self, module: str) -> str:
        """Attribute path of a declared module."""
        return self.paths.get(module, module)


_DENSE: Final = ModelBinding()
_EXPERTS: Final = {"experts": "mlp"}
_SHARED_EXPERTS: Final = ("experts", "shared_experts", "experts_plus_shared_experts")
_DEEPSEEK: Final = ModelBinding(
    paths=_EXPERTS,
    together=_SHARED_EXPERTS,
    absent=("llama_4_scaling", "index_topk"),
    refused_dtypes=("float16",),
)

_BINDINGS: Final[Mapping[str, ModelBinding]] = {
    "LlamaForCausalLM": _DENSE,
    "MistralForCausalLM": ModelBinding(absent=("ada_rms_norm_t_cond",)),
    "Qwen2ForCausalLM": _DENSE,
    "Qwen3ForCausalLM": _DENSE,
    "Qwen3MoeForCausalLM": ModelBinding(paths=_EXPERTS),
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "GptOssForCausalLM": ModelBinding(paths={**_EXPERTS, "embed_tokens": "embedding", "self_attn": "attn"}),
    "Gemma3ForCausalLM": ModelBinding(paths={"embed_scale": "normalizer"}),
}


def bindings(manager: HookCaller | None = None) -> dict[str, ModelBinding]:
    """Every architecture that plans can run on, ours and those of other distributions.

    Raises:
        PlacementError: an architecture is bound twice.
    """
    return with_added(_BINDINGS, manager, HOOK, ("bound", "binding"))


def binding_of(architecture: str, manager: Any = None) -> ModelBinding:
    """The binding of one architecture.

    Raises:
        PlacementError: there is none; names those there are.
    """
    known = bindings(manager)
    if architecture not in known:
        message = f"architecture {architecture!r} cannot be placed; supported are {', '.join(sorted(known))}"
        raise PlacementError(message)
    return known[architecture]
