# SPDX-License-Identifier: Apache-2.0
"""MLA prefill on a cached prefix without a GPU: how a batch is cut, and the numbers with attention by the reference."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import cached_prefill_case
import pytest
import torch
import triton
from cached_prefill_case import BATCHES, make_case, torch_attend
from hypothesis import given
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenspeed_plugin.kernels.mla.cached_prefill import making, packing, prefill
from tokenspeed_plugin.kernels.mla.cached_prefill.groups import (
    WorkspaceTooSmallError,
    group_requests,
    workspace_bytes,
)

CONSTANTS = {
    "find_slots": {"page_tokens": 64, "block_tokens": packing.SLOT_TOKENS},
    "gather_tokens": {
        "page_tokens": 64,
        "latent_dims": 512,
        "rope_dims": 64,
        "nope_dims": 128,
        "block_tokens": packing.GATHER_TOKENS,
    },
}
TYPES = {
    "table": "*i32", "kv_starts": "*i32", "slots": "*i64", "kv": "*bf16", "latents": "*bf16", "keys": "*bf16",
    "num_tokens": "i32", "num_heads": "i32",
}  # fmt: skip
TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "sm_100": GPUTarget("cuda", 100, 32)}

requests = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 5000)), min_size=1, max_size=12)


@given(requests, st.integers(1, 128), st.integers(1, 40))
def test_every_request_and_head_is_in_one_group_that_fits(
    batch: list[tuple[int, int]], heads: int, limit_mib: int
) -> None:
    queries, kv = [q for q, _ in batch], [q + context for q, context in batch]
    limit = limit_mib << 20
    try:
        groups = group_requests(queries, kv, heads, limit)
    except WorkspaceTooSmallError:
        assert any(workspace_bytes(tokens, 1) > limit for tokens in kv)
        return
    covered = [request for group in groups for request in range(group.requests.start, group.requests.stop)]
    assert covered == sorted(set(covered))
    assert set(covered) >= {request for request, count in enumerate(queries) if count}
    for group in groups:
        assert group.bytes() <= limit
        assert group.heads == heads or group.heads in (1, 2, 4, 8, 16, 32, 64)
        larger = min(2 * group.heads, heads)
        assert group.heads == heads or workspace_bytes(group.num_kv_tokens, larger) > limit
        lengths = [kv[r] if queries[r] else 0 for r in range(len(kv))][group.requests]
        assert [b - a for a, b in itertools.pairwise(group.kv_starts)] == lengths
        assert [b - a for a, b in itertools.pairwise(group.query_starts)] == queries[group.requests]
        assert (group.longest_kv, group.longest_query) == (max(lengths), max(queries[group.requests]))


def test_heads_are_cut_before_requests() -> None:
    limit = 2 << 30
    assert [(g.requests, g.heads) for g in group_requests([256], [131072], 16, limit)] == [(slice(0, 1), 16)]
    assert [(g.requests, g.heads) for g in group_requests([256], [131072], 128, limit)] == [(slice(0, 1), 16)]
    assert [(g.requests, g.heads) for g in group_requests([256] * 5, [65536] * 5, 128, limit)] == [
        (slice(0, 4), 8),
        (slice(4, 5), 32),
    ]


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    with pytest.raises(WorkspaceTooSmallError, match="1000 KV tokens of one head take 1920000 bytes"):
        group_requests([3, 4], [10, 1000], 16, 1 << 20)
    with pytest.raises(ValueError, match="request 1: 3 KV tokens, allowed: at least its 4 new ones"):
        group_requests([3, 4], [10, 3], 16, 1 << 30)


@pytest.mark.parametrize(
    ("name", "page_tokens"), [*((name, 16) for name in BATCHES), *(("ragged", pages) for pages in (1, 64, 128))]
)
def test_it_computes_the_definition_and_reads_nothing_else(name: str, page_tokens: int) -> None:
    case = make_case(*BATCHES[name], page_tokens=page_tokens)
    out, _ = case.run(torch_attend)
    case.check(out)


def test_a_small_workspace_changes_nothing_but_the_number_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(*BATCHES["ragged"])
    whole, one = case.run(torch_attend)
    cut, groups = case.run(torch_attend, workspace_bytes(170, 2))
    assert (one, groups) == (1, 3)
    assert torch.equal(cut, whole)
    monkeypatch.setattr(making, "UNFOLD_TOKENS", 37)
    assert torch.equal(case.run(torch_attend)[0], whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(20, 3, 191, dtype=torch.bfloat16)}, r"q: shape \(20, 3, 191\), allowed: \(20, 3, 192\)"),
        ({"weights": torch.zeros(3, 256, 512)}, "weights: dtype torch.float32, allowed: torch.bfloat16"),
        ({"workspace": torch.zeros(100, dtype=torch.uint8)}, "workspace: 100 bytes, allowed: at least"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    case = make_case(*BATCHES["one"])
    size = workspace_bytes(150, 3)
    plan = prefill.plan_cached_prefill([20], [150], case.table, 16, 3, size)
    out = torch.empty(20, 3, 128, dtype=torch.bfloat16)
    workspace = torch.empty(size, dtype=torch.uint8)
    operands = {"q": case.q, "weights": case.weights, "workspace": workspace, **change}
    with pytest.raises(ValueError, match=message):
        prefill.mla_cached_prefill(
            operands["q"], case.cache, operands["weights"], plan, 1.0, operands["workspace"], torch_attend, out
        )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", CONSTANTS)
def test_the_triton_kernels_compile(kernel: str, target: str) -> None:
    function, constants = getattr(packing, kernel), CONSTANTS[kernel]
    types = {name: "constexpr" if name in constants else TYPES.get(name, "i64") for name in function.arg_names}
    compiled = triton.compile(ASTSource(function, types, constants), target=TARGETS[target])
    assert len(compiled.asm["cubin"]) > 1000


def test_the_triton_kernels_compute_what_torch_does() -> None:
    """In a process of its own: Triton interprets only when it is told so before its first import."""
    script = Path(__file__).with_name("interpreted_packing.py")
    search = os.pathsep.join((str(Path(cached_prefill_case.__file__).parent), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "6 cases agree with torch"
