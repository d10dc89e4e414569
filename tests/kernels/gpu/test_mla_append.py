# SPDX-License-Identifier: Apache-2.0
"""The append's Triton kernel on a GPU against the float64 reference, with poison wherever it must not write, and inside a CUDA graph."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from append_cases import E4M3, LATENT, NAN, ROPE, Case, check, make_case, truth_of

from tokenspeed_plugin.kernels.mla.append_reference import mla_append_reference
from tokenspeed_plugin.kernels.mla.triton_append import mla_append_triton


@pytest.mark.parametrize("cache_dtype", [None, E4M3], ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("page_tokens", [1, 16, 32, 64, 128])
def test_pages_styles_and_caches(page_tokens: int, interleaved: bool, cache_dtype: torch.dtype | None) -> None:
    for tokens, heads in ((1, 16), (37, 20), (300, 128)):
        case = make_case(
            tokens,
            heads=heads,
            page_tokens=page_tokens,
            interleaved=interleaved,
            cache_dtype=cache_dtype,
            device="cuda",
        )
        check(case, mla_append_triton)


def test_padding_alone_no_cache_no_slots_and_no_weights() -> None:
    check(make_case(0, padding=4, device="cuda"), mla_append_triton)
    case = make_case(3, device="cuda")
    check(replace(case, slots=None), mla_append_triton)
    check(replace(case, kv_cache=None, slots=None), mla_append_triton)
    check(make_case(3, has_weight=False, device="cuda"), mla_append_triton)
    check(make_case(5, dtype=torch.float16, device="cuda"), mla_append_triton)
    check(make_case(5, latent_pad=0, device="cuda"), mla_append_triton)
    check(make_case(0, padding=0, unslotted=0, device="cuda"), mla_append_triton)


def test_values_that_e4m3_has_not_are_clamped_and_nan_stays_nan() -> None:
    case = make_case(6, cache_dtype=E4M3, scale=1e-3, device="cuda")
    check(case, mla_append_triton)
    poisoned = make_case(6, cache_dtype=E4M3, device="cuda")
    poisoned.latent[2, 7] = NAN
    latent, _ = poisoned.run(mla_append_triton)
    rows = poisoned.kv_cache.float().view(-1, LATENT + ROPE)[poisoned.slots[:6]]
    assert latent[2].isnan().all()
    assert rows[2, :LATENT].isnan().all()
    assert rows[[0, 1, 3, 4, 5]].isfinite().all()


def test_a_cache_whose_pages_lie_apart() -> None:
    """As where the pages of all layers are interleaved."""
    case = make_case(70, page_tokens=16, device="cuda")
    pages = case.kv_cache.shape[0]
    whole = torch.full((pages, 3, 16, LATENT + ROPE), NAN, dtype=torch.bfloat16, device="cuda")
    check(replace(case, kv_cache=whole[:, 1]), mla_append_triton)
    assert whole[:, ::2].isnan().all()


def test_a_row_does_not_depend_on_those_beside_it() -> None:
    many = make_case(64, device="cuda")
    alone = replace(
        many.copied(),
        latent=many.latent[5:6],
        positions=many.positions[5:6],
        q=many.q[5:6].clone(),
        slots=many.slots[5:6],
    )
    latent, key = many.run(mla_append_triton)
    one_latent, one_key = alone.run(mla_append_triton)
    assert torch.equal(latent[5:6], one_latent)
    assert torch.equal(key[5:6], one_key)
    assert torch.equal(many.q[5:6], alone.q)


def left_by(
    given: Case, latent: torch.Tensor, key: torch.Tensor, expected: Case, *_: object, **__: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a replay has left, in the operands of the case that it is compared with."""
    expected.q.copy_(given.q)
    expected.kv_cache.view(torch.uint8).copy_(given.kv_cache.view(torch.uint8))
    return latent, key


@pytest.mark.parametrize("cache_dtype", [None, E4M3], ids=str)
def test_a_graph_follows_new_slots_positions_and_padding(cache_dtype: torch.dtype | None) -> None:
    case = make_case(24, padding=8, unslotted=0, cache_dtype=cache_dtype, device="cuda")
    given = case.copied()
    warm = case.copied()
    warm.run(mla_append_triton)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        latent, key = given.run(mla_append_triton)
    for step in range(4):
        fresh = make_case(24, padding=8, unslotted=0, cache_dtype=cache_dtype, device="cuda")
        shift = torch.roll(fresh.slots, step)
        shift[: 3 * step] = -1
        for target, source in ((given.q, fresh.q), (given.positions, (fresh.positions + step) % 300)):
            target.copy_(source)
        given.slots.copy_(shift)
        given.kv_cache.view(torch.uint8).copy_(fresh.kv_cache.view(torch.uint8))
        expected = replace(fresh, positions=given.positions.clone(), slots=shift)
        graph.replay()
        torch.cuda.synchronize()
        check(expected, functools.partial(left_by, given, latent, key, expected))


def test_the_reference_in_bf16_is_what_the_kernel_is() -> None:
    case = make_case(40, device="cuda")
    other = case.copied()
    ours, theirs = case.run(mla_append_triton), other.run(mla_append_reference)
    truth, exact = truth_of(make_case(40, device="cuda"))
    for mine, reference, true in zip((case.q, *ours), (other.q, *theirs), (truth.q, *exact), strict=True):
        errors = [((value.double() - true).norm() / true.norm()).item() for value in (mine, reference)]
        assert errors[0] <= 1.1 * errors[1]
