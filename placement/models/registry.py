# SPDX-License-Identifier: Apache-2.0
"""From the architecture name of a configuration to its declaration.

Other packages add an architecture through the pluggy hook ``tokenspeed_declare_models`` (entry-point group
``tokenspeed_plugin``), which returns a mapping from architecture name to declaration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from tokenspeed_plugin.placement.algebra import PlacementError
from tokenspeed_plugin.placement.models import families

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenspeed_plugin.placement.graph import ModelGraph


class Declaration(Protocol):
    """Builds the graph of a model from its name and Hugging Face configuration."""

    def __call__(self, name: str, config: Mapping[str, Any], /) -> ModelGraph:
        """The graph of model ``name``."""
        ...


_DECLARATIONS: dict[str, Declaration] = {
    "LlamaForCausalLM": families.dense,
    "MistralForCausalLM": families.dense,
    "Qwen2ForCausalLM": families.dense,
    "Qwen3ForCausalLM": families.dense,
    "Qwen3MoeForCausalLM": families.qwen3_moe,
    "DeepseekV2ForCausalLM": families.deepseek,
    "DeepseekV3ForCausalLM": families.deepseek,
    "GptOssForCausalLM": families.gpt_oss,
    "Gemma3ForCausalLM": families.gemma3,
    "Gemma3ForConditionalGeneration": families.gemma3,
}


def declared_architectures() -> tuple[str, ...]:
    """Architectures that placement knows, in alphabetical order."""
    return tuple(sorted(_DECLARATIONS))


def register_declaration(architecture: str, declaration: Declaration) -> None:
    """Add an architecture.

    Raises:
        PlacementError: the architecture is declared already.
    """
    if architecture in _DECLARATIONS:
        message = f"architecture {architecture!r} is declared already; a second declaration is refused"
        raise PlacementError(message)
    _DECLARATIONS[architecture] = declaration


def declare(name: str, config: Mapping[str, Any]) -> ModelGraph:
    """The declaration of a model from its configuration (the text part of a multimodal one).

    Raises:
        PlacementError: no architecture of the configuration is declared, or a field is missing.
    """
    for architecture in config.get("architectures") or ():
        if architecture in _DECLARATIONS:
            text = config.get("text_config")
            return _DECLARATIONS[architecture](name, {**config, **text} if text else config)
    message = (
        f"model {name!r}: architectures {config.get('architectures')} are not declared for placement; "
        f"declared are {', '.join(declared_architectures())}"
    )
    raise PlacementError(message)
