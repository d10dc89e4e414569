# SPDX-License-Identifier: Apache-2.0
"""The settings of vLLM that the tokenspeed scheduler refuses or adjusts: one row each, taken out when the feature lands.

`docs/compatibility.md` lists every setting with what becomes of it; a test holds the two together.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenspeed_plugin.host.connectors import has_refused_child, is_refused

WAY_OUT = "or use `--scheduler vllm`"
SUPPORTED_SPECS = frozenset(
    {
        "FullAttentionSpec",
        "SlidingWindowSpec",
        "MLAAttentionSpec",
        "SlidingWindowMLASpec",
        "ChunkedLocalAttentionSpec",
        "MambaSpec",
    }
)


@dataclass(frozen=True)
class Refused:
    """A setting that stops the start.

    Attributes:
        setting: dotted path below `VllmConfig` (below `KVCacheConfig` in `KV_REFUSED`).
        is_asked: whether the value found there asks for the feature.
        what: the feature, in words.
        way_on: what to change.
        way_out: how to do without us.
        show: a value as the error shows it.
    """

    setting: str
    is_asked: Callable[[Any], bool]
    what: str
    way_on: str
    way_out: str = WAY_OUT
    show: Callable[[Any], str] | None = None

    def line(self, config: Any) -> str | None:
        """This row as a line of the error, None when `config` does not ask for the feature."""
        value = value_at(config, self.setting)
        if not self.is_asked(value):
            return None
        text = (self.show or shown)(value)
        return f"{self.setting}={text}: {self.what} is not supported yet; {self.way_on}, {self.way_out}"


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


@dataclass(frozen=True)
class RefusedTogether:
    """A setting that stops the start of a model with states (Mamba, GDN, KDA).

    Attributes:
        setting: dotted path below `VllmConfig`.
        other: dotted path of what says that the model has states.
        what: the feature, in words.
        way_on: what to change.
    """

    setting: str
    other: str
    what: str
    way_on: str

    def line(self, config: Any) -> str | None:
        """This row as a line of the error, None when `config` does not ask for both."""
        values = [value_at(config, path) for path in (self.setting, self.other)]
        if values[0] in (None, 1) or not values[1]:
            return None
        asked = ", ".join(f"{path}={value!r}" for path, value in zip((self.setting, self.other), values, strict=True))
        return f"{asked}: {self.what} for a model with states is not supported yet; {self.way_on}, {WAY_OUT}"


def value_at(config: Any, setting: str) -> Any:
    """The value at a dotted path, None when something on the way is not there."""
    for name in setting.split("."):
        config = getattr(config, name, None)
    return config


def shown(value: Any) -> str:
    """A value as an error shows it; KV cache groups by the kinds that are not supported."""
    kinds = unsupported_kinds(value, SUPPORTED_SPECS) if isinstance(value, (list, tuple)) else []
    return ", ".join(sorted(set(kinds))) or repr(value)


def is_set(value: Any) -> bool:
    """Whether there is a value."""
    return value is not None


def is_many(value: Any) -> bool:
    """Whether a number of ranks or the like is above one."""
    return value is not None and value > 1


def _has_unsupported_kind(groups: Any) -> bool:
    return bool(unsupported_kinds(groups, SUPPORTED_SPECS))


def unsupported_kinds(groups: Any, supported: frozenset[str]) -> list[str]:
    """Kinds of KV cache groups that are not among the supported ones, and such that replay prefixes."""
    specs = [spec for group in groups for spec in _layer_specs(getattr(group, "kv_cache_spec", None))]
    replayed = [
        f"{type(spec).__name__} with prefix replay" for spec in specs if getattr(spec, "prefix_replay_tokens", 0)
    ]
    replayed += [kind for spec in specs for kind in _unsupported_states(spec)]
    return replayed + [type(spec).__name__ for spec in specs if type(spec).__name__ not in supported]


def _unsupported_states(spec: Any) -> Iterator[str]:
    if (mode := getattr(spec, "mamba_cache_mode", "align")) not in ("align", "none"):
        yield f"{type(spec).__name__} in cache mode {mode!r}"
    if getattr(spec, "num_speculative_blocks", 0):
        yield f"{type(spec).__name__} with speculative decoding"


def _layer_specs(spec: Any) -> list[Any]:
    """A group's spec, or those of its layers when the group holds layers of unequal width."""
    return list(spec.kv_cache_specs.values()) if hasattr(spec, "kv_cache_specs") else [spec]


# fmt: off
REFUSED: tuple[Refused, ...] = (
    # KV cache
    Refused("cache_config.prefix_match_unit", is_set, "a match unit of its own", "leave out `--prefix-match-unit`"),
    Refused("cache_config.prefix_cache_retention_interval", lambda v: v != 0, "a retention interval", "leave it out"),
    Refused("kv_transfer_config.kv_connector", is_refused, "this KV connector", "choose another in `--kv-transfer-config`"),
    Refused("kv_transfer_config.kv_connector_extra_config", has_refused_child, "one of these KV connectors", "choose others"),
    Refused("ec_transfer_config.ec_connector", is_set, "an encoder-cache connector", "leave out `--ec-transfer-config`"),
    Refused("ec_manager_config.encoder_cache_manager_cls", is_set, "a custom encoder cache", "leave out `--ec-manager-config`"),
    Refused("attention_config.hisparse_config", is_set, "HiSparse", "leave it out of `--attention-config`"),
    # kinds of model
    Refused("model_config.is_encoder_decoder", bool, "an encoder-decoder model", "serve a decoder-only model"),
    Refused("model_config.is_diffusion", bool, "a diffusion model", "serve an autoregressive model"),
    Refused("is_mm_encoder_only", bool, "an encoder-only instance", "leave out `--mm-encoder-only`"),
    # features of requests
    Refused("num_prefill_lookahead_tokens", lambda v: bool(v) and v > 1, "a drafter of several MTP modules", "lower `num_speculative_tokens`"),
    Refused("aux_output_config.enable_return_routed_experts", bool, "auxiliary output", "leave out `--enable-return-routed-experts`"),
    # parallelism
    Refused("parallel_config.enable_elastic_ep", bool, "elastic expert parallelism", "leave out `--enable-elastic-ep`"),
)

_STATES = ("model_config.is_hybrid", "model_config.is_attention_free")

REFUSED_TOGETHER: tuple[RefusedTogether, ...] = (
    *(RefusedTogether("kv_transfer_config.kv_connector", kind, "a KV connector", "leave out `--kv-transfer-config`") for kind in _STATES),
    RefusedTogether("speculative_config.method", _STATES[0], "speculative decoding", "leave out `--speculative-config`"),
    RefusedTogether("parallel_config.decode_context_parallel_size", _STATES[0], "context parallelism", "leave it out"),
    RefusedTogether("parallel_config.prefill_context_parallel_size", _STATES[0], "context parallelism", "leave it out"),
)

# Known once the workers reported their layers, so only the scheduler can look.
KV_REFUSED: tuple[Refused, ...] = (
    Refused("kv_cache_groups", _has_unsupported_kind, "this kind of KV cache group", "serve a model with full or sliding-window attention"),
    Refused("hisparse_host_num_blocks", is_set, "HiSparse", "leave it out of `--attention-config`"),
)

ADJUSTED: tuple[Adjusted, ...] = (
    Adjusted("prefix_caching_hash_algo", "cache_config.prefix_caching_hash_algo", value="sha256",
             why="prefix keys are the plugin's own SHA-256 over a versioned encoding, the same in every process"),
)
# fmt: on
