# SPDX-License-Identifier: Apache-2.0
"""The example plugin of docs/kernels.md, run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kernel_fixtures import BF16, HOPPER

from tokenspeed_plugin.hooks.plugin_manager import plugin_manager
from tokenspeed_plugin.kernels import registry as registry_module
from tokenspeed_plugin.kernels.registry import Registry, default_registry
from tokenspeed_plugin.kernels.select import KernelRequest, select_kernel

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch):
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    plugin = names["MyKernels"]()
    monkeypatch.setattr(registry_module, "_registry", Registry())
    monkeypatch.setattr(registry_module, "_loaded", False)
    plugin_manager().register(plugin)
    yield plugin
    plugin_manager().unregister(plugin)


@pytest.mark.parametrize(("page_tokens", "chosen"), [(64, True), (128, False)])
def test_the_example_is_selected_where_it_fits(plugin: object, page_tokens: int, chosen: bool) -> None:
    shape = {"heads": 16, "query_tokens": 1, "page_tokens": page_tokens, "requests": 1, "context_tokens": 4096}
    request = KernelRequest("mla", "decode", BF16, shape, HOPPER)
    selection = select_kernel(request, registry=default_registry())
    assert (selection.spec.solution == "mine") is chosen
    if not chosen:
        reasons = {r.solution: r.reason for r in selection.rejections}
        assert reasons["mine"] == "page_tokens=128, allowed: 64"
