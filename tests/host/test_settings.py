# SPDX-License-Identifier: Apache-2.0
"""One settings class: precedence of the sources, and errors that name key, value and what is allowed."""

from __future__ import annotations

import re

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_plugin import availability, flag_carrier
from tokenspeed_plugin.settings import (
    KEYS,
    ResolvedSettings,
    Settings,
    SettingsError,
    Source,
    resolve,
    resolve_in_process,
)

VALUES = {
    "scheduler": ("tokenspeed", "a.b.C", "vllm"),
    "kv_manager": ("flat", "vllm", "flat"),
    "kv_eviction": ("lru", "session", "lru"),
    "kv_store": ("host", "mooncake", "none"),
    "target_tps_per_user": (50, "60", 0.5),
    "target_overload": ("refuse", "degrade", "queue"),
    "step_time_profile": ("learnt.json", "other.json", "x"),
    "placement": ("auto", "attn=tp4,dense=tp4,moe=ep8", "off"),
    "kernels": ("mla=hopper,moe=reference", "auto", "off"),
}


def from_all_sources(key: str, *, skip: int) -> ResolvedSettings:
    """`key` named by each source but the `skip` strongest."""
    flag, environment, additional = VALUES[key]
    return resolve(
        {key: flag} if skip < 1 else {},
        {"TOKENSPEED_" + key.upper(): str(environment)} if skip < 2 else {},
        {"tokenspeed": {key: additional}} if skip < 3 else {"other_plugin": {}},
    )


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("skip", "source"),
    [(0, Source.FLAG), (1, Source.ENVIRONMENT), (2, Source.ADDITIONAL_CONFIG), (3, Source.DEFAULT)],
)
def test_the_strongest_source_wins_and_is_remembered(key: str, skip: int, source: Source) -> None:
    resolved = from_all_sources(key, skip=skip)
    default = Settings.model_fields[key].default
    expected = (*VALUES[key], default)[skip]
    assert getattr(resolved.values, key) == (float(expected) if key == "target_tps_per_user" else expected)
    assert resolved.source(key) is source
    assert all(resolved.source(other) is Source.DEFAULT for other in KEYS if other != key)


def test_a_bad_value_of_a_weaker_source_does_not_matter() -> None:
    assert resolve({"kv_store": "host"}, {"TOKENSPEED_KV_STORE": "tape"}, None).values.kv_store == "host"


@pytest.mark.parametrize(
    ("flags", "environment", "additional", "names"),
    [
        ({"kv_store": "tape"}, {}, None, ["--kv-store", "'tape'", "{none,host,mooncake}"]),
        ({}, {"TOKENSPEED_KV_MANAGER": "round"}, None, ["TOKENSPEED_KV_MANAGER", "'round'", "{vllm,flat}"]),
        (
            {},
            {},
            {"tokenspeed": {"placement": "attn=4"}},
            ['["tokenspeed"]["placement"]', "'attn=4'", "attn=tp4,dense=tp4"],
        ),
        ({"target_tps_per_user": -1}, {}, None, ["--target-tps-per-user", "-1", ">= 0"]),
        ({"target_tps_per_user": "nan"}, {}, None, ["--target-tps-per-user", "'nan'", ">= 0"]),
        ({"scheduler": "two words"}, {}, None, ["--scheduler", "'two words'", "{vllm,tokenspeed,dotted.path}"]),
        ({"scheduler": "a.b\n"}, {}, None, ["--scheduler", "a.b", "dotted.path"]),
        ({"kernels": "mla="}, {}, None, ["--kernels", "'mla='", "mla=NAME"]),
    ],
)
def test_a_bad_value_names_key_value_and_what_is_allowed(flags, environment, additional, names) -> None:
    with pytest.raises(SettingsError) as error:
        resolve(flags, environment, additional)
    assert [name for name in names if name not in str(error.value)] == []


