# SPDX-License-Identifier: Apache-2.0
"""The one settings class: what can be asked of the plugin, where each value came from, and what is wrong with a bad one.

Sources by precedence: flag, environment `TOKENSPEED_*`, `additional_config["tokenspeed"]`, default. Flags reach engine-core and
worker processes through `flag_carrier`, never through `additional_config`: vLLM hashes that into its compile-cache key.
"""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from tokenspeed_plugin import flag_carrier

ENVIRONMENT_PREFIX = "TOKENSPEED_"
ADDITIONAL_CONFIG_KEY = "tokenspeed"

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_DEGREE = r"(?:tp|ep|dp)[1-9][0-9]*"
_SCHEDULER = rf"{_NAME}(?:\.{_NAME})*"
_PLACED = (
    rf"(?:(?:attn|dense|moe)={_DEGREE}|residual=(?:auto|replicated|sharded)|fusion=(?:auto|off|reference)"
    r"|overlap=(?:off|on|reference))"
)
_PLACEMENT = rf"(?:off|auto(?:,{_PLACED})*|{_PLACED}(?:,{_PLACED})*)"
_CHOSEN_KERNEL = r"(?:mla|append|linear|moe)=[A-Za-z0-9_.-]+"
_KERNELS = rf"(?:off|auto|{_CHOSEN_KERNEL}(?:,{_CHOSEN_KERNEL})*)"


class SettingsError(ValueError):
    """A key or value that cannot be; the message names key, value, where it came from and what is allowed."""


class Source(str, Enum):
    """Where a value came from, strongest first."""

    FLAG = "flag"
    ENVIRONMENT = "environment"
    ADDITIONAL_CONFIG = "additional_config"
    DEFAULT = "default"

    def spelling(self, key: str) -> str:
        """How a user writes `key` in this source."""
        if self is Source.ENVIRONMENT:
            return ENVIRONMENT_PREFIX + key.upper()
        if self is Source.ADDITIONAL_CONFIG:
            return f'additional_config["{ADDITIONAL_CONFIG_KEY}"]["{key}"]'
        return "--" + key.replace("_", "-")


def _text(pattern: str) -> Any:
    return StringConstraints(pattern=rf"^{pattern}$")


