# SPDX-License-Identifier: Apache-2.0
"""Fault 17 (vllm #48277): a plugin's register() raises, the exception is dropped, and the server starts as something else."""

from __future__ import annotations

import logging
import sys

import pytest
from plugin_fixtures import clean_environment

from tokenspeed_plugin import __version__
from tokenspeed_plugin.entry_points.general import register
from tokenspeed_plugin.host import registration

__all__ = ["clean_environment"]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    def fail(*_: object) -> None:
        message = "No module named 'vllm.v9'"
        raise ModuleNotFoundError(message)

    monkeypatch.setattr(registration, "install", fail)
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "model"])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return caplog


def test_the_log_names_plugin_version_and_cause(log: pytest.LogCaptureFixture) -> None:
    register()
    assert {(record.levelno, record.getMessage()) for record in log.records} == {
        (logging.ERROR, f"tokenspeed-plugin {__version__} (vLLM plugin 'tokenspeed') failed to register and is off.")
    }
    assert "ModuleNotFoundError: No module named 'vllm.v9'" in log.text
    assert "Traceback" in log.text


@pytest.mark.parametrize("asked_by", ["VLLM_PLUGINS", "TOKENSPEED_SCHEDULER", "argv"])
def test_it_fails_when_it_was_asked_for_by_name(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, asked_by: str
) -> None:
    if asked_by == "argv":
        monkeypatch.setattr(sys, "argv", ["vllm", "serve", "model", "--scheduler=tokenspeed"])
    else:
        monkeypatch.setenv(asked_by, "lora_resolver,tokenspeed")
    with pytest.raises(ModuleNotFoundError, match=r"vllm\.v9"):
        register()
    assert len({record.getMessage() for record in log.records}) == 1
