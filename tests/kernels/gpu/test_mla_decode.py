# SPDX-License-Identifier: Apache-2.0
"""MLA decode on Hopper against the float64 reference, with poisoned memory wherever the kernel must not look."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tokenspeed_plugin.kernels.mla.geometry import LATENT_DIMS, NARROW_ROWS, WIDE_ROWS
from tokenspeed_plugin.kernels.mla.reference import mla_decode_reference
from tokenspeed_plugin.kernels.mla.sm90.decode import MlaDecodePlan, MlaWorkspace, mla_decode
from tokenspeed_plugin.kernels.mla.split import SplitPlan

NAN = float("nan")
SCALE = 576**-0.5


@dataclass
class Case:
    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor | None
    heads: int
    max_query_tokens: int

    @property
    def page_tokens(self) -> int:
        return self.kv_cache.shape[1]


def make_case(heads: int, queries: int | list[int], lengths: list[int], page_tokens: int = 64, seed: int = 0) -> Case:
    """Random inputs; free pages, slots past a request's end and table entries past its last page are poisoned."""
    generator = torch.Generator("cuda").manual_seed(seed)
    requests, pages = len(lengths), max(1, *(-(-length // page_tokens) for length in lengths))
    kv_cache = torch.randn(
        requests * pages + 1, page_tokens, 576, device="cuda", dtype=torch.bfloat16, generator=generator
    )
    kv_cache[0] = NAN
    table = torch.randperm(requests * pages, device="cuda", dtype=torch.int32, generator=generator) + 1
    table = table.view(requests, pages)
    for request, length in enumerate(lengths):
        used = -(-length // page_tokens)
        if length % page_tokens:
            kv_cache[table[request, used - 1].item(), length % page_tokens :] = NAN
        table[request, used:] = -1
    counts = queries if isinstance(queries, list) else [queries] * requests
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device="cuda")
    q = torch.randn(sum(counts), heads, 576, device="cuda", dtype=torch.bfloat16, generator=generator)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    given = starts if isinstance(queries, list) else None
    return Case(q, kv_cache, table, seq_lens, given, heads, max(counts))


def run(
    case: Case,
    compiled: tuple[int, ...] = (NARROW_ROWS, WIDE_ROWS),
    cooperative: bool = True,
    dependent_launch: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    workspace = MlaWorkspace(case.heads, case.max_query_tokens, len(case.seq_lens), "cuda", compiled, cooperative)
    workspace.partial_out.fill_(NAN)
    workspace.partial_lse.fill_(NAN)
    plan = MlaDecodePlan(workspace, len(case.seq_lens))
    plan.update(case.seq_lens, case.block_table, case.page_tokens)
    out = torch.full((*case.q.shape[:2], LATENT_DIMS), NAN, dtype=torch.bfloat16, device="cuda")
    lse = torch.full(case.q.shape[:2], NAN, device="cuda")
    q_nope, q_rope = case.q.split((LATENT_DIMS, 64), dim=-1)
    given = {"query_starts": case.query_starts, "dependent_launch": dependent_launch}
    mla_decode(q_nope, q_rope, case.kv_cache, plan, SCALE, out=out, lse=lse, **given)
    torch.cuda.synchronize()
    return out, lse


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    return ((value.double() - truth).norm() / truth.norm().clamp(min=1e-30)).item()


def assert_accepted(case: Case, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Error against float64 within twice that of a bf16 run of the same definition; empty rows exact."""
    clean = torch.nan_to_num(case.kv_cache)
    inputs = (case.q, clean, case.block_table.clamp(min=0), case.seq_lens, SCALE)
    truth, truth_lse = mla_decode_reference(*inputs, query_starts=case.query_starts)
    same_type, _ = mla_decode_reference(*inputs, query_starts=case.query_starts, dtype=torch.bfloat16)
    assert out.isfinite().all()
    assert relative_error(out, truth) <= 2 * relative_error(same_type, truth) + 1e-6
    empty = truth_lse == -torch.inf
    assert (lse[empty] == -torch.inf).all()
    assert (out[empty] == 0).all()
    torch.testing.assert_close(lse[~empty].double(), truth_lse[~empty], rtol=0, atol=1e-3)


@pytest.mark.parametrize("queries", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("heads", [8, 16, 24, 32, 40, 64, 96, 128])
def test_heads_and_query_tokens(heads: int, queries: int) -> None:
    case = make_case(heads, queries, [5, 64, 129, 0, 4097, 1000])
    assert_accepted(case, *run(case))


@pytest.mark.parametrize("compiled", [(NARROW_ROWS,), (WIDE_ROWS,)])
@pytest.mark.parametrize("lengths", [[65536], [1], [64], [0], [300, 9000, 63, 65]])
def test_both_row_tiles(compiled: tuple[int, ...], lengths: list[int]) -> None:
    case = make_case(16, 1, lengths)
    assert_accepted(case, *run(case, compiled))


@pytest.mark.parametrize("page_tokens", [1, 2, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("heads", [16, 64])
def test_page_sizes(heads: int, page_tokens: int) -> None:
    """Fault 55: every page size that is claimed, 128 and more included."""
    case = make_case(heads, 2, [1, 77, 4000], page_tokens)
    assert_accepted(case, *run(case))


def test_the_page_size_changes_nothing_but_the_place_of_tokens() -> None:
    """Fault 59: the same tokens in pages of 1 and of 64."""
    large = make_case(16, 1, [640, 1280])
    small = Case(
        large.q,
        large.kv_cache.view(-1, 1, 576),
        (large.block_table[..., None] * 64 + torch.arange(64, device="cuda", dtype=torch.int32)).flatten(1),
        large.seq_lens,
        None,
        large.heads,
        1,
    )
    for mine, theirs in zip(run(large), run(small), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("heads", [16, 64])
def test_requests_of_different_query_counts(heads: int) -> None:
    case = make_case(heads, [1, 4, 0, 3, 2], [100, 3000, 0, 9000, 7])
    assert_accepted(case, *run(case))


@pytest.mark.parametrize("heads", [16, 64])
def test_padding_is_zero_and_leaves_real_rows_as_they_are(heads: int) -> None:
    """Faults 56 and 57: pad rows with length 0 and table entries -1, output buffer full of NaN."""
    bare = make_case(heads, 1, [700, 4000, 65])
    table = torch.cat([bare.block_table, torch.full_like(bare.block_table[:1], -1)])
    seq_lens = torch.cat([bare.seq_lens, torch.zeros_like(bare.seq_lens[:1])])
    padded = Case(torch.cat([bare.q, bare.q[:1]]), bare.kv_cache, table, seq_lens, None, heads, 1)
    out, lse = run(padded)
    real_out, real_lse = run(bare)
    assert torch.equal(out[:3], real_out)
    assert torch.equal(lse[:3], real_lse)
    assert (out[3] == 0).all()
    assert (lse[3] == -torch.inf).all()


def test_tokens_past_the_last_request_are_cleared() -> None:
    case = make_case(16, [2, 1], [500, 80])
    case.q = torch.cat([case.q, case.q])
    out, lse = run(case)
    assert (out[3:] == 0).all()
    assert (lse[3:] == -torch.inf).all()


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_split_and_whole_requests_agree(heads: int) -> None:
    """Fault 58's kin: one request over all multiprocessors, and the same among many, where it is hardly split."""
    lengths = [4096] * 200
    case = make_case(heads, 1, lengths)
    together, _ = run(case)
    alone = Case(case.q[:1], case.kv_cache, case.block_table[:1], case.seq_lens[:1], None, heads, 1)
    single, _ = run(alone)
    assert relative_error(single, together[:1].double()) < 4e-3


@pytest.mark.parametrize("heads", [16, 64])
def test_a_captured_step_follows_new_lengths(heads: int) -> None:
    case = make_case(heads, 2, [9000, 300, 4000, 2500], seed=3)
    workspace = MlaWorkspace(heads, 2, 4, "cuda")
    plan = MlaDecodePlan(workspace, 4)
    q_nope, q_rope = case.q.split((LATENT_DIMS, 64), dim=-1)
    out = torch.empty_like(q_nope, memory_format=torch.contiguous_format)
    lse = torch.empty(q_nope.shape[:2], device="cuda")

    def step() -> None:
        plan.update(case.seq_lens, case.block_table, case.page_tokens)
        for _ in range(3):  # as many layers
            mla_decode(q_nope, q_rope, case.kv_cache, plan, SCALE, out=out, lse=lse)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([9000, 300, 4000, 2500], [130, 0, 4000, 64], [0, 0, 0, 0], [8999, 299, 1, 2]):
        case.seq_lens.copy_(torch.tensor(lengths))
        out.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        clean = Case(case.q, case.kv_cache, case.block_table, case.seq_lens, None, heads, 2)
        assert_accepted(clean, out, lse)


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_repeated_launches_give_the_same_bits(heads: int) -> None:
    """A race would move the result: hundreds of launches, back to back, into poisoned outputs."""
    case = make_case(heads, 1, [9000, 70, 2000, 33000], seed=5)
    workspace = MlaWorkspace(heads, 1, 4, "cuda")
    plan = MlaDecodePlan(workspace, 4)
    plan.update(case.seq_lens, case.block_table, case.page_tokens)
    q_nope, q_rope = case.q.split((LATENT_DIMS, 64), dim=-1)
    first, _ = mla_decode(q_nope, q_rope, case.kv_cache, plan, SCALE)
    for _ in range(300):
        out = torch.full_like(first, NAN)
        mla_decode(q_nope, q_rope, case.kv_cache, plan, SCALE, out=out)
        assert torch.equal(out, first)


@pytest.mark.parametrize("lengths", [[0], [1], [65536], [0, 65, 0, 4000], list(range(0, 9000, 37))])
def test_the_device_plans_as_the_model_does(lengths: list[int]) -> None:
    case = make_case(16, 1, lengths)
    workspace = MlaWorkspace(16, 1, len(lengths), "cuda")
    plan = MlaDecodePlan(workspace, len(lengths))
    plan.update(case.seq_lens, case.block_table, case.page_tokens)
    groups, requests = workspace.groups, len(lengths)
    words = plan.words.tolist()
    model = SplitPlan.of(lengths, groups)
    assert words[:groups] == [span.request for span in model.spans]
    assert words[groups : 2 * groups] == [span.first_tile for span in model.spans]
    assert words[2 * groups : 3 * groups] == [span.tiles for span in model.spans]
    assert tuple(words[5 * groups : 5 * groups + requests]) == model.first_group
    assert tuple(words[5 * groups + requests : 5 * groups + 2 * requests]) == model.last_group


def test_strided_queries() -> None:
    """vLLM hands over the product of heads by tokens, transposed."""
    case = make_case(16, 1, [500, 80, 4000])
    q_nope, q_rope = case.q.split((LATENT_DIMS, 64), dim=-1)
    by_head = q_nope.transpose(0, 1).contiguous().transpose(0, 1)
    plan = MlaDecodePlan(MlaWorkspace(16, 1, 3, "cuda"), 3)
    plan.update(case.seq_lens, case.block_table, case.page_tokens)
    expected, _ = mla_decode(q_nope, q_rope, case.kv_cache, plan, SCALE)
    out, _ = mla_decode(by_head, q_rope, case.kv_cache, plan, SCALE)
    assert torch.equal(out, expected)


def test_large_scores() -> None:
    """Scores that outrun the lagging maximum again and again."""
    case = make_case(16, 4, [2, 1, 9000])
    case.q *= 4
    case.kv_cache *= torch.linspace(0.1, 4, case.kv_cache.shape[0], device="cuda", dtype=torch.bfloat16)[:, None, None]
    assert_accepted(case, *run(case))


def test_wrong_inputs_name_the_culprit() -> None:
    case = make_case(16, 1, [64])
    plan = MlaDecodePlan(MlaWorkspace(16, 1, 1, "cuda"), 1)
    q_nope, q_rope = case.q.split((LATENT_DIMS, 64), dim=-1)
    with pytest.raises(ValueError, match=r"plan: update\(\) has not been called"):
        mla_decode(q_nope, q_rope, case.kv_cache, plan, SCALE)
    with pytest.raises(ValueError, match="page_tokens=48, allowed: a power of two"):
        plan.update(case.seq_lens, case.block_table, 48)
    plan.update(case.seq_lens, case.block_table, 64)
    with pytest.raises(ValueError, match=r"q_nope: dtype torch\.float16, allowed: torch\.bfloat16"):
        mla_decode(q_nope.half(), q_rope, case.kv_cache, plan, SCALE)
    with pytest.raises(ValueError, match=r"kv_cache: shape .*, allowed: \(2, 64, 576\)"):
        mla_decode(q_nope, q_rope, case.kv_cache[..., :512], plan, SCALE)


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_the_way_blocks_are_started_changes_no_bit(heads: int) -> None:
    case = make_case(heads, 1, [20_000, 65, 7_000])
    expected = run(case)
    for cooperative, dependent in ((False, True), (True, False), (False, False)):
        got = run(case, cooperative=cooperative, dependent_launch=dependent)
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