@pytest.mark.parametrize(
    ("environment", "additional", "names"),
    [
        (
            {"TOKENSPEED_SCHEDULR": "tokenspeed"},
            None,
            ["TOKENSPEED_SCHEDULR='tokenspeed'", "did you mean TOKENSPEED_SCHEDULER?"],
        ),
        (
            {},
            {"tokenspeed": {"kvstore": "host"}},
            ['"kvstore"', "'host'", 'did you mean additional_config["tokenspeed"]["kv_store"]?'],
        ),
        ({}, {"tokenspeed": {"zzz": 1}}, ['"zzz"', "allowed: scheduler, kv_manager, kv_eviction, kv_store"]),
        ({}, {"tokenspeed": "flat"}, ["'flat'", "a dictionary of scheduler"]),
    ],
)
def test_a_bad_key_names_itself_and_the_nearest(environment, additional, names) -> None:
    with pytest.raises(SettingsError) as error:
        resolve({}, environment, additional)
    assert [name for name in names if name not in str(error.value)] == []


def test_variables_of_others_and_empty_ones_are_left_alone() -> None:
    environment = {
        "TOKENSPEED_MLA_DEBUG": "1",
        "TOKENSPEED_TRACES": "x",
        "TOKENSPEED_SCHEDULER": "",
        "SCHEDULER": "tokenspeed",
    }
    assert resolve({}, environment, None).values == Settings()


@settings(max_examples=60, deadline=None)
@given(st.text() | st.from_regex(r"[ab_.1]{1,6}", fullmatch=True))
def test_any_text_is_either_a_scheduler_or_a_named_error(text: str) -> None:
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", text, re.ASCII):
        assert resolve({"scheduler": text}, {}, None).values.scheduler == text
    else:
        with pytest.raises(SettingsError, match=re.escape(repr(text))):
            resolve({"scheduler": text}, {}, None)


def test_settings_are_frozen_and_closed() -> None:
    with pytest.raises(pydantic.ValidationError):
        Settings().scheduler = "tokenspeed"
    with pytest.raises(pydantic.ValidationError):
        Settings(speed="fast")


def test_flags_travel_by_environment_and_leave_additional_config_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    additional: dict[str, object] = {}
    flag_carrier.record("scheduler", "tokenspeed")
    flag_carrier.record("target_tps_per_user", 0.0)
    resolved = resolve_in_process(additional)
    assert (resolved.values.scheduler, resolved.source("scheduler")) == ("tokenspeed", Source.FLAG)
    assert resolved.values.target_tps_per_user == 0
    assert additional == {}
    flag_carrier.forget()
    assert resolve_in_process(additional).values == Settings()
    monkeypatch.setenv(flag_carrier.VARIABLE, "scheduler=tokenspeed")
    with pytest.raises(ValueError, match="TOKENSPEED_FLAGS='scheduler=tokenspeed' is not allowed"):
        resolve_in_process(additional)


@pytest.mark.parametrize("row", availability.UNAVAILABLE, ids=lambda row: row.key)
@pytest.mark.parametrize("source", [Source.FLAG, Source.ENVIRONMENT, Source.ADDITIONAL_CONFIG], ids=lambda s: s.value)
def test_what_this_version_lacks_is_refused_by_name_from_every_source(
    row: availability.Unavailable, source: Source
) -> None:
    value = VALUES[row.key][0]
    resolved = resolve(
        {row.key: value} if source is Source.FLAG else {},
        {"TOKENSPEED_" + row.key.upper(): str(value)} if source is Source.ENVIRONMENT else {},
        {"tokenspeed": {row.key: value}} if source is Source.ADDITIONAL_CONFIG else None,
    )
    with pytest.raises(SettingsError) as error:
        availability.require(resolved)
    assert str(error.value).startswith(f"{source.spelling(row.key)}: ")
    assert row.available in str(error.value)
    assert row.way_on in str(error.value)


def test_defaults_and_available_values_are_never_refused() -> None:
    flags = {"kv_manager": "vllm", "kv_store": "none", "target_tps_per_user": 0, "placement": "off", "kernels": "auto"}
    assert availability.refusals(resolve(flags, {}, None)) == []
    assert availability.refusals(resolve({}, {}, None)) == []
