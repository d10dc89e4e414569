# SPDX-License-Identifier: Apache-2.0
"""Batches of prefills on cached prefixes, with poison wherever nothing may be read, and what they must come to."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from tokenspeed_plugin.kernels.mla.cached_prefill.groups import workspace_bytes
from tokenspeed_plugin.kernels.mla.cached_prefill.making import PlanMaking, gather_and_products
from tokenspeed_plugin.kernels.mla.cached_prefill.prefill import Attend, mla_cached_prefill, plan_cached_prefill
from tokenspeed_plugin.kernels.mla.cached_prefill.reference import mla_cached_prefill_reference
from tokenspeed_plugin.kernels.mla.prefill_reference import mla_prefill_reference

SCALE = 192**-0.5
NAN = float("nan")

BATCHES = {
    "one": ([20], [150]),
    "ragged": ([7, 40, 1, 33], [60, 170, 65, 33]),
    "no prefix": ([40, 5], [40, 5]),
    "some without a prefix": ([40, 5, 9], [130, 5, 72]),
    "empty requests": ([0, 17, 0, 3, 0], [0, 80, 90, 64, 0]),
}


def torch_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_starts: torch.Tensor,
    kv_starts: torch.Tensor,
    longest_query: int,
    longest_kv: int,
    softmax_scale: float,
    out: torch.Tensor,
) -> None:
    """Attention by the torch reference, in fp32."""
    for starts, longest in ((query_starts, longest_query), (kv_starts, longest_kv)):
        assert longest == max(end - start for start, end in itertools.pairwise(starts.tolist()))
    result = mla_prefill_reference(q, k, v, query_starts, kv_starts, softmax_scale, dtype=torch.float32)[0]
    out.copy_(result)


@dataclass
class Case:
    """Inputs of a batch."""

    query_lens: list[int]
    kv_lens: list[int]
    q: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    weights: torch.Tensor

    @property
    def query_starts(self) -> torch.Tensor:
        """[requests + 1] int32."""
        return torch.tensor([0, *itertools.accumulate(self.query_lens)], dtype=torch.int32)

    def truth(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """The reference on the slots that requests own."""
        lengths = torch.tensor(self.kv_lens, dtype=torch.int32)
        clean, table = torch.nan_to_num(self.cache), self.table.clamp(min=0)
        return mla_cached_prefill_reference(
            self.q, clean, table, lengths, self.query_starts, self.weights, SCALE, dtype=dtype
        )

    def check(self, out: torch.Tensor, rows: slice = slice(None)) -> None:
        """Assert that no element errs by more than the same types allow, and a floor, and all together by less than that."""
        truth = self.truth()
        bound = 2 * (self.truth(torch.bfloat16).double() - truth).abs().max() + 1e-3
        difference = out.double() - truth[rows]
        assert difference.abs().max() <= bound
        assert difference.norm() <= 8e-3 * truth[rows].norm()

    def run(
        self, attend: Attend, limit_bytes: int | None = None, plan_making: PlanMaking = gather_and_products
    ) -> tuple[torch.Tensor, int]:
        """The result, between columns that must stay as they are, and the number of groups."""
        heads = self.q.shape[1]
        size = limit_bytes or workspace_bytes(sum(self.kv_lens), heads)
        page_tokens = self.cache.shape[1]
        plan = plan_cached_prefill(self.query_lens, self.kv_lens, self.table, page_tokens, heads, size, plan_making)
        workspace = torch.full((size,), 255, dtype=torch.uint8, device=self.q.device)  # NaN in bf16
        wide = torch.full((len(self.q), heads + 1, 136), NAN, dtype=torch.bfloat16, device=self.q.device)
        mla_cached_prefill(self.q, self.cache, self.weights, plan, SCALE, workspace, attend, wide[:, :heads, :128])
        assert wide[:, heads].isnan().all()
        assert wide[..., 128:].isnan().all()
        return wide[:, :heads, :128], len(plan.groups)


def make_case(
    query_lens: list[int], kv_lens: list[int], heads: int = 3, page_tokens: int = 16, device: str = "cpu", seed: int = 0
) -> Case:
    """Random inputs: pages in any order, free pages and slots past a request's end NaN, table entries past it -1."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(torch.bfloat16)

    requests, pages = len(kv_lens), max(-(-length // page_tokens) for length in kv_lens) + 1
    cache = random(requests * pages + 1, page_tokens, 576)
    cache[0] = NAN
    table = torch.randperm(requests * pages, device=device, generator=generator).to(torch.int32) + 1
    table = table.view(requests, pages)
    for request, length in enumerate(kv_lens):
        used = -(-length // page_tokens)
        if length % page_tokens:
            cache[table[request, used - 1].item(), length % page_tokens :] = NAN
        cache[table[request, used:].long()] = NAN
        table[request, used:] = -1
    weights = random(heads, 256, 512) * 512**-0.5
    # As vLLM hands queries over: rows of a larger tensor.
    q = random(sum(query_lens), heads + 2, 192)[:, 1 : heads + 1]
    return Case(query_lens, kv_lens, q, cache, table, weights)
