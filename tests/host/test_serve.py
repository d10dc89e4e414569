# SPDX-License-Identifier: Apache-2.0
"""The flags on a real `vllm serve`, and the stock configuration with the plugin installed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import httpx
import pytest
from models import tiny_model
from noting_scheduler import NOTE_VARIABLE
from server import VllmServer

from tokenspeed_plugin import scheduler_fsm
from tokenspeed_plugin.entry_points.general import register
from tokenspeed_plugin.host.config_gate import ConfigRefusedError

SCHEDULER = "noting_scheduler.NotingScheduler"
LIMITS = {"max_model_len": 512, "max_num_seqs": 4, "enforce_eager": True, "kv_cache_memory_bytes": 32 << 20}


@pytest.mark.real_vllm
def test_a_server_runs_the_scheduler_of_the_flag_in_its_engine_core(tmp_path: Path, entry_point: str) -> None:
    note_path, config = tmp_path / "note.json", tmp_path / "config.yaml"
    options = {**LIMITS, "scheduler": SCHEDULER, "kv_store": "none"}
    config.write_text(
        "".join(
            f"{key.replace('_', '-')}: {str(value).lower() if value is True else value}\n"
            for key, value in options.items()
        )
    )
    path = os.pathsep.join(p for p in (entry_point, str(Path(__file__).parent), *sys.path) if p)
    environment = {
        NOTE_VARIABLE: str(note_path),
        "PYTHONPATH": path,
        "TOKENSPEED_TARGET_TPS_PER_USER": "0",
        "VLLM_LOGGING_LEVEL": "INFO",  # other tests of this process may have asked for silence
    }
    model = tiny_model("qwen3")
    with VllmServer(model, ["--config", str(config)], tmp_path / "log", environment) as server:
        request = {"model": str(model), "prompt": "ban den", "max_tokens": 5, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=request, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 5
        server_pid = server._process.pid
        log = server.log_path.read_text()
    note = json.loads(note_path.read_text())
    assert note["pid"] != server_pid, "the engine core is a process of its own"
    assert note["patches"] == ["parser", "engine_config"]
    assert (note["values"]["scheduler"], note["sources"]["scheduler"]) == (SCHEDULER, "flag")
    assert (note["values"]["kv_store"], note["sources"]["kv_store"]) == ("none", "flag")
    assert (note["values"]["target_tps_per_user"], note["sources"]["target_tps_per_user"]) == (0, "environment")
    assert note["additional_config"] == {}
    assert f"Using custom scheduler class {SCHEDULER}" in log


def test_help_of_the_command_shows_the_flag(run_python, entry_point: str) -> None:
    script = "from vllm.entrypoints.cli.main import main; main()"
    done = run_python(script, "serve", "--help=scheduler", extra_path=entry_point)
    assert "--scheduler {vllm,tokenspeed,dotted.path}" in done.stdout, done.stderr
    assert done.returncode == 0


@pytest.mark.usefixtures("stock_vllm")
def test_the_stock_configuration_is_the_same_with_the_plugin_installed() -> None:
    from vllm.engine.arg_utils import EngineArgs

    def configuration(**more: object) -> dict[str, str]:
        config = EngineArgs(model=str(tiny_model("qwen3")), **LIMITS, **more).create_engine_config()
        return {name: repr(value) for name, value in vars(config).items() if name != "instance_id"}

    before = configuration()
    register()
    after = configuration()
    assert after == before
    assert "scheduler_cls=None" in after["scheduler_config"]
    assert configuration(scheduler_cls="vllm") == before


@pytest.mark.usefixtures("stock_vllm")
def test_a_real_configuration_is_refused_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import EngineArgs

    stand_in = type("TokenSpeedScheduler", (), {"__module__": scheduler_fsm.__name__})
    monkeypatch.setitem(vars(scheduler_fsm), "TokenSpeedScheduler", stand_in)
    register()
    arguments = EngineArgs(
        model=str(tiny_model("qwen3")),
        **LIMITS,
        scheduler_cls="tokenspeed",
        prefix_match_unit=16,
        prefix_cache_retention_interval=64,
        prefix_caching_hash_algo="sha256_cbor",
    )
    with pytest.raises(ConfigRefusedError) as error:
        arguments.create_engine_config()
    assert [line.split("=")[0].strip() for line in str(error.value).splitlines()[1:]] == [
        "cache_config.prefix_match_unit",
        "cache_config.prefix_cache_retention_interval",
    ]
    assert arguments.prefix_caching_hash_algo == "sha256"
