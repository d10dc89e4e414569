# SPDX-License-Identifier: Apache-2.0
"""The settings of vLLM that the tokenspeed scheduler refuses or adjusts: one row each, taken out when the feature lands.

`docs/compatibility.md` lists every setting with what becomes of it; a test holds the two together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenspeed_plugin.host.connectors import has_refused_child, is_refused

WAY_OUT = "or use `--scheduler vllm`"
SUPPORTED_SPECS = frozenset({"FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec", "SlidingWindowMLASpec"})


@dataclass(frozen=True)
class Refused:
    """A setting that stops the start.

    Attributes:
        setting: dotted path below `VllmConfig` (below `KVCacheConfig` in `KV_REFUSED`).
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
        return f"{self.setting}={shown(value)}: {self.what} is not supported yet; {self.way_on}, {WAY_OUT}"


@dataclass(frozen=True)
class Adjusted:
    """A setting of `EngineArgs` that is changed, with a warning, before the configuration is made.

    Attributes:
        argument: field of `EngineArgs`.
        setting: where its value ends, as a dotted path below `VllmConfig`.
        value: what it is set to.
        why: what the warning says.
    """

    argument: str
    setting: str
    value: Any
    why: str

    def line(self, config: Any) -> str | None:
        """This row as a line of the error, None when `config` has the value."""
        value = value_at(config, self.setting)
        return (
            None
            if value == self.value
            else f"{self.setting}={value!r}: {self.why}; set it to {self.value!r}, {WAY_OUT}"
        )


def value_at(config: Any, setting: str) -> Any:
    """The value at a dotted path, None when something on the way is not there."""
    for name in setting.split("."):
        config = getattr(config, name, None)
    return config


def shown(value: Any) -> str:
    """A value as an error shows it; KV cache groups by the kinds that are not supported."""
    kinds = _unsupported_kinds(value) if isinstance(value, (list, tuple)) else []
    return ", ".join(sorted(set(kinds))) or repr(value)


def _is_set(value: Any) -> bool:
    return value is not None


def _is_many(value: Any) -> bool:
    return value is not None and value > 1


def _has_unsupported_kind(groups: Any) -> bool:
    return bool(_unsupported_kinds(groups))


def _unsupported_kinds(groups: Any) -> list[str]:
    specs = [spec for group in groups for spec in _layer_specs(getattr(group, "kv_cache_spec", None))]
    replayed = [
        f"{type(spec).__name__} with prefix replay" for spec in specs if getattr(spec, "prefix_replay_tokens", 0)
    ]
    return replayed + [type(spec).__name__ for spec in specs if type(spec).__name__ not in SUPPORTED_SPECS]


def _layer_specs(spec: Any) -> list[Any]:
    """A group's spec, or those of its layers when the group holds layers of unequal width."""
    return list(spec.kv_cache_specs.values()) if hasattr(spec, "kv_cache_specs") else [spec]


# fmt: off
REFUSED: tuple[Refused, ...] = (
    # KV cache
    Refused("cache_config.prefix_match_unit", _is_set, "a match unit of its own", "leave out `--prefix-match-unit`"),
    Refused("cache_config.prefix_cache_retention_interval", lambda v: v != 0, "a retention interval", "leave it out"),
    Refused("kv_transfer_config.kv_connector", is_refused, "this KV connector", "choose another in `--kv-transfer-config`"),
    Refused("kv_transfer_config.kv_connector_extra_config", has_refused_child, "one of these KV connectors", "choose others"),
    Refused("ec_transfer_config.ec_connector", _is_set, "an encoder-cache connector", "leave out `--ec-transfer-config`"),
    Refused("ec_manager_config.encoder_cache_manager_cls", _is_set, "a custom encoder cache", "leave out `--ec-manager-config`"),
    Refused("attention_config.hisparse_config", _is_set, "HiSparse", "leave it out of `--attention-config`"),
    # kinds of model
    Refused("model_config.is_encoder_decoder", bool, "an encoder-decoder model", "serve a decoder-only model"),
    Refused("model_config.is_diffusion", bool, "a diffusion model", "serve an autoregressive model"),
    Refused("is_mm_encoder_only", bool, "an encoder-only instance", "leave out `--mm-encoder-only`"),
    Refused("model_config.is_hybrid", bool, "a model with state layers (Mamba, GDN, KDA)", "serve an attention model"),
    # features of requests
    Refused("num_prefill_lookahead_tokens", lambda v: bool(v) and v > 1, "a drafter of several MTP modules", "lower `num_speculative_tokens`"),
    Refused("aux_output_config.enable_return_routed_experts", bool, "auxiliary output", "leave out `--enable-return-routed-experts`"),
    # parallelism
    Refused("parallel_config.enable_elastic_ep", bool, "elastic expert parallelism", "leave out `--enable-elastic-ep`"),
)

# Known once the workers reported their layers, so only the scheduler can look.
KV_REFUSED: tuple[Refused, ...] = (
    Refused("kv_cache_groups", _has_unsupported_kind, "this kind of KV cache group", "serve a model with full or sliding-window attention"),
    Refused("hisparse_host_num_blocks", _is_set, "HiSparse", "leave it out of `--attention-config`"),
)

ADJUSTED: tuple[Adjusted, ...] = (
    Adjusted("prefix_caching_hash_algo", "cache_config.prefix_caching_hash_algo", value="sha256",
             why="prefix keys are the plugin's own SHA-256 over a versioned encoding, the same in every process"),
)
# fmt: on
