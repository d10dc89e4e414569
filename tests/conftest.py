# SPDX-License-Identifier: Apache-2.0
"""What every test gets."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _environment_of_its_own() -> Iterator[None]:
    """The scheduler harness chooses vLLM's runner through the environment; servers that later tests start must not inherit it."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
