# SPDX-License-Identifier: Apache-2.0
"""`--placement` at start-up: refuses what compiled parallelism cannot do, puts placed models into vLLM's registry, has the plans
compiled and verified, and leaves them in the configuration for the workers."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from tokenspeed_plugin.host import placed_models
from tokenspeed_plugin.host.check import require_placement
from tokenspeed_plugin.host.config_rows import is_many, is_set, shown, value_at
from tokenspeed_plugin.host.log import logger
from tokenspeed_plugin.settings import ResolvedSettings, SettingsError

OFF = "off"
_START = "tokenspeed_plugin.placement.runtime.start"


@dataclasses.dataclass(frozen=True)
class Unplaced:
    """A setting under which compiled parallelism is refused.

    Attributes:
        setting: dotted path below `VllmConfig`.
        is_asked: whether the value found there asks for the feature.
        what: the feature, in words.
        way_on: what to change.
    """

    setting: str
    is_asked: Callable[[Any], bool]
    what: str
    way_on: str

    def line(self, config: Any) -> str | None:
        """This row as a line of the error, None when `config` does not ask for the feature."""
        value = value_at(config, self.setting)
        if not self.is_asked(value):
            return None
        return f"{self.setting}={shown(value)}: {self.what} is not supported; {self.way_on}, or use `--placement off`"


# fmt: off
UNPLACED: tuple[Unplaced, ...] = (
    Unplaced("parallel_config.decode_context_parallel_size", is_many, "context parallelism", "leave it out"),
    Unplaced("parallel_config.prefill_context_parallel_size", is_many, "context parallelism", "leave it out"),
    Unplaced("parallel_config.enable_eplb", bool, "expert load balancing", "leave out `--enable-eplb`"),
    Unplaced("parallel_config.enable_elastic_ep", bool, "elastic expert parallelism", "leave out `--enable-elastic-ep`"),
    Unplaced("parallel_config.use_ubatching", bool, "micro-batching", "leave out `--enable-dbo`"),
    Unplaced("lora_config", is_set, "LoRA", "leave out `--enable-lora`"),
    Unplaced("model_config.enable_prompt_embeds", bool, "a prompt of embeddings", "leave out `--enable-prompt-embeds`"),
    Unplaced("model_config.is_multimodal_model", bool, "a multimodal model", "serve a text model"),
    Unplaced("model_config.runner_type", lambda v: v == "pooling", "a pooling model", "serve a generative model"),
    Unplaced("speculative_config.method", lambda v: v not in (None, "ngram", "suffix", "draft_model"),
             "a drafter that reads the model's hidden states", "draft with `ngram`, `suffix` or `draft_model`"),
)
# fmt: on


def create_engine_config(original: Callable[..., Any], engine_args: Any, resolved: ResolvedSettings) -> Any:
    """Make the `VllmConfig`, with placed models in it when they are asked for.

    Args:
        original: called without arguments, returns vLLM's `VllmConfig` for `engine_args`.
        engine_args: vLLM's; expert parallelism is switched on in them when the specification wants it.
        resolved: what was asked for.

    Raises:
        HostError: the installed vLLM lacks what placed models rely on.
        SettingsError: the model, the specification and vLLM's settings do not go together.
    """
    text, asked_by = resolved.values.placement, resolved.source("placement").spelling("placement")
    if text == OFF:
        placed_models.remove()
        return original()
    require_placement(f"{asked_by} {text}")
    start = importlib.import_module(_START)
    try:
        _settle_expert_parallel(engine_args, text, start.expert_parallel(text), asked_by)
        placed_models.install(start.architectures())
        config = original()
        _require(config)
        request = start.request_for(text, config)
    except ValueError:
        placed_models.remove()
        raise
    config.additional_config = {**(config.additional_config or {}), start.KEY: dataclasses.asdict(request)}
    logger(__name__).info("%s %s: %s, plans verified.", asked_by, text, request.spec)
    return config


def _settle_expert_parallel(engine_args: Any, text: str, wanted: bool | None, asked_by: str) -> None:
    if wanted is False and engine_args.enable_expert_parallel:
        msg = f"{asked_by} {text}: the MoE is split by width, but --enable-expert-parallel splits it by experts; leave one out"
        raise SettingsError(msg)
    if wanted:
        engine_args.enable_expert_parallel = True


def _require(config: Any) -> None:
    if not isinstance(config.additional_config, dict | None):
        msg = f"additional_config is a {type(config.additional_config).__name__}; --placement needs a dictionary there"
        raise SettingsError(msg)
    if lines := [line for row in UNPLACED if (line := row.line(config))]:
        msg = "--placement cannot honour:\n  " + "\n  ".join(lines)
        raise SettingsError(msg)
