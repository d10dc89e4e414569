# SPDX-License-Identifier: Apache-2.0
"""`vllm serve --scheduler tokenspeed` with a tiny model: what clients do to it, and what they get back."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from demo.server import VllmServer
from real_vllm.models import tiny_model
from tokenspeed_plugin.kv_flat.cli import app as kv_map_app

pytestmark = pytest.mark.real_vllm

MODEL = "tiny"
BLOCK_TOKENS = 32
NUM_BLOCKS = 512  # the null block included
MAX_MODEL_TOKENS = 12_000


def endpoint_of(folder: Path) -> str:
    """A folder for the path that makes vLLM find the endpoint plugin, as an installed package would."""
    info = folder / "site" / "tokenspeed_endpoint-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tokenspeed-endpoint\nVersion: 0\n")
    target = "tokenspeed_plugin.entry_points.endpoint:KvMapEndpoint"
    (info / "entry_points.txt").write_text(f"[vllm.endpoint_plugins]\ntokenspeed = {target}\n")
    return str(info.parent)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    arguments = (
        *(
            "--scheduler",
            "tokenspeed",
            "--served-model-name",
            MODEL,
            "--max-model-len",
            str(MAX_MODEL_TOKENS),
            "--block-size",
            "32",
        ),
        *("--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-num-batched-tokens", "512", "--enforce-eager"),
        *("--dtype", "float32", "--max-logprobs", "5", "--gpu-memory-utilization", "0.2"),
    )
    log = tmp_path_factory.mktemp("serving") / "server.log"
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_PLUGINS": "tokenspeed",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    if not entry_points(group="vllm.endpoint_plugins", name="tokenspeed"):  # an older editable installation
        environment["PYTHONPATH"] = os.pathsep.join([endpoint_of(log.parent), *sys.path])
    with VllmServer(tiny_model("qwen3"), arguments, log, environment) as running:
        yield running


def complete(server: VllmServer, prompt: list[int], max_tokens: int, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)


def words(seed: int, count: int) -> list[int]:
    return [10 + (seed * 7919 + i * 104_729) % 8000 for i in range(count)]


def wait_for(server: VllmServer, metric: str, is_right: Callable[[float], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_right(value := server.metrics()[metric]):
        assert time.monotonic() < deadline, f"{metric} stays {value}"
        time.sleep(0.05)


def test_a_repeated_prompt_hits_and_the_counters_say_so(server: VllmServer) -> None:
    prompt = words(1, 300)
    before = server.metrics()
    first = complete(server, prompt, 4).json()
    second = complete(server, prompt, 4).json()
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    hits = server.metrics()["vllm:prefix_cache_hits_total"] - before.get("vllm:prefix_cache_hits_total", 0)
    assert hits == 288, "nine whole blocks of 32; the last token is always computed"


def test_metrics_of_the_kv_cache_move(server: VllmServer) -> None:
    def value(name: str, label: str) -> float:
        families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
        (sample,) = (s for f in families for s in f.samples if s.name == name and label in s.labels.values())
        assert (sample.labels["model_name"], sample.labels["engine"]) == (MODEL, "0")
        return sample.value

    lost = "vllm:tokenspeed_kv_lost_hit_tokens_total"
    prompt = words(11, 300)
    complete(server, prompt, 2, cache_salt="a")
    before = value(lost, "isolation")
    complete(server, prompt, 2, cache_salt="b")
    assert value(lost, "isolation") - before == 288
    assert value("vllm:tokenspeed_kv_blocks", "cached") >= 18
    assert value("vllm:tokenspeed_kv_blocks", "in_use") == 0
    for number in range(60):  # more than the pool holds
        complete(server, words(300 + number, 300), 1)
    complete(server, prompt, 2, cache_salt="a")
    assert value(lost, "evicted") >= 288
    assert value("vllm:tokenspeed_kv_evictions_total", "idle") > 0


def test_the_pool_of_a_running_server_is_drawn(server: VllmServer, tmp_path: Path) -> None:
    complete(server, words(12, 100), 2, session_id="drawn")
    svg = tmp_path / "pool.svg"
    result = CliRunner().invoke(kv_map_app, ["--url", server.url, "--out", str(svg)])
    assert result.exit_code == 0, result.output
    assert f"{NUM_BLOCKS - 1} blocks" in result.output
    assert "<!-- by session and prefix" in svg.read_text()


def test_an_oversize_prompt_is_refused_alone(server: VllmServer) -> None:
    refused = complete(server, words(2, (NUM_BLOCKS + 10) * BLOCK_TOKENS), 4)
    # vLLM starts only when the pool holds one sequence of full length, so its own front end is the first to see this one.
    assert refused.status_code == 400
    assert str(MAX_MODEL_TOKENS) in refused.text
    assert complete(server, words(3, 20), 4).status_code == 200


def test_a_client_that_goes_away_frees_its_blocks(server: VllmServer) -> None:
    body = {"model": MODEL, "prompt": words(4, 200), "max_tokens": 10_000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as stream:
        lines = stream.iter_lines()
        for _ in range(6):
            next(lines)
        wait_for(server, "vllm:kv_cache_usage_perc", lambda usage: usage > 0)
    wait_for(server, "vllm:num_requests_running", lambda running: running == 0)
    wait_for(server, "vllm:kv_cache_usage_perc", lambda usage: usage == 0)
    assert server.metrics()["vllm:generation_tokens_total"] < 9_000, "it ended because its client left, not by itself"


def test_several_answers_logprobs_and_stop_strings(server: VllmServer) -> None:
    several = complete(server, words(6, 40), 6, n=3, temperature=1, seed=1, logprobs=2).json()["choices"]
    assert len(several) == 3
    assert all(len(choice["logprobs"]["tokens"]) == 6 for choice in several)
    greedy = complete(server, words(6, 40), 12).json()["choices"][0]["text"]
    stop = greedy[len(greedy) // 2 :][:4]
    stopped = complete(server, words(6, 40), 12, stop=[stop]).json()["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == greedy[: greedy.index(stop)]


def test_prompt_logprobs_cover_every_position_even_when_cached(server: VllmServer) -> None:
    prompt = words(7, 100)
    complete(server, prompt, 1)
    answer = complete(server, prompt, 1, prompt_logprobs=1).json()["choices"][0]
    assert len(answer["prompt_logprobs"]) == len(prompt)
    assert all(position for position in answer["prompt_logprobs"][1:])


def test_a_grammar_holds_under_the_scheduler(server: VllmServer) -> None:
    answer = complete(server, words(8, 20), 40, structured_outputs={"choice": ["yes", "no"]}, ignore_eos=False).json()
    assert answer["choices"][0]["text"] in {"yes", "no"}
    broken = complete(server, words(8, 20), 8, structured_outputs={"regex": "(("})
    assert broken.status_code >= 400
    assert complete(server, words(9, 20), 4).status_code == 200


def test_the_prefix_cache_can_be_reset(server: VllmServer) -> None:
    prompt = words(10, 200)
    complete(server, prompt, 2)
    assert httpx.post(f"{server.url}/reset_prefix_cache", timeout=30).status_code == 200
    before = server.metrics()["vllm:prefix_cache_hits_total"]
    complete(server, prompt, 2)
    assert server.metrics()["vllm:prefix_cache_hits_total"] == before


def test_many_streams_at_once_all_end(server: VllmServer) -> None:
    requests = [words(100 + i % 5, 150) + words(200 + i, 30) for i in range(24)]
    with httpx.Client(timeout=300) as client:
        body = {"model": MODEL, "prompt": requests, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        answer = client.post(f"{server.url}/v1/completions", json=body).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * len(requests)
    assert answer["usage"]["completion_tokens"] == 40 * len(requests)


def test_a_client_asks_for_a_rate_and_the_metrics_show_it(server: VllmServer) -> None:
    def steps() -> dict[str, float]:
        families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
        samples = [s for f in families for s in f.samples if s.name == "vllm:tokenspeed_pace_steps_total"]
        return {sample.labels["decodes"]: sample.value for sample in samples if sample.labels["prompt_tokens"] == "0"}

    assert steps() == {}, "nobody has a rate"
    answer = complete(server, words(13, 40), 30, vllm_xargs={"target_tps_per_user": 5})
    assert answer.json()["usage"]["completion_tokens"] == 30
    wait_for(server, "vllm:tokenspeed_pace_steps_total", lambda value: value >= 29)
    assert steps()["1-8"] >= 29
    metrics = server.metrics()
    assert metrics["vllm:tokenspeed_pace_predicted_seconds_total"] > 0
    assert metrics["vllm:tokenspeed_pace_measured_seconds_total"] > 0
    assert metrics["vllm:tokenspeed_pace_users_below_target"] == 0
    refused = complete(server, words(13, 40), 4, vllm_xargs={"target_tps_per_user": -1})
    assert refused.status_code in (400, 500)  # vLLM 0.32 has no field for the reason
    assert "vllm_xargs['target_tps_per_user'] is -1; allowed: a number" in Path(server.log_path).read_text()
    assert complete(server, words(13, 40), 4, vllm_xargs={"target_tps_per_user": 0}).status_code == 200


def test_the_log_names_the_scheduler(server: VllmServer) -> None:
    assert "TokenSpeedScheduler" in Path(server.log_path).read_text()
