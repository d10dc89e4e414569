# SPDX-License-Identifier: Apache-2.0
"""Fault 31 (LMCache 1139, 2136, 2979): the key of a block depends on the process that computes it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
from tokenspeed_plugin.scheduler_fsm import _core
plain = _core.prepare_prompt(tokens=list(range(1, 257)), key_tokens=128)
salted = _core.prepare_prompt(tokens=list(range(1, 257)), key_tokens=128, salt="tenant", adapter="lora")
print(_core.key_format, *(key.hex() for key in (*plain.keys, *salted.keys)))
"""
# Written down once: a change of the encoding must change the version in `key_format` as well.
EXPECTED_FORMAT = "tokenspeed-kv/2"


def keys(seed: str | None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    return subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture(scope="module")
def reference() -> str:
    return keys(None)


def test_keys_are_a_versioned_function_of_the_prompt(reference: str) -> None:
    version, *digests = reference.split()
    assert version == EXPECTED_FORMAT
    assert len(set(digests)) == 4
    assert all(len(digest) == 64 for digest in digests)


@pytest.mark.parametrize("seed", ["0", "1", None])
def test_every_process_computes_the_same_bytes(reference: str, seed: str | None) -> None:
    assert keys(seed) == reference
