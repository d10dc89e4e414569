# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests of registration, flags and the host: settings and patches of one test stay out of the next."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenspeed_plugin import flag_carrier

QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_TARGET_DEVICE": "cpu"}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [n for n in os.environ if n.startswith("TOKENSPEED_")]:
        monkeypatch.delenv(name)
    yield
    flag_carrier.forget()


@pytest.fixture
def stock_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM without our patches, put back as it was found afterwards."""
    import vllm.v1.engine.core as core
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.metrics.loggers import StatLoggerManager

    def unwrapped(function: object) -> object:
        while hasattr(function, "__tokenspeed_patch__"):
            function = function.__wrapped__
        return function

    monkeypatch.setattr(EngineArgs, "add_cli_args", staticmethod(unwrapped(EngineArgs.add_cli_args)))
    monkeypatch.setattr(EngineArgs, "create_engine_config", unwrapped(EngineArgs.create_engine_config))
    monkeypatch.setattr(StatLoggerManager, "__init__", unwrapped(StatLoggerManager.__init__))
    monkeypatch.setattr(core, "get_request_block_hasher", unwrapped(core.get_request_block_hasher))


@pytest.fixture
def entry_point(tmp_path: Path) -> str:
    """A folder for the path that makes vLLM find the plugin, as an installed package would; empty when it is installed."""
    if any(entry.name == "tokenspeed" for entry in entry_points(group="vllm.general_plugins")):
        return ""
    info = tmp_path / "site" / "tokenspeed_plugin-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tokenspeed-plugin\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ntokenspeed = tokenspeed_plugin.entry_points.general:register\n"
    )
    return str(info.parent)


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script in a fresh interpreter, on the same vLLM as this one."""

    def run(script: str, *arguments: str, extra_path: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(p for p in (extra_path, *sys.path) if p)
        return subprocess.run(
            [sys.executable, "-c", script, *arguments],
            env={**os.environ, **QUIET, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    return run


def changed(config: SimpleNamespace, changes: Mapping[str, Any]) -> SimpleNamespace:
    """The configuration with values set by dotted path; parts on the way that are missing are made."""
    for path, value in changes.items():
        *owners, name = path.split(".")
        owner = config
        for step in owners:
            if getattr(owner, step, None) is None:
                setattr(owner, step, SimpleNamespace())
            owner = getattr(owner, step)
        setattr(owner, name, value)
    return config
