# SPDX-License-Identifier: Apache-2.0
"""What every test gets, and the order of the files."""

import importlib
import logging
import os
from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with real models take minutes: they go first, so that none is left for one worker alone at the end."""
    items.sort(key=lambda item: item.get_closest_marker("real_vllm") is None)


@pytest.fixture(autouse=True)
def _environment_of_its_own() -> Iterator[None]:
    """The scheduler harness chooses vLLM's runner through the environment; servers that later tests start must not inherit it."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """With what vLLM and the plugin log, whatever level the environment asked for when this process first imported vLLM."""
    importlib.import_module("vllm.logger")  # sets up logging; after this fixture it would undo the lines below
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="vllm")
    return caplog
