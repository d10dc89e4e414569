# SPDX-License-Identifier: Apache-2.0
"""The flags on vLLM's own parser: spelled every way that vLLM knows, and refused by name."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tokenspeed_plugin import flag_carrier
from tokenspeed_plugin.entry_points.cli import GROUP, add_flags
from tokenspeed_plugin.entry_points.general import register
from tokenspeed_plugin.host.schedulers import TOKENSPEED_PATH
from tokenspeed_plugin.settings import KEYS, Source, allowed

pytestmark = [pytest.mark.host_matrix, pytest.mark.usefixtures("stock_vllm")]

SYNC = "vllm.v1.core.sched.scheduler.Scheduler"


@pytest.fixture
def parser() -> FlexibleArgumentParser:
    register()
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(usage="vllm serve"))


@pytest.mark.parametrize(
    ("argv", "path", "flags"),
    [
        ([], None, {}),
        (["--scheduler", "tokenspeed"], TOKENSPEED_PATH, {"scheduler": "tokenspeed"}),
        (["--scheduler=tokenspeed"], TOKENSPEED_PATH, {"scheduler": "tokenspeed"}),
        (["--scheduler", "vllm"], None, {"scheduler": "vllm"}),
        (["--scheduler", "a.b.C"], "a.b.C", {"scheduler": "a.b.C"}),
        (["--scheduler-cls", "a.b.C"], "a.b.C", {}),
        (["--scheduler-cls", "tokenspeed"], "tokenspeed", {}),
        (["--scheduler-cls", "tokenspeed", "--scheduler", "tokenspeed"], TOKENSPEED_PATH, {"scheduler": "tokenspeed"}),
        (["--target-tps-per-user", "0"], None, {"target_tps_per_user": 0.0}),
        (["--target-tps-per-user", "70"], None, {"target_tps_per_user": 70.0}),
        (["--kv_store", "none", "--placement=off"], None, {"kv_store": "none", "placement": "off"}),
    ],
)
def test_every_spelling(parser, tmp_path: Path, argv: list[str], path: str | None, flags: dict[str, object]) -> None:
    args = parser.parse_args(["--model", str(tmp_path), *argv])
    assert args.scheduler_cls == path
    assert flag_carrier.recorded() == flags
    assert args.additional_config == {}
    assert vars(AsyncEngineArgs.from_cli_args(args))["scheduler_cls"] == path


def test_a_yaml_config_file(parser, tmp_path: Path) -> None:
    serve = (
        FlexibleArgumentParser().add_subparsers(dest="command").add_parser("serve", parents=[parser], add_help=False)
    )
    serve.add_argument("--config")
    config = tmp_path / "config.yaml"
    config.write_text("scheduler: tokenspeed\nkv-store: none\nmax-num-seqs: 4\n")
    args = serve.parse_args(["serve", "--model", "m", "--config", str(config)][1:])
    assert (args.scheduler_cls, args.max_num_seqs) == (TOKENSPEED_PATH, 4)
    assert flag_carrier.recorded() == {"scheduler": "tokenspeed", "kv_store": "none"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--scheduler", "tokensped"],
            "argument --scheduler: 'tokensped' is not a scheduler (did you mean 'tokenspeed'?); allowed: {vllm,tokenspeed,dotted.path}",
        ),
        (
            ["--scheduler", "no way"],
            "argument --scheduler: 'no way' is not allowed; allowed: {vllm,tokenspeed,dotted.path}",
        ),
        (
            ["--scheduler-cls", SYNC, "--scheduler", "vllm"],
            f"argument --scheduler: 'vllm' and --scheduler-cls '{SYNC}' differ; allowed: one of them",
        ),
        (["--kv-manager", "round"], "argument --kv-manager: 'round' is not allowed; allowed: {vllm,flat}"),
        (["--kv-store", "tape"], "argument --kv-store: 'tape' is not allowed; allowed: {none,host,mooncake}"),
        (
            ["--target-tps-per-user", "fast"],
            "argument --target-tps-per-user: 'fast' is not allowed; allowed: a number of tokens per second >= 0 (0 = off)",
        ),
        (
            ["--placement", "attn=4"],
            "argument --placement: 'attn=4' is not allowed; allowed: {off,auto,SPEC}, SPEC such as attn=tp4,dense=tp4",
        ),
        (
            ["--kernels", "moe=x"],
            "argument --kernels: 'moe=x' is not available in this version; available: off, auto, mla=NAME, append=NAME, linear=NAME. Way on: ",
        ),
    ],
)
def test_a_bad_flag_ends_with_its_name_value_and_what_is_allowed(parser, capsys, argv: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert flag_carrier.recorded() == {}


def test_help_shows_the_flags(parser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlexibleArgumentParser, "_search_keyword", "scheduler")
    text = parser.format_help()
    assert "--scheduler {vllm,tokenspeed,dotted.path}" in text
    assert "--scheduler-cls" in text
    monkeypatch.setattr(FlexibleArgumentParser, "_search_keyword", GROUP.lower())
    text = " ".join(parser.format_help().split())
    assert [key for key in KEYS if Source.FLAG.spelling(key) not in text] == []
    assert [key for key in KEYS if allowed(key) not in text] == []
    assert "In this version only: none." in text


def test_on_an_unsupported_vllm_each_flag_fails_with_the_reason(capsys) -> None:
    parser = argparse.ArgumentParser(usage="vllm serve")
    add_flags(parser, "vLLM 9.9 is not supported")
    assert parser.parse_args(["--scheduler", "vllm"]).scheduler_cls is None
    for argv in (["--scheduler", "tokenspeed"], ["--kernels", "auto"]):
        with pytest.raises(SystemExit):
            parser.parse_args(argv)
        assert (
            f"argument {argv[0]}: '{argv[1]}' cannot be honoured: vLLM 9.9 is not supported" in capsys.readouterr().err
        )
