# SPDX-License-Identifier: Apache-2.0
"""``placement explain`` on a machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.placement.real_configs import REAL
from tokenspeed_plugin.placement.cli import app

RUNNER = CliRunner()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(REAL["DeepSeek-V2-Lite"]))
    return str(tmp_path)


def test_explain_prints_plan_collectives_and_totals(folder: str) -> None:
    result = RUNNER.invoke(app, ["explain", folder, "--world", "4", "--placement", "attn=tp4,dense=tp4,moe=ep4"])
    assert result.exit_code == 0, result.output
    for part in ("moe_layer x 26", "all-reduce of self_attn over attn_tp", "vLLM", "One forward pass", "estimate"):
        assert part in result.output


@pytest.mark.parametrize("world", ["2", "4", "8", "16"])
def test_explain_auto_for_every_world_size(folder: str, world: str) -> None:
    result = RUNNER.invoke(app, ["explain", folder, "--world", world, "--decode", "16", "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.output)
    assert data["world_size"] == int(world)
    assert [s["num_tokens"] for s in data["steps"]] == [16, 8192]


def test_explain_says_what_an_overlap_would_take(folder: str) -> None:
    arguments = [
        "explain",
        folder,
        "--world",
        "2",
        "--placement",
        "attn=tp2,dense=tp2,moe=tp2",
        "--overlap",
        "on",
        "--json",
    ]
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    decode, prefill = (
        data["ours"] for data in (json.loads(result.output)["steps"][0], json.loads(result.output)["steps"][-1])
    )
    assert {row["parts"] for row in decode} == {1}
    assert {(row["section"], row["what"], row["parts"]) for row in prefill if row["parts"] > 1} == {
        ("dense_layer", "self_attn", 4),
        ("dense_layer", "mlp", 4),
        ("moe_layer", "self_attn", 4),
    }
    assert not any(row["collective"] == "reduce-scatter" for row in prefill)
    assert "in parts: each under" in RUNNER.invoke(app, arguments[:-1]).output


def test_explain_draws_the_layer(folder: str, tmp_path: Path) -> None:
    picture = tmp_path / "layer.svg"
    arguments = ["explain", folder, "--world", "2", "--placement", "attn=tp2,dense=tp2,moe=ep2", "--pp", "3"]
    assert RUNNER.invoke(app, [*arguments, "--svg", str(picture)]).exit_code == 0
    assert "moe_layer" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--placement", "attn=tp32,dense=tp1"], "16 heads are fewer than attn_tp=32"),
        (["--placement", "attn=tp3,dense=tp1"], "16 heads do not divide evenly over attn_tp=3"),
        (["--placement", "attn=tp4,dense=tp4", "--world", "6"], "attn=tp4 does not divide the world size 6"),
        (["--pp", "99"], "pp=99"),
        (["--overlap", "on", "--residual", "sharded"], "overlap=on goes with residual=replicated"),
        (["--cost-table", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_does_not_fit_ends_with_the_number(folder: str, arguments: list[str], message: str) -> None:
    result = RUNNER.invoke(app, ["explain", folder, *arguments])
    assert result.exit_code == 1
    assert message in result.stderr


def test_an_unknown_model_says_what_can_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    result = RUNNER.invoke(app, ["explain", "some/model"])
    assert result.exit_code == 1
    assert "nothing is downloaded" in result.stderr
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(REAL["Llama-3.1-8B"]))
    assert RUNNER.invoke(app, ["explain", "some/model", "--world", "2"]).exit_code == 0
