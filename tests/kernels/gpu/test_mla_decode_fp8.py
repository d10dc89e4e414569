# SPDX-License-Identifier: Apache-2.0
"""MLA decode from an e4m3 cache against the float64 reference; what the kernel must not look at is NaN."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tokenspeed_plugin.kernels.mla.geometry import LATENT_DIMS
from tokenspeed_plugin.kernels.mla.reference import mla_decode_reference
from tokenspeed_plugin.kernels.mla.sm90.decode import MlaDecodePlan, MlaWorkspace
from tokenspeed_plugin.kernels.mla.sm90.decode_fp8 import E4M3, fp8_workspace, mla_decode_fp8

NAN = float("nan")
NAN_BITS = 0x7F
SCALE = 576**-0.5


@dataclass
class Case:
    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor | None
    max_query_tokens: int
    query_scale: torch.Tensor
    kv_scale: torch.Tensor


def make_case(heads: int, queries: int | list[int], lengths: list[int], page_tokens: int = 64, seed: int = 0) -> Case:
    """Random inputs; free pages, slots past a request's end and table entries past its last page are poisoned."""
    generator = torch.Generator("cuda").manual_seed(seed)
    requests, pages = len(lengths), max(1, *(-(-length // page_tokens) for length in lengths))
    values = torch.randn(requests * pages + 1, page_tokens, 576, device="cuda", generator=generator)
    kv_cache = (2 * values).to(E4M3)
    table = torch.randperm(requests * pages, device="cuda", dtype=torch.int32, generator=generator) + 1
    table = table.view(requests, pages)
    kv_cache.view(torch.uint8)[0] = NAN_BITS
    for request, length in enumerate(lengths):
        used = -(-length // page_tokens)
        if length % page_tokens:
            kv_cache.view(torch.uint8)[table[request, used - 1].item(), length % page_tokens :] = NAN_BITS
        table[request, used:] = -1
    counts = queries if isinstance(queries, list) else [queries] * requests
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device="cuda")
    q = (3 * torch.randn(sum(counts), heads, 576, device="cuda", generator=generator)).to(E4M3)
    return Case(
        q,
        kv_cache,
        table,
        torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        starts if isinstance(queries, list) else None,
        max(counts),
        torch.tensor([0.37], device="cuda"),
        torch.tensor([0.71], device="cuda"),
    )


def run(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    workspace = fp8_workspace(case.q.shape[1], case.max_query_tokens, len(case.seq_lens), "cuda")
    workspace.partial_out.fill_(NAN)
    workspace.partial_lse.fill_(NAN)
    plan = MlaDecodePlan(workspace, len(case.seq_lens))
    plan.update(case.seq_lens, case.block_table, case.kv_cache.shape[1])
    out = torch.full((*case.q.shape[:2], LATENT_DIMS), NAN, dtype=torch.bfloat16, device="cuda")
    lse = torch.full(case.q.shape[:2], NAN, device="cuda")
    scales = (case.query_scale, case.kv_scale)
    mla_decode_fp8(case.q, case.kv_cache, plan, SCALE, *scales, query_starts=case.query_starts, out=out, lse=lse)
    torch.cuda.synchronize()
    return out, lse


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    return ((value.double() - truth).norm() / truth.norm().clamp(min=1e-30)).item()


def assert_accepted(case: Case, out: torch.Tensor, lse: torch.Tensor, lse_limit: float = 2e-2) -> None:
    """Error against float64 on the same e4m3 values within twice that of a bf16 run; empty rows exact."""
    inputs = (
        case.q.float(),
        torch.nan_to_num(case.kv_cache.float()),
        case.block_table.clamp(min=0),
        case.seq_lens,
        SCALE,
    )
    options = {"query_starts": case.query_starts, "query_scale": case.query_scale, "kv_scale": case.kv_scale}
    truth, truth_lse = mla_decode_reference(*inputs, **options)
    same, _ = mla_decode_reference(*inputs, **options, dtype=torch.bfloat16)
    assert out.isfinite().all()
    assert relative_error(out, truth) <= 2 * relative_error(same, truth) + 1e-6
    empty = truth_lse == -torch.inf
    assert (lse[empty] == -torch.inf).all()
    assert (out[empty] == 0).all()
    torch.testing.assert_close(lse[~empty].double(), truth_lse[~empty], rtol=0, atol=lse_limit)


@pytest.mark.parametrize("queries", [1, 2, 4])
@pytest.mark.parametrize("heads", [8, 16, 24, 32, 40, 64, 128])
def test_heads_and_query_tokens(heads: int, queries: int) -> None:
    case = make_case(heads, queries, [5, 64, 129, 0, 4097, 1000])
    assert_accepted(case, *run(case))


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("lengths", [[65536], [1], [64], [0], [300, 9000, 63, 65], [128, 192, 256] * 60])
def test_lengths(heads: int, lengths: list[int]) -> None:
    case = make_case(heads, 1, lengths)
    assert_accepted(case, *run(case))


@pytest.mark.parametrize("page_tokens", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_page_sizes(heads: int, page_tokens: int) -> None:
    case = make_case(heads, 1, [1, 77, 4000], page_tokens)
    assert_accepted(case, *run(case))


@pytest.mark.parametrize("heads", [16, 64])
def test_requests_of_different_query_counts(heads: int) -> None:
    case = make_case(heads, [1, 4, 0, 3, 2], [100, 3000, 0, 9000, 7])
    assert_accepted(case, *run(case))


@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_scores_that_outrun_the_maximum_in_use(heads: int) -> None:
    case = make_case(heads, 1, [200, 5000, 70000])
    growth = torch.linspace(0.1, 4, len(case.kv_cache), device="cuda")
    case.kv_cache = (case.kv_cache.float() * growth[:, None, None]).to(E4M3)
    # The tensor core cuts sums of e4m3 products at 13 fraction bits (docs/kernels.md): scores of up to 28 lose up to 0.03.
    assert_accepted(case, *run(case), lse_limit=4e-2)


@pytest.mark.parametrize("heads", [16, 32, 64])
def test_repeated_launches_give_the_same_bits(heads: int) -> None:
    case = make_case(heads, 1, [9000, 70, 2000, 33000], seed=5)
    first, _ = run(case)
    for _ in range(50):
        assert torch.equal(run(case)[0], first)


def test_wrong_inputs_name_the_culprit() -> None:
    case = make_case(16, 1, [64])
    plan = MlaDecodePlan(fp8_workspace(16, 1, 1, "cuda"), 1)
    scales = (case.query_scale, case.kv_scale)
    with pytest.raises(ValueError, match=r"plan: update\(\) has not been called"):
        mla_decode_fp8(case.q, case.kv_cache, plan, SCALE, *scales)
    plan.update(case.seq_lens, case.block_table, 64)
    with pytest.raises(ValueError, match=r"q: dtype torch\.bfloat16, allowed: torch\.float8_e4m3fn"):
        mla_decode_fp8(case.q.bfloat16(), case.kv_cache, plan, SCALE, *scales)
    with pytest.raises(ValueError, match=r"kv_scale: shape \(\), allowed: \(1,\)"):
        mla_decode_fp8(case.q, case.kv_cache, plan, SCALE, case.query_scale, case.kv_scale[0])
    wide = MlaDecodePlan(MlaWorkspace(64, 1, 1, "cuda", (128,)), 1)
    wide.update(case.seq_lens, case.block_table, 64)
    with pytest.raises(ValueError, match=r"row tiles of 128 rows, allowed: \(16, 32, 64\); use fp8_workspace"):
        mla_decode_fp8(case.q[:, :1].expand(-1, 64, -1), case.kv_cache, wide, SCALE, *scales)
