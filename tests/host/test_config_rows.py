# SPDX-License-Identifier: Apache-2.0
"""The table of what is refused or adjusted: every row bites, and docs/compatibility.md leaves no setting of vLLM out."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import config as vllm_config_module
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from tokenspeed_plugin.host import config_gate, names
from tokenspeed_plugin.host.config_rows import (
    ADJUSTED,
    KV_REFUSED,
    REFUSED,
    REFUSED_TOGETHER,
    SUPPORTED_SPECS,
    Refused,
    RefusedTogether,
)
from tokenspeed_plugin.host.version import installed_version

pytestmark = pytest.mark.host_matrix

HOST = ".".join(str(installed_version()).split(".")[:2])
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/compatibility.md"
STATES = {"honoured", "adjusted", "refused", "outside"}
ONLY_IN_033 = {"cache_config.simple_cpu_offload_num_blocks"}

# Section of the page -> class whose every field it must list.
LISTED = {
    "scheduler_config": "SchedulerConfig",
    "cache_config": "CacheConfig",
    "parallel_config": "ParallelConfig",
    "kv_events_config": "KVEventsConfig",
    "observability_config": "ObservabilityConfig",
}


@dataclasses.dataclass(frozen=True)
class Row:
    settings: tuple[str, ...]
    state: str
    tests: str


def rows_of_page() -> list[Row]:
    rows, section = [], ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            heading = re.search(r"`([a-z_]+)`", line)
            section = f"{heading[1]}." if heading and heading[1] in LISTED else ""
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[1] in STATES:
            settings = tuple(section + name for name in re.findall(r"`([^`]+)`", cells[0]))
            rows.append(Row(settings, cells[1], cells[3]))
    return rows


def default_config() -> Any:
    """A `VllmConfig` with every sub-configuration that needs no model."""
    return VllmConfig()


def with_value(path: str, value: object) -> Any:
    """A configuration that has only `value`, at `path`, beside what the table wants to see."""
    root = SimpleNamespace(
        scheduler_config=SimpleNamespace(policy="fcfs", async_scheduling=False),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256", prefix_cache_retention_interval=0),
    )
    *parents, last = path.split(".")
    owner = root
    for name in parents:
        owner = vars(owner).setdefault(name, SimpleNamespace())
    setattr(owner, last, value)
    return root


def asking_value(row: Refused) -> object:
    refused = "HiSparseConnector"
    values = (True, 2, "some", False, None, refused, {"connectors": [{"kv_connector": refused}]})
    return next(value for value in values if row.is_asked(value))


def test_a_default_configuration_is_not_refused() -> None:
    config = default_config()
    config.scheduler_config.async_scheduling = False
    assert config_gate.refusals(config) == []
    config_gate.check(config)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.setting)
def test_each_row_refuses_by_name_and_says_how_to_go_on(row: Refused) -> None:
    value = asking_value(row)
    config = with_value(row.setting, value)
    (line,) = config_gate.refusals(config)
    assert line.startswith(f"{row.setting}={value!r}: ")
    assert row.way_on in line
    with pytest.raises(config_gate.ConfigRefusedError, match=re.escape(line)):
        config_gate.check(config)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.setting)
def test_each_row_looks_at_something_that_vllm_has(row: Refused) -> None:
    owner: Any = VllmConfig
    *parents, last = row.setting.split(".")
    for name in parents:
        (field,) = (f for f in dataclasses.fields(owner) if f.name == name)
        (class_name,) = re.findall(r"[A-Z]\w+Config", str(field.type))[:1]
        owner = getattr(vllm_config_module, class_name)
    names_there = {f.name for f in dataclasses.fields(owner)} | set(dir(owner))
    assert last in names_there or (row.setting in ONLY_IN_033 and HOST == "0.32")


@pytest.mark.parametrize("row", ADJUSTED, ids=lambda row: row.argument)
def test_each_adjustment_is_made_and_checked_again(row) -> None:
    assert row.argument in {f.name for f in dataclasses.fields(EngineArgs)}
    arguments = SimpleNamespace(**{r.argument: r.value for r in ADJUSTED} | {row.argument: "other"})
    assert config_gate.adjust(arguments) == [row]
    assert getattr(arguments, row.argument) == row.value
    assert config_gate.adjust(arguments) == []
    (line,) = config_gate.refusals(with_value(row.setting, "other"))
    assert line.startswith(f"{row.setting}='other': {row.why}")


def group(spec: object) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_spec=spec)


def kv_config(*specs: object, hisparse: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_groups=[group(spec) for spec in specs], hisparse_host_num_blocks=hisparse)


def bare(spec_class: type, **values: object) -> object:
    spec = object.__new__(spec_class)
    for name, value in values.items():
        object.__setattr__(spec, name, value)
    return spec


def test_kv_cache_groups_of_other_kinds_are_refused() -> None:
    config = with_value("model_config.is_hybrid", value=False)
    full, window, other = bare(names.FullAttentionSpec), bare(names.SlidingWindowSpec), bare(names.CrossAttentionSpec)
    assert {"FullAttentionSpec", "SlidingWindowSpec"} <= SUPPORTED_SPECS
    assert config_gate.refusals(config, kv_config(full, window)) == []
    (line,) = config_gate.refusals(config, kv_config(full, other, other))
    assert line.startswith("kv_cache_groups=CrossAttentionSpec: ")
    mixed = bare(names.UniformTypeKVCacheSpecs, kv_cache_specs={"a": full, "b": bare(names.SinkFullAttentionSpec)})
    (line,) = config_gate.refusals(config, kv_config(mixed))
    assert line.startswith("kv_cache_groups=SinkFullAttentionSpec: ")
    replaying = type("SlidingWindowMLASpec", (), {"prefix_replay_tokens": 128})()
    (line,) = config_gate.refusals(config, kv_config(replaying))
    assert line.startswith("kv_cache_groups=SlidingWindowMLASpec with prefix replay: ")
    (line,) = config_gate.refusals(config, kv_config(full, hisparse=4))
    assert line.startswith("hisparse_host_num_blocks=4: ")


@pytest.mark.parametrize("mode", ["align", "none"])
def test_states_are_taken_as_vllm_places_them(mode: str) -> None:
    config = with_value("model_config.is_hybrid", value=True)
    placed = {"mamba_cache_mode": mode, "num_speculative_blocks": 0}
    assert config_gate.refusals(config, kv_config(bare(names.MambaSpec, **placed))) == []
    (line,) = config_gate.refusals(config, kv_config(bare(names.MambaSpec, **placed | {"mamba_cache_mode": "all"})))
    assert line.startswith("kv_cache_groups=MambaSpec in cache mode 'all': ")
    (line,) = config_gate.refusals(config, kv_config(bare(names.MambaSpec, **placed | {"num_speculative_blocks": 2})))
    assert line.startswith("kv_cache_groups=MambaSpec with speculative decoding: ")


@pytest.mark.parametrize("row", REFUSED_TOGETHER, ids=lambda row: f"{row.setting} with {row.other}")
def test_two_settings_are_refused_only_together(row: RefusedTogether) -> None:
    value = 2 if row.setting.startswith("parallel_config") else "ngram"
    config = with_value(row.setting, value)
    assert [line for line in config_gate.refusals(config) if row.other in line] == []
    owner, _, last = row.other.rpartition(".")
    vars(config).setdefault(owner, SimpleNamespace())
    setattr(getattr(config, owner), last, True)
    (line,) = [line for line in config_gate.refusals(config) if row.other in line]
    assert line.startswith(f"{row.setting}={value!r}, {row.other}=True: {row.what}")
    assert row.way_on in line


def test_kv_rows_look_at_fields_that_vllm_has() -> None:
    fields = {f.name for f in dataclasses.fields(names.KVCacheConfig)}
    assert {row.setting for row in KV_REFUSED} <= fields
    assert all(hasattr(names, spec) for spec in SUPPORTED_SPECS)


def listed(setting: str, settings: set[str]) -> bool:
    parts = setting.split(".")
    return setting in settings or any(".".join(parts[:n]) + ".*" in settings for n in range(1, len(parts)))


def test_the_page_lists_every_setting_of_the_installed_vllm() -> None:
    settings = {name for row in rows_of_page() for name in row.settings}
    fields = {
        f"{section}.{field.name}"
        for section, class_name in LISTED.items()
        for field in dataclasses.fields(getattr(vllm_config_module, class_name))
    }
    top_level = {field.name for field in dataclasses.fields(VllmConfig)} - set(LISTED)
    assert sorted(name for name in fields if not listed(name, settings)) == []
    assert sorted(name for name in top_level if not listed(name, settings) and not listed(f"{name}.x", settings)) == []
    exact = {name for name in settings if name.partition(".")[0] in LISTED and not name.endswith(".*")}
    assert exact - fields <= ONLY_IN_033


def test_the_page_and_the_table_agree() -> None:
    states: dict[str, set[str]] = {state: set() for state in STATES}
    for row in rows_of_page():
        states[row.state] |= set(row.settings)
    assert [row.setting for row in REFUSED if not listed(row.setting, states["refused"])] == []
    assert [row.setting for row in ADJUSTED if row.setting not in states["adjusted"]] == []
    assert len(states["adjusted"]) == len(ADJUSTED)
    table = {row.setting for row in REFUSED}
    unbacked = {
        name
        for name in states["refused"]
        if name not in table and not any(setting.startswith(name.removesuffix("*")) for setting in table)
    }
    # Parts of a feature whose main switch has the row.
    assert unbacked == {"diffusion_config.*"}
    assert set.intersection(states["honoured"], states["refused"]) == set()


def test_no_setting_is_listed_twice_and_every_test_exists() -> None:
    rows = rows_of_page()
    settings = [name for row in rows for name in row.settings]
    assert len(settings) == len(set(settings))
    assert [row.tests for row in rows if row.tests != "-" and not (ROOT / row.tests).exists()] == []
