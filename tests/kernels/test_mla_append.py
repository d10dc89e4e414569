# SPDX-License-Identifier: Apache-2.0
"""The append to the latent cache without a GPU: the reference against arithmetic of its own, the Triton tier interpreted and compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from append_cases import E4M3, EPSILON, LATENT, ROPE, Case, check, make_case
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenspeed_plugin.kernels.mla import triton_append
from tokenspeed_plugin.kernels.mla.append_reference import mla_append_reference
from tokenspeed_plugin.kernels.mla.append_solutions import append_shape, append_signature
from tokenspeed_plugin.kernels.registry import Platform
from tokenspeed_plugin.kernels.select import KernelRequest, KernelSelectionError, select_kernel


@pytest.mark.parametrize("page_tokens", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cache_dtype", [None, E4M3], ids=str)
def test_the_reference_rounds_once_and_writes_only_what_it_must(
    page_tokens: int, dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> None:
    for interleaved in (True, False):
        check(
            make_case(9, page_tokens=page_tokens, dtype=dtype, cache_dtype=cache_dtype, interleaved=interleaved),
            mla_append_reference,
        )


@pytest.mark.parametrize("interleaved", [True, False])
def test_the_reference_is_the_definition(interleaved: bool) -> None:
    """Pairs as complex numbers, tokens one by one, in float64."""
    case = make_case(4, heads=3, page_tokens=16, interleaved=interleaved, dtype=torch.float64)
    before = case.copied()
    latent, key = case.run(mla_append_reference)
    first = slice(0, ROPE, 2) if interleaved else slice(0, ROPE // 2)
    second = slice(1, ROPE, 2) if interleaved else slice(ROPE // 2, ROPE)
    cosines_and_sines = case.rope_table.double()
    for token, position in enumerate(case.positions.tolist()):
        turn = torch.complex(cosines_and_sines[position, : ROPE // 2], cosines_and_sines[position, ROPE // 2 :])
        rows = [(case.q[token, head, -ROPE:], before.q[token, head, -ROPE:]) for head in range(3)]
        for turned, given in (*rows, (key[token], case.latent[token, LATENT:])):
            expected = torch.complex(given[first], given[second]) * turn
            torch.testing.assert_close(torch.complex(turned[first], turned[second]), expected, rtol=0, atol=1e-12)
        values = case.latent[token, :LATENT]
        root = (float((values**2).sum()) / LATENT + EPSILON) ** 0.5
        torch.testing.assert_close(latent[token], values / root * case.norm_weight, rtol=0, atol=1e-12)
    for slot, token in zip(case.slots.tolist()[:4], range(4), strict=True):
        stored = case.kv_cache[slot // 16, slot % 16]
        assert torch.equal(stored, torch.cat((latent[token], key[token])))


def test_without_a_cache_or_with_padding_alone_nothing_is_written() -> None:
    check(make_case(0, padding=4), mla_append_reference)
    case = make_case(3)
    check(replace(case, slots=None), mla_append_reference)
    check(replace(case, kv_cache=None, slots=None), mla_append_reference)


def test_a_norm_without_weights_is_one_of_ones() -> None:
    case = make_case(3, has_weight=False)
    with_ones = case.copied(norm_weight=torch.ones(LATENT, dtype=torch.bfloat16))
    assert torch.equal(case.run(mla_append_reference)[0], with_ones.run(mla_append_reference)[0])
    check(make_case(3, has_weight=False), mla_append_reference)


def test_e4m3_is_clamped_to_its_range_and_needs_a_scale() -> None:
    case = make_case(3, cache_dtype=E4M3, scale=1e-3)
    case.run(mla_append_reference)
    written = case.kv_cache.float().view(-1, LATENT + ROPE)[case.slots[:3]]
    assert written.isfinite().all()
    assert written.abs().max() == 448.0
    with pytest.raises(ValueError, match=r"kv_scale is None, allowed for an e4m3 cache: \[1\] fp32"):
        replace(case, kv_scale=None).run(mla_append_reference)


def test_the_check_of_cases_finds_what_a_kernel_could_do_wrong() -> None:
    def skips_the_norm(*operands: torch.Tensor, **named: object) -> tuple[torch.Tensor, torch.Tensor]:
        return mla_append_reference(*operands[:3], None, *operands[4:], **named)  # type: ignore[arg-type]

    def turns_the_other_way(*operands: torch.Tensor, **named: object) -> tuple[torch.Tensor, torch.Tensor]:
        return mla_append_reference(*operands, **{**named, "interleaved": not named["interleaved"]})  # type: ignore[arg-type]

    def writes_padding(*operands: torch.Tensor, **named: object) -> tuple[torch.Tensor, torch.Tensor]:
        return mla_append_reference(*operands[:7], operands[7].clamp(min=0), **named)  # type: ignore[arg-type]

    for wrong in (skips_the_norm, turns_the_other_way, writes_padding):
        case: Case = make_case(3)
        with pytest.raises(AssertionError):
            check(case, wrong)


TARGETS = {
    "sm_90": (GPUTarget("cuda", 90, 32), "cubin"),
    "sm_100": (GPUTarget("cuda", 100, 32), "cubin"),
    "gfx950": (GPUTarget("hip", "gfx950", 64), "hsaco"),
}
POINTERS = {
    **dict.fromkeys(("q", "latent", "weight", "table", "out_latent", "out_key"), "*bf16"),
    **dict.fromkeys(("positions", "slots"), "*i64"),
    "scale": "*fp32",
    "epsilon": "fp32",
}
STRIDES = ("_token", "_head", "_row", "_page")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("cache", ["*bf16", "*fp8e4nv"])
def test_it_compiles(cache: str, target: str) -> None:
    kernel = triton_append.append_tokens
    constants = {
        "num_heads": 16,
        "nope_dims": 128,
        "latent_dims": LATENT,
        "rope_dims": ROPE,
        "block_heads": triton_append.BLOCK_HEADS,
        "interleaved": cache == "*bf16",
        "has_weight": True,
        "is_quantised": cache != "*bf16",
    }
    types = {
        name: "constexpr"
        if name in constants
        else cache
        if name == "cache"
        else POINTERS.get(name, "i64" if name.endswith(STRIDES) else "i32")
        for name in kernel.arg_names
    }
    gpu, binary = TARGETS[target]
    compiled = triton.compile(ASTSource(kernel, types, constants), target=gpu)
    assert len(compiled.asm[binary]) > 1000
    assert compiled.metadata.shared <= 16384


def test_it_computes_the_definition() -> None:
    """In a process of its own: Triton interprets only when it is told so before its first import."""
    script = Path(__file__).with_name("interpreted_append.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(script.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "12 cases agree with the reference"


def request(
    platform: Platform, dtype: str = "bfloat16", cache: str = "bfloat16", latent: int = LATENT
) -> KernelRequest:
    return KernelRequest("mla", "append", append_signature(dtype, cache), append_shape(latent, ROPE), platform)


HOPPER = Platform("cuda", (9, 0), "NVIDIA H200")


def test_the_choice_goes_by_platform_and_formats() -> None:
    for cache in ("bfloat16", "float8_e4m3fn"):
        assert select_kernel(request(HOPPER, cache=cache)).spec.solution == "vllm", (
            "nothing of ours was measured faster"
        )
        assert select_kernel(request(HOPPER, cache=cache), setting="append=triton").spec.solution == "triton"
    assert select_kernel(request(Platform("cpu"), "float32", "float32")).spec.solution == "reference"
    for wrong, reason in (
        (request(Platform("cuda", (8, 0))), "platform cuda 8.0"),
        (request(HOPPER, cache="float8_e5m2"), "formats kv=float8_e5m2"),
        (request(HOPPER, latent=576), "latent_dims=576, allowed: 16 to 4096, a power of two"),
    ):
        with pytest.raises(KernelSelectionError, match=reason):
            select_kernel(wrong, solution="triton")


def test_it_is_named_by_a_key_of_its_own() -> None:
    assert select_kernel(request(HOPPER), setting="mla=cuda_sm90,append=triton").reason == "asked for by --kernels"
    assert select_kernel(request(HOPPER), setting="mla=cuda_sm90").spec.solution == "vllm"
    with pytest.raises(KernelSelectionError, match="asks for append=reference, which does not fit"):
        select_kernel(request(HOPPER), setting="append=reference")
    with pytest.raises(ValueError, match=r"append='cuda_sm90', allowed solutions: reference, triton, vllm"):
        select_kernel(request(HOPPER), setting="append=cuda_sm90")
