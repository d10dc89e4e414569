# SPDX-License-Identifier: Apache-2.0
"""From the architecture name of a configuration to its declaration.

Other packages add an architecture with :func:`register_declaration`, or through the pluggy hook
``tokenspeed_declare_models``, which returns a mapping from architecture name to declaration (``docs/placement.md``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from tokenspeed_plugin.hooks import plugin_manager
from tokenspeed_plugin.placement.algebra import PlacementError
from tokenspeed_plugin.placement.models import families

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenspeed_plugin.placement.graph import ModelGraph

HOOK: Final = "tokenspeed_declare_models"

Added = TypeVar("Added")


class Declaration(Protocol):
    """Builds the graph of a model from its name and Hugging Face configuration."""

    def __call__(self, name: str, config: Mapping[str, Any], /) -> ModelGraph:
        """The graph of model ``name``."""
        ...


class HookCaller(Protocol):
    """The part of a pluggy manager that is used here."""

    @property
    def hook(self) -> Any:
        """Callable hooks by name."""
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


def declared_architectures(manager: HookCaller | None = None) -> tuple[str, ...]:
    """Architectures that placement knows, in alphabetical order."""
    return tuple(sorted(_known(manager)))


def register_declaration(architecture: str, declaration: Declaration) -> None:
    """Add an architecture.

    Raises:
        PlacementError: the architecture is declared already.
    """
    if architecture in _DECLARATIONS:
        message = f"architecture {architecture!r} is declared already; a second declaration is refused"
        raise PlacementError(message)
    _DECLARATIONS[architecture] = declaration


def declare(name: str, config: Mapping[str, Any], manager: HookCaller | None = None) -> ModelGraph:
    """The declaration of a model from its configuration (the text part of a multimodal one).

    ``manager`` is the pluggy manager whose hooks add architectures; that of this process by default.

    Raises:
        PlacementError: no architecture of the configuration is declared, one is declared twice, or a field is missing.
    """
    known = _known(manager)
    for architecture in config.get("architectures") or ():
        if architecture in known:
            text = config.get("text_config")
            return known[architecture](name, {**config, **text} if text else config)
    message = (
        f"model {name!r}: architectures {config.get('architectures')} are not declared for placement; "
        f"declared are {', '.join(sorted(known))}"
    )
    raise PlacementError(message)


def _known(manager: HookCaller | None) -> dict[str, Declaration]:
    """Shipped and registered declarations, and those that hooks add."""
    return with_added(_DECLARATIONS, manager, HOOK, ("declared", "declaration"))


def with_added(
    shipped: Mapping[str, Added], manager: HookCaller | None, hook: str, words: tuple[str, str]
) -> dict[str, Added]:
    """What we ship for each architecture, and what other distributions add through a hook.

    Args:
        words: for the error: what an architecture is by then, and what is refused.

    Raises:
        PlacementError: an architecture is there twice.
    """
    known = dict(shipped)
    call = getattr((manager or plugin_manager()).hook, hook, None)
    for added in call() if call is not None else ():
        twice = sorted(known.keys() & added.keys())
        if twice:
            message = f"architecture {twice[0]!r} is {words[0]} already; a second {words[1]} through {hook} is refused"
            raise PlacementError(message)
        known.update(added)
    return known