class Settings(BaseModel):
    """Everything that can be asked of the plugin; the defaults leave vLLM as it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scheduler: Annotated[str, _text(_SCHEDULER)] = Field(
        "vllm",
        description="Scheduler of the engine core: vLLM's own, the C++ FSM scheduler with flat KV, or the class at a dotted path.",
        json_schema_extra={"allowed": "{vllm,tokenspeed,dotted.path}"},
    )
    kv_manager: Literal["vllm", "flat"] = Field(
        "vllm",
        description="KV cache manager under vLLM's own scheduler.",
        json_schema_extra={"allowed": "{vllm,flat}"},
    )
    kv_eviction: Annotated[str, _text(_NAME)] = Field(
        "session",
        description="Which cached KV blocks of the flat KV manager are given up first.",
        json_schema_extra={"allowed": "{session,lru,name of a hook tokenspeed_eviction_policies}"},
    )
    kv_store: Literal["none", "host", "mooncake"] = Field(
        "none",
        description="Tier behind GPU memory for retraction and prefix reuse.",
        json_schema_extra={"allowed": "{none,host,mooncake}"},
    )
    target_tps_per_user: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Output tokens per second that the scheduler keeps for every user; 0 is off.",
        json_schema_extra={"allowed": "a number of tokens per second >= 0 (0 = off)"},
    )
    target_overload: Literal["queue", "refuse", "degrade"] = Field(
        "queue",
        description="What becomes of requests that the rates of users have no room for: they wait, end with an error, or run.",
        json_schema_extra={"allowed": "{queue,refuse,degrade}"},
    )
    step_time_profile: str = Field(
        "",
        description="File with the times of steps that an earlier run learnt: read at start-up, kept up to date. Empty: none.",
        json_schema_extra={"allowed": "{FILE}, a path in a folder that exists"},
    )
    placement: Annotated[str, _text(_PLACEMENT)] = Field(
        "off",
        description="Compiled parallelism: vLLM's layers, with the collectives of a verified plan.",
        json_schema_extra={"allowed": "{off,auto,SPEC}, SPEC such as attn=tp4,dense=tp4,moe=ep4,residual=sharded"},
    )
    kernels: Annotated[str, _text(_KERNELS)] = Field(
        "off",
        description="Selection of kernels: MLA, linear layers of few tokens.",
        json_schema_extra={"allowed": "{off,auto,SPEC}, SPEC such as mla=NAME,append=NAME,linear=NAME"},
    )


KEYS: tuple[str, ...] = tuple(Settings.model_fields)


def allowed(key: str) -> str:
    """The values that `key` takes, as shown in help texts and errors."""
    extra = Settings.model_fields[key].json_schema_extra
    return str(extra["allowed"]) if isinstance(extra, dict) else ""


@dataclass(frozen=True)
class ResolvedSettings:
    """Validated settings and the source of each value."""

    values: Settings
    sources: Mapping[str, Source]

    def source(self, key: str) -> Source:
        """Where the value of `key` came from."""
        return self.sources[key]


def parse_value(key: str, value: object, source: Source) -> Any:
    """`value` validated as setting `key`.

    Raises:
        SettingsError: the value is not allowed.
    """
    try:
        return getattr(Settings.model_validate({key: value}), key)
    except ValidationError as error:
        msg = f"{source.spelling(key)}: {value!r} is not allowed; allowed: {allowed(key)}"
        raise SettingsError(msg) from error


def resolve(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    additional_config: object,
) -> ResolvedSettings:
    """Settings of the strongest source that names each key.

    Args:
        flags: values given on the command line, by key.
        environ: environment variables; empty values count as unset.
        additional_config: vLLM's `additional_config`.

    Raises:
        SettingsError: an unknown key, or a value that is not allowed.
    """
    found: tuple[tuple[Source, Mapping[str, object]], ...] = (
        (Source.FLAG, _known(flags, Source.FLAG)),
        (Source.ENVIRONMENT, from_environment(environ)),
        (Source.ADDITIONAL_CONFIG, from_additional_config(additional_config)),
    )
    values: dict[str, object] = {}
    sources = dict.fromkeys(KEYS, Source.DEFAULT)
    for key in KEYS:
        for source, given in found:
            if key in given:
                values[key] = parse_value(key, given[key], source)
                sources[key] = source
                break
    return ResolvedSettings(Settings.model_validate(values), sources)


def resolve_in_process(additional_config: object = None) -> ResolvedSettings:
    """Settings as this process sees them: works alike in the API server, the engine core and the workers."""
    return resolve(flag_carrier.recorded(), os.environ, additional_config)


def from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    """The settings among the environment variables.

    Other `TOKENSPEED_*` variables belong to others (the tokenspeed-mla kernels read some) and are left alone, unless one is so
    close to a setting that it must be a typing error.
    """
    given: dict[str, object] = {}
    for name, value in environ.items():
        if not name.startswith(ENVIRONMENT_PREFIX) or not value:
            continue
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        if key in KEYS:
            given[key] = value
        elif name != flag_carrier.VARIABLE and nearest_key(key, cutoff=0.8):
            raise SettingsError(_unknown_key(name, value, key, Source.ENVIRONMENT))
    return given


def from_additional_config(additional_config: object) -> dict[str, object]:
    """The settings under `additional_config["tokenspeed"]`."""
    if not isinstance(additional_config, Mapping) or ADDITIONAL_CONFIG_KEY not in additional_config:
        return {}
    given = additional_config[ADDITIONAL_CONFIG_KEY]
    if not isinstance(given, Mapping):
        msg = f'additional_config["{ADDITIONAL_CONFIG_KEY}"]: {given!r} is not allowed; allowed: a dictionary of {", ".join(KEYS)}'
        raise SettingsError(msg)
    return _known(given, Source.ADDITIONAL_CONFIG)


def nearest_key(key: str, cutoff: float = 0.6) -> str | None:
    """The setting that `key` was probably meant to be."""
    return next(iter(difflib.get_close_matches(key, KEYS, n=1, cutoff=cutoff)), None)


def _known(given: Mapping[str, object], source: Source) -> dict[str, object]:
    for key, value in given.items():
        if key not in KEYS:
            raise SettingsError(_unknown_key(source.spelling(str(key)), value, str(key), source))
    return dict(given)


def _unknown_key(spelling: str, value: object, key: str, source: Source) -> str:
    nearest = nearest_key(key)
    hint = f" (did you mean {source.spelling(nearest)}?)" if nearest else ""
    known = ", ".join(source.spelling(k) for k in KEYS) if source is Source.ENVIRONMENT else ", ".join(KEYS)
    return f"{spelling}={value!r}: no such setting{hint}; allowed: {known}"
