# SPDX-License-Identifier: Apache-2.0
"""`tokenspeed-plugin doctor`: what it prints, and its exit code."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tokenspeed_plugin import __version__
from tokenspeed_plugin.cli.app import app
from tokenspeed_plugin.host import check, patches, plugins
from tokenspeed_plugin.settings import KEYS

pytestmark = pytest.mark.host_matrix

STOCK = "vllm.v1.core.sched.scheduler.Scheduler"


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, stock_vllm: None):
    """Run the command as if the package were installed, whether it is or not."""
    monkeypatch.setattr(plugins, "entry_points", lambda group: [type("Entry", (), {"name": plugins.NAME})])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)

    def run(*arguments: str) -> tuple[int, dict]:
        result = CliRunner().invoke(app, ["doctor", "--json", *arguments], catch_exceptions=False)
        return result.exit_code, json.loads(result.stdout)

    return run


def test_with_nothing_asked_it_reports_and_succeeds(doctor) -> None:
    code, found = doctor()
    assert code == 0
    assert found["version"] == __version__
    assert found["host"] == {
        "version": check.installed_version(),
        "supported": ">=0.32,<0.34",
        "missing": [],
        "reason_off": None,
    }
    assert [row["key"] for row in found["settings"]] == list(KEYS)
    assert {row["source"] for row in found["settings"]} == {"default"}
    assert [row["name"] for row in found["patches"]] == [row.name for row in patches.PATCHES]
    assert (found["switched_on"], found["problems"], found["notes"]) == ([], [], [])


def test_each_setting_comes_with_its_source(doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_TARGET_TPS_PER_USER", "55")
    monkeypatch.setenv("TOKENSPEED_SCHEDULER", STOCK)
    code, found = doctor("--scheduler", "tokenspeed")
    settings = {row["key"]: (row["value"], row["source"]) for row in found["settings"]}
    assert settings["scheduler"] == ("tokenspeed", "flag")
    assert settings["target_tps_per_user"] == ("55.0", "environment")
    assert settings["kernels"] == ("off", "default")
    assert (code, found["problems"]) == (0, [])
    assert found["switched_on"] == ["scheduler=tokenspeed", "target_tps_per_user=55.0"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--kv-store", "mooncake"], "--kv-store: 'mooncake' is not available in this version; available: none."),
        (["--kv-store", "tape"], "--kv-store: 'tape' is not allowed; allowed: {none,host,mooncake}"),
        (["--scheduler", "tokensped"], "--scheduler: 'tokensped' is not a scheduler (did you mean 'tokenspeed'?)"),
        (
            ["--target-tps-per-user", "70"],
            "--target-tps-per-user: 70 has no effect with vLLM's own scheduler; allowed: 0, or any rate with",
        ),
        (["--scheduler", "no.such.Class"], "--scheduler no.such.Class: no class at 'no.such.Class'"),
    ],
)
def test_what_cannot_be_is_a_problem_and_exit_code_1(doctor, arguments: list[str], problem: str) -> None:
    code, found = doctor(*arguments)
    assert code == 1
    assert found["problems"][0].startswith(problem)
    assert found["switched_on"] == []


def test_what_an_attention_backend_needs_is_looked_for_when_kernels_are_asked_for(
    doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, found = doctor("--kernels", "mla=cuda_sm90")
    assert (code, found["switched_on"]) == (0, ["kernels=mla=cuda_sm90"])
    import vllm.v1.attention.backends.registry as registry

    monkeypatch.delattr(registry, "register_backend")
    code, found = doctor("--kernels", "auto")
    assert code == 1
    assert "lacks vllm.v1.attention.backends.registry:register_backend" in found["problems"][0]


def test_an_unsupported_vllm_is_a_note_until_something_is_asked(doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "installed_version", lambda: "0.29.1")
    reason = "the plugin is off: vLLM 0.29.1 is not supported (supported: >=0.32,<0.34)"
    code, found = doctor()
    assert (code, found["notes"], found["problems"]) == (0, [reason], [])
    code, found = doctor("--scheduler", "tokenspeed")
    assert (code, found["notes"], found["problems"]) == (1, [], [reason])


def test_a_plugin_that_vllm_does_not_load_is_named(doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver")
    code, found = doctor("--scheduler", STOCK)
    assert (code, found["problems"]) == (1, ["VLLM_PLUGINS='lora_resolver' leaves 'tokenspeed' out"])
    monkeypatch.setattr(plugins, "entry_points", lambda group: [])
    code, found = doctor()
    assert (code, found["notes"]) == (
        0,
        [
            "no entry point 'tokenspeed' in group 'vllm.general_plugins': the package is not installed in this environment"
        ],
    )


def test_people_get_the_same_in_words(doctor) -> None:
    result = CliRunner().invoke(app, ["doctor", "--kernels", "moe=x"], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    for words in (
        f"tokenspeed-plugin {__version__}",
        "has everything relied on",
        "target_tps_per_user",
        "Switched on: nothing",
    ):
        assert words in result.stdout
    assert "vllm.engine.arg_utils:EngineArgs.create_engine_config" in result.stdout
    assert "Problem: --kernels: 'moe=x' is not available in this version" in result.stdout


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"{__version__}\n"
