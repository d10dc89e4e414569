# SPDX-License-Identifier: Apache-2.0
"""What Blackwell users are told: that our kernel has never run there, and what a model expects of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from tokenspeed_plugin.kernels.cli import app
from tokenspeed_plugin.kernels.mla.geometry import HEAD_DIMS, RowTiles
from tokenspeed_plugin.kernels.mla.sm100.decode import ARCHITECTURES
from tokenspeed_plugin.kernels.mla.sm100.model import B200, estimate_decode, memory_bytes, tensor_clocks
from tokenspeed_plugin.kernels.mla.solutions import BF16, FP8, SOLUTIONS, decode_shape
from tokenspeed_plugin.kernels.mla.split import SplitPlan
from tokenspeed_plugin.kernels.registry import Objective, Platform, Registry
from tokenspeed_plugin.kernels.select import ENVIRONMENT_VARIABLE, KernelRequest, KernelSelectionError, select_kernel

SHAPE = decode_shape(heads=16, query_tokens=1, page_tokens=64, requests=1, context_tokens=65536)
REMARK = "never run on hardware; a model of the B200 expects"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)


def registry() -> Registry:
    """All solutions, as if every package were installed."""
    return Registry([replace(spec, unavailable=lambda: None) for spec in SOLUTIONS])


def request(arch: tuple[int, int] = (10, 0), signature: dict = BF16, **shape: int) -> KernelRequest:
    return KernelRequest("mla", "decode", signature, {**SHAPE, **shape}, Platform("cuda", arch))


@pytest.mark.parametrize("arch", [(10, 0), (10, 3)])
def test_it_is_never_chosen_unless_asked_for(arch: tuple[int, int]) -> None:
    selection = select_kernel(request(arch), registry=registry())
    assert selection.spec.solution == "triton"
    reasons = {r.solution: r.reason for r in selection.rejections}
    assert reasons["cute_sm100"].startswith(f"tier untried, triton is portable; {REMARK}")
    asked = select_kernel(request(arch), solution="cute_sm100", registry=registry())
    assert asked.reason.startswith(f"asked for by argument solution; {REMARK} 11.1 us, bound by memory")


def test_fp8_stays_with_vllm() -> None:
    selection = select_kernel(request(signature=FP8), registry=registry())
    assert (selection.spec.solution, selection.spec.host_backend) == ("tokenspeed_mla", "TOKENSPEED_MLA")
    with pytest.raises(RuntimeError, match="TOKENSPEED_MLA is a backend of vLLM"):
        selection.spec.load()


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request((9, 0)), "platform cuda 9.0, allowed: cuda 10.0 to below 10.1; cuda 10.3 to below 10.4"),
        (request((10, 1)), "platform cuda 10.1, allowed: cuda 10.0 to below 10.1; cuda 10.3 to below 10.4"),
        (request(page_tokens=8), "page_tokens=8, allowed: at least 16, a power of two"),
        (request(page_tokens=48), "page_tokens=48, allowed: at least 16, a power of two"),
        (request(heads=129), "heads=129, allowed: 1 to 128"),
        (request(query_tokens=9), "query_tokens=9, allowed: 1 to 8"),
        (replace(request(), objective=Objective.DETERMINISM), "objective determinism, allowed: latency, throughput"),
    ],
)
def test_what_it_does_not_take_is_named(asked: KernelRequest, reason: str) -> None:
    with pytest.raises(KernelSelectionError) as caught:
        select_kernel(asked, solution="cute_sm100", registry=registry())
    assert str(caught.value).endswith(reason)


def test_it_claims_what_it_can_be_compiled_for() -> None:
    claimed = {arch for arch in [(10, minor) for minor in range(10)] if fits(arch)}
    assert claimed == set(ARCHITECTURES)


def fits(arch: tuple[int, int]) -> bool:
    (spec,) = (s for s in SOLUTIONS if (s.mode, s.solution) == ("decode", "cute_sm100"))
    return any(capability.admits(Platform("cuda", arch)) for capability in spec.capabilities)


def test_explain_says_so() -> None:
    result = CliRunner().invoke(app, ["explain", "--platform", "cuda:10.0", "--fp8"], env={"COLUMNS": "300"})
    assert "tokenspeed_mla" in result.output
    result = CliRunner().invoke(app, ["explain", "--platform", "cuda:10.0"], env={"COLUMNS": "300"})
    assert result.exit_code == 0
    assert "never run on hardware" in result.output


def test_a_long_context_of_few_rows_is_bound_by_its_bytes() -> None:
    estimate = estimate_decode(SHAPE)
    kv_us = 65536 * HEAD_DIMS * 2 / B200.memory_bytes_per_us
    assert estimate.bound == "memory"
    assert kv_us < estimate.expected_us < 1.2 * kv_us
    assert estimate_decode(SHAPE, "float8_e4m3fn").expected_us < 0.6 * estimate.expected_us


def test_many_rows_are_bound_by_the_tensor_cores() -> None:
    shape = decode_shape(heads=128, query_tokens=4, page_tokens=64, requests=16, context_tokens=65536)
    estimate = estimate_decode(shape)
    assert estimate.bound == "tensor cores"
    # At the full rate: 1088 clocks for a tile of 64 rows. The scores run at half of it, and the output's products wait
    # for their operands: 1920.
    floor = 2 * 16 * 65536 * 512 * (576 + 512) / (B200.multiprocessors * 8192 * B200.clock_per_us)
    assert floor * 1920 / 1088 <= estimate.expected_us <= 1.05 * floor * 1920 / 1088


@pytest.mark.parametrize(("rows", "clocks"), [(64, 1152 + 768), (32, 864 + 640), (16, 720 + 576)])
def test_clocks_of_a_tile(rows: int, clocks: int) -> None:
    """Scores and output: by reading operands from shared memory, which takes longer than the arithmetic."""
    assert tensor_clocks(rows, "bfloat16", B200) == clocks


def test_parts_of_split_requests_count_twice() -> None:
    tiles, plan = RowTiles.fold(16, 1, (16, 32, 64)), SplitPlan.of([640], 10)
    alone = memory_bytes(decode_shape(16, 1, 64, 1, 640), "bfloat16", tiles, SplitPlan.of([640], 1))
    split = memory_bytes(decode_shape(16, 1, 64, 1, 640), "bfloat16", tiles, plan)
    assert split - alone == 2 * 10 * 16 * (512 * 4 + 4)
