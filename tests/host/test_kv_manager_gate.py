# SPDX-License-Identifier: Apache-2.0
"""`--kv-manager flat`: every way of asking reaches vLLM's scheduler with our manager, and what cannot be is refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_config_rows import with_value
from test_engine_gate import Original, arguments, honoured_config
from vllm.v1.core.sched import scheduler as vllm_scheduler

from tokenspeed_plugin import flag_carrier
from tokenspeed_plugin.host import config_gate, hosted_rows, patches
from tokenspeed_plugin.host.config_gate import ConfigRefusedError
from tokenspeed_plugin.host.config_rows import Refused
from tokenspeed_plugin.host.engine_gate import create_engine_config
from tokenspeed_plugin.host.schedulers import FLAT_KV_PATHS, TOKENSPEED_PATH
from tokenspeed_plugin.settings import SettingsError

pytestmark = pytest.mark.host_matrix

PAGE = Path(__file__).resolve().parents[2] / "docs/compatibility.md"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("route", ["flag", "environment", "additional_config"])
def test_every_way_of_asking_sets_the_class(monkeypatch: pytest.MonkeyPatch, route: str, is_async: bool) -> None:
    args = arguments()
    if route == "flag":
        flag_carrier.record("kv_manager", "flat")
    elif route == "environment":
        monkeypatch.setenv("TOKENSPEED_KV_MANAGER", "flat")
    else:
        args.additional_config = {"tokenspeed": {"kv_manager": "flat"}}
    original = Original(**honoured_config(async_scheduling=is_async))
    config = create_engine_config(original, args)
    assert original.seen["scheduler_cls"] is None, "vLLM itself makes its configuration as always"
    assert config.scheduler_config.scheduler_cls == FLAT_KV_PATHS[is_async]


def test_asking_for_vllms_changes_nothing() -> None:
    flag_carrier.record("kv_manager", "vllm")
    original = Original(**honoured_config())
    config = create_engine_config(original, arguments())
    assert not hasattr(config.scheduler_config, "scheduler_cls")


def test_under_our_scheduler_it_is_there_anyway() -> None:
    flag_carrier.record("kv_manager", "flat")
    original = Original(**honoured_config())
    create_engine_config(original, arguments(scheduler_cls="tokenspeed"))
    assert original.seen["scheduler_cls"] == TOKENSPEED_PATH


@pytest.mark.parametrize("given", [SimpleNamespace, "types.SimpleNamespace"])
def test_another_scheduler_keeps_its_own_manager(given: Any) -> None:
    flag_carrier.record("kv_manager", "flat")
    with pytest.raises(
        SettingsError, match=r"--kv-manager: 'flat' does not go with SimpleNamespace; allowed: vllm, or"
    ):
        create_engine_config(Original(**honoured_config()), arguments(scheduler_cls=given))


def asking_value(row: Refused) -> object:
    refused = "HiSparseConnector"
    values = (True, 2, "some", False, None, refused, {"connectors": [{"kv_connector": refused}]})
    return next(value for value in values if row.is_asked(value))


@pytest.mark.parametrize("row", hosted_rows.REFUSED, ids=lambda row: row.setting)
def test_each_row_refuses_by_name_at_start_up(row: Refused) -> None:
    value = asking_value(row)
    flag_carrier.record("kv_manager", "flat")
    config = with_value(row.setting, value)
    line = f"{row.setting}={value!r}: {row.what} is not supported yet; {row.way_on}, or leave out `--kv-manager flat`"
    with pytest.raises(ConfigRefusedError, match=re.escape(line)):
        create_engine_config(Original(**vars(config)), arguments())


def test_state_groups_are_refused_by_their_kind() -> None:
    groups = [SimpleNamespace(kv_cache_spec=type("MambaSpec", (), {})())]
    with pytest.raises(ConfigRefusedError, match="kv_cache_groups=MambaSpec: this kind of KV cache group"):
        config_gate.check_kv_manager(
            with_value("x", 1), SimpleNamespace(kv_cache_groups=groups, hisparse_host_num_blocks=None)
        )


def test_the_page_lists_what_is_refused() -> None:
    section = PAGE.read_text().split("## vLLM's settings under `--kv-manager flat`")[1].split("\n## ")[0]
    rows = {
        cells[1].strip(" `"): cells[2].strip()
        for cells in (line.split("|") for line in section.splitlines())
        if len(cells) == 4
    }
    wanted = {row.setting: row.what for row in (*hosted_rows.REFUSED, *hosted_rows.KV_REFUSED)}
    assert {setting: rows.get(setting) for setting in wanted} == wanted


def test_the_patch_lasts_as_long_as_the_construction() -> None:
    original = vllm_scheduler.KVCacheManager
    with patches.kv_manager(lambda **given: given):
        assert patches.KV_MANAGER.is_installed
        assert vllm_scheduler.KVCacheManager(watermark=0.5) == {"watermark": 0.5}
    assert vllm_scheduler.KVCacheManager is original
    with pytest.raises(ZeroDivisionError), patches.kv_manager(lambda: 1 // 0):
        vllm_scheduler.KVCacheManager()
    assert vllm_scheduler.KVCacheManager is original
    assert not patches.KV_MANAGER.is_installed
