# SPDX-License-Identifier: Apache-2.0
"""The table of KV connectors: vLLM's registry, the page and the rows say the same, and a refused one stops the start by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from vllm.config import CacheConfig, VllmConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from tokenspeed_plugin.host import config_gate
from tokenspeed_plugin.host.connectors import CONNECTORS

pytestmark = pytest.mark.host_matrix

PAGE = Path(__file__).resolve().parents[2] / "docs/compatibility.md"


def rows_of_page() -> dict[str, tuple[bool, str]]:
    section = PAGE.read_text().partition("### KV connectors\n")[2].partition("\n### ")[0]
    rows = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[1] in {"supported", "refused"}:
            rows |= dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), (cells[1] == "supported", cells[2]))
    return rows


def config_with(connector: KVTransferConfig) -> VllmConfig:
    config = VllmConfig()
    config.scheduler_config.async_scheduling = False
    config.kv_transfer_config = connector
    return config


def test_every_registered_connector_has_a_row() -> None:
    assert {row.name for row in CONNECTORS} == set(KVConnectorFactory._registry)
    assert len(CONNECTORS) == len({row.name for row in CONNECTORS})


def test_the_page_and_the_table_agree() -> None:
    page = rows_of_page()
    assert {name: supported for name, (supported, _) in page.items()} == {r.name: r.is_supported for r in CONNECTORS}
    assert [row.name for row in CONNECTORS if row.why and row.why != page[row.name][1]] == []


@pytest.mark.parametrize("row", CONNECTORS, ids=lambda row: row.name)
def test_a_refused_connector_is_named(row) -> None:
    lines = config_gate.refusals(config_with(KVTransferConfig(kv_connector=row.name, kv_role="kv_both")))
    child = {"connectors": [{"kv_connector": row.name, "kv_role": "kv_both"}]}
    multi = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=child)
    inner = config_gate.refusals(config_with(multi))
    if row.is_supported:
        assert lines == inner == []
        return
    assert [line.partition(":")[0] for line in lines] == [f"kv_transfer_config.kv_connector='{row.name}'"]
    assert len(inner) == 1
    assert row.name in inner[0]


def test_a_class_of_ones_own_is_taken() -> None:
    own = KVTransferConfig(kv_connector="MyConnector", kv_connector_module_path="my.module", kv_role="kv_both")
    assert config_gate.refusals(config_with(own)) == []


def test_native_offloading_becomes_a_connector_that_is_supported() -> None:
    config = VllmConfig(cache_config=CacheConfig(kv_offloading_size=1.0, kv_offloading_backend="native"))
    config.scheduler_config.async_scheduling = False
    assert config.kv_transfer_config is not None
    assert config.kv_transfer_config.kv_connector == "OffloadingConnector"
    assert config_gate.refusals(config) == []
