# SPDX-License-Identifier: Apache-2.0
"""The command line of the kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tokenspeed_plugin.kernels.autotune import TuningStore
from tokenspeed_plugin.kernels.cli import app

HOPPER = ("--platform", "cuda:9.0", "--gpu", "NVIDIA H200")


@pytest.fixture(autouse=True)
def _own_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKENSPEED_KERNEL_TUNING", str(tmp_path / "tuning.json"))
    monkeypatch.setenv("TOKENSPEED_KERNEL_CACHE", str(tmp_path))
    nvcc = tmp_path / "nvcc"
    nvcc.touch()
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_list_shows_every_solution() -> None:
    code, output = run("list")
    assert code == 0
    for solution in ("reference", "triton", "cuda_sm90", "flashmla", "flashattn3"):
        assert f"mla.decode/{solution}" in output


def test_explain_names_the_choice_and_the_measurement() -> None:
    code, output = run("explain", *HOPPER)
    assert code == 0
    assert "cuda_sm90" in output
    assert "measured fastest" in output


def test_explain_on_a_machine_without_gpu_chooses_the_reference() -> None:
    code, output = run("explain", "--platform", "cpu")
    assert code == 0
    assert "platform cpu, allowed: cuda 9.0 to below 9.1" in output


def test_explain_says_when_the_host_keeps_its_own() -> None:
    code, output = run("explain", *HOPPER, "--kernels", "mla=flashattn3")
    assert code == 0
    assert "vLLM's own backend FLASH_ATTN_MLA stays in charge." in output


@pytest.mark.parametrize(("queries", "host"), [("512", "flashattn3"), ("513", "unfolded")])
def test_explain_shows_prefill_on_cached_tokens_too(queries: str, host: str, tmp_path: Path) -> None:
    arguments = ("explain", "--platform", "cuda:9.0", "--gpu", "GPU", "--prefill", "--queries", queries)
    code, output = run(*arguments)
    assert (code, output.count("nothing was measured"), "tier portable" in output) == (0, 1, True)
    assert "vLLM's own backend FLASH_ATTN_MLA stays in charge." in output
    cell = {"heads": 16, "query_tokens": int(queries), "context_tokens": 65536}
    source = tmp_path / "mla.json"
    times = {"head_groups": 10.0, "head_groups_tma": 5.0, host: 12.0}  # the second one is weighed nowhere yet
    source.write_text(json.dumps({"gpu": "GPU", "cells": [], "prefills": [{"cell": cell, "times_us": times}]}))
    assert run("tune", "--benchmark", str(source))[0] == 0
    code, output = run(*arguments)
    assert (code, "measured fastest: 10.0 us" in output, "stays in charge" in output) == (0, True, False)
    assert "measured 12.0 us, head_groups 10.0 us" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--platform", "tpu"), "--platform 'tpu', allowed: cpu, cuda:MAJOR.MINOR, rocm:MAJOR.MINOR"),
        ((*HOPPER, "--kernels", "mla=best"), "mla='best', allowed solutions: cuda_sm90"),
        (
            (*HOPPER, "--page", "48", "--kernels", "mla=cuda_sm90"),
            "page_tokens=48, allowed: at least 1, a power of two",
        ),
    ],
)
def test_explain_refuses_by_name(arguments: tuple[str, ...], message: str) -> None:
    code, output = run("explain", *arguments)
    assert code == 2
    assert message in output


def test_explain_shows_the_append_too() -> None:
    code, output = run("explain", *HOPPER, "--append", "--fp8")
    assert (code, "triton" in output) == (0, True)
    assert "vLLM's own layer MultiHeadLatentAttentionWrapper stays in charge." in output
    code, output = run("explain", *HOPPER, "--append", "--kernels", "append=triton")
    assert "asked for by --kernels" in output
    assert "stays in charge" not in output


@pytest.mark.parametrize("times", [{"ours, FP8": 4.0, "FlashMLA, FP8": 5.0}, {"ours, FP8": 5.0, "FlashMLA, FP8": 4.0}])
def test_explain_takes_fp8_by_what_was_measured(times: dict[str, float], tmp_path: Path) -> None:
    cell = {"heads": 128, "query_tokens": 1, "requests": 16, "context_tokens": 65536}
    source = tmp_path / "mla.json"
    source.write_text(json.dumps({"gpu": "NVIDIA H200", "cells": [{"cell": cell, "times_us": times}]}))
    assert run("tune", "--benchmark", str(source))[0] == 0
    code, output = run("explain", *HOPPER, "--fp8", "--heads", "128", "--requests", "16", "--context", "65536")
    (line,) = (line for line in output.splitlines() if "measured fastest" in line)
    chosen = "cuda_sm90_fp8" if times["ours, FP8"] < times["FlashMLA, FP8"] else "flashmla"
    assert (code, [cell.strip() for cell in line.split("│")][1:3]) == (0, [chosen, "chosen"])


def test_tune_takes_a_benchmark_in(tmp_path: Path) -> None:
    cell = {"heads": 16, "query_tokens": 1, "requests": 1, "context_tokens": 8192}
    times = {"ours": 30.0, "FlashMLA": 20.0, "FlashAttention 3": 25.0, "read-only sweep": 4.0}
    times |= {"ours, FP8": 15.0, "FlashMLA, FP8": 18.0}
    source, target = tmp_path / "mla.json", tmp_path / "out.json"
    source.write_text(json.dumps({"gpu": "GPU", "cells": [{"cell": cell, "times_us": times}]}))
    code, output = run("tune", "--benchmark", str(source), "--output", str(target), "--any-version")
    assert (code, "2 shape buckets of GPU" in output) == (0, True)
    bf16, fp8 = TuningStore(target).load("GPU").buckets.values()
    assert bf16 == {"cuda_sm90": 30.0, "flashmla": 20.0, "flashattn3": 25.0}
    assert fp8 == {"cuda_sm90_fp8": 15.0, "flashmla": 18.0}


def run_file(path: Path, passes_us: list[dict[str, float]], **others: object) -> str:
    cell = {"heads": 16, "query_tokens": 1, "requests": 1, "context_tokens": 8192}
    measured = {"cell": cell, "times_us": {"ours": 1000.0}, "passes_us": passes_us}
    path.write_text(json.dumps({"gpu": "GPU", "cells": [measured], **others}))
    return str(path)


def test_tune_takes_medians_over_the_passes_of_all_runs(tmp_path: Path) -> None:
    splits = [{"FlashAttention 3 @0": 9.0, "FlashAttention 3 @32": 3.0}, {"FlashAttention 3 @32": 7.0}]
    first = run_file(tmp_path / "first.json", [{"ours": 30.0, "FlashMLA": 20.0, **splits[0]}, {"ours": 10.0}])
    second = run_file(tmp_path / "second.json", [{"ours": 11.0, "FlashMLA": 22.0, **splits[1]}])
    target = tmp_path / "out.json"
    code, output = run("tune", "--benchmark", first, "--benchmark", second, "--output", str(target), "--any-version")
    assert (code, "1 shape buckets of GPU" in output) == (0, True)
    assert list(TuningStore(target).load("GPU").buckets.values()) == [
        {"cuda_sm90": 11.0, "flashmla": 21.0, "flashattn3": 5.0}
    ]


@pytest.mark.parametrize("others", [{"gpu": "OTHER"}, {"kernel_sources": {"cuda_sm90": "b"}}])
def test_tune_refuses_runs_of_different_things(tmp_path: Path, others: dict[str, object]) -> None:
    first = run_file(tmp_path / "first.json", [{"ours": 30.0}], kernel_sources={"cuda_sm90": "a"})
    second = run_file(tmp_path / "second.json", [{"ours": 11.0}], **{"kernel_sources": {"cuda_sm90": "a"}} | others)
    code, output = run("tune", "--benchmark", first, "--benchmark", second)
    assert (code, "is of another GPU or of other kernels than" in output) == (2, True)


def test_tune_refuses_what_is_no_benchmark(tmp_path: Path) -> None:
    source = tmp_path / "other.json"
    source.write_text("{}")
    code, output = run("tune", "--benchmark", str(source))
    assert code == 2
    assert "is no output of benchmarks.mla --json" in output


def test_bench_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, output = run("bench")
    assert code == 2
    assert "kernels bench needs a GPU of compute capability 9.0" in output


def test_serving_shows_which_batches_are_taken() -> None:
    code, output = run("serving", "--heads", "16", "--context", "65536")
    assert code == 0
    rows = {
        tuple(cells[1:3]): cells[3]
        for line in output.splitlines()
        if len(cells := [c.strip() for c in line.split("│")]) > 4
    }
    assert (rows["1", "1"], rows["4", "256"], rows["8", "1"]) == ("cuda_sm90", "vLLM", "vLLM")
    assert "x the time of flashattn3 (measured with 16 heads, 128 requests)" in output
    assert "nothing was measured for 8 query tokens" in output


def test_serving_shows_the_batches_of_an_e4m3_cache() -> None:
    code, output = run("serving", "--heads", "16", "--context", "65536", "--fp8")
    assert code == 0
    rows = {
        tuple(cells[1:3]): cells[3:5]
        for line in output.splitlines()
        if len(cells := [c.strip() for c in line.split("│")]) > 4
    }
    assert [rows["1", "1"][0], rows["2", "64"][0], rows["4", "1"][0]] == ["cuda_sm90_fp8", "cuda_sm90_fp8", "vLLM"]
    assert "x the time of flashmla" in rows["1", "1"][1]
    code, output = run("serving", "--kernels", "mla=cuda_sm90", "--fp8")
    assert code == 2
    assert "does not fit mla.decode (kv=float8_e4m3fn/tensor" in output


def test_serving_by_name() -> None:
    code, output = run("serving", "--kernels", "mla=flashmla")
    assert (code, "vLLM's own backend FLASHMLA decodes every batch." in output) == (0, True)
    code, output = run("serving", "--kernels", "mla=cuda_sm90")
    assert (code, "asked for by name" in output, "measured with" in output) == (0, True, False)
    code, output = run("serving", "--heads", "200")
    assert code == 2
    assert "heads=200, allowed: 1 to 128" in output
    code, output = run("serving", "--kernels", "mla=reference")
    assert code == 2
    assert "'reference' cannot serve vLLM's decode, allowed: cuda_sm90, cuda_sm90_fp8, flashattn3, flashmla" in output
