# SPDX-License-Identifier: Apache-2.0
"""Fault 21 (vllm-gguf-plugin PR 26): plugin and host register the same name, and start-up fails before load."""

from __future__ import annotations

import argparse

import pytest
from plugin_fixtures import clean_environment

from tokenspeed_plugin import flag_carrier
from tokenspeed_plugin.entry_points.cli import add_flags
from tokenspeed_plugin.settings import KEYS, Source, resolve_in_process

__all__ = ["clean_environment"]


@pytest.fixture
def parser(caplog: pytest.LogCaptureFixture) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scheduler", dest="theirs")
    add_flags(parser)
    return parser


def test_a_flag_that_is_taken_stays_with_its_owner_and_a_note_says_so(parser, caplog: pytest.LogCaptureFixture) -> None:
    assert parser.parse_args(["--scheduler", "anything"]).theirs == "anything"
    assert flag_carrier.recorded() == {}
    # One record may be seen by two handlers, of vLLM's logger and of the root.
    assert {record.getMessage() for record in caplog.get_records("setup")} == {
        "--scheduler is already taken by vLLM or another plugin and stays with it; set TOKENSPEED_SCHEDULER instead."
    }


def test_the_other_flags_are_there(parser) -> None:
    flags = {option for action in parser._actions for option in action.option_strings}
    assert {Source.FLAG.spelling(key) for key in KEYS} <= flags
    parser.parse_args(["--kv-store", "none"])
    assert flag_carrier.recorded() == {"kv_store": "none"}


def test_the_way_that_the_note_names_takes_ownership(parser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_SCHEDULER", "tokenspeed")
    parser.parse_args(["--scheduler", "anything"])
    assert resolve_in_process().values.scheduler == "tokenspeed"


def test_adding_the_flags_twice_does_not_fail(parser) -> None:
    add_flags(parser)
    parser.parse_args(["--kv-store", "none"])
