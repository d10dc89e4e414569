# SPDX-License-Identifier: Apache-2.0
"""How far the LSEs of FP8 decode are off because of the tensor core's sums: ``python -m benchmarks.latent.e4m3_sums``.

Calculates on the host what `test_scores_that_outrun_the_maximum_in_use[128]` (tests/kernels/gpu/test_mla_decode_fp8.py) gets
on an H200, from the same random inputs. The arithmetic was inferred from that test's LSEs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.latent.cuda_generator import CudaGenerator

FRACTION_BITS = 13
STEP_DIMS = 32
HEADS, DIMS, LENGTHS, PAGE_TOKENS = 128, 576, (200, 5000, 70000), 64
SCALE = DIMS**-0.5 * 0.37 * 0.71
MULTIPROCESSORS, ROW_TILES = 132, 2
LIMIT = 0.02
IN_ORDER = tuple(range(18))
UPPER_HALF_FIRST = (*range(8, 16), *range(8), 16, 17)
Floats = npt.NDArray[np.float64]


def exponents(values: Floats) -> Floats:
    """Those of 1.f x 2^e; far below all others for zeros."""
    return np.asarray(np.frexp(values)[1] - 1.0 - 1000.0 * (values == 0), np.float64)


def e4m3_product(queries: Floats, keys: Floats, order: tuple[int, ...]) -> Floats:
    """Row by row products of [n, dims] operands with e4m3 values, summed as Hopper's tensor core sums them.

    32 dims at a time, in the `order` given: their products and the sum so far are aligned to the largest exponent (of a
    product, the sum of its operands'), what is below its 13th fraction bit is cut; so is the sum.
    """
    total = np.zeros(len(queries))
    for step in order:
        dims = slice(STEP_DIMS * step, STEP_DIMS * (step + 1))
        terms = np.column_stack((queries[:, dims] * keys[:, dims], total))
        of_products = (exponents(queries[:, dims]) + exponents(keys[:, dims])).max(1)
        total = _cut(terms, np.maximum(of_products, exponents(total))[:, None]).sum(1)
        total = _cut(total, exponents(total))
    return total


def _cut(values: Floats, exponent: Floats) -> Floats:
    unit = np.exp2(exponent - FRACTION_BITS)
    return np.asarray(np.trunc(values / unit) * unit, np.float64)


@dataclass
class Inputs:
    """Queries [requests, heads, dims] as float32, cache [pages, tokens, dims] in e4m3, page table [requests, pages]."""

    q: torch.Tensor
    kv_pages: torch.Tensor
    table: torch.Tensor

    @classmethod
    def draw(cls) -> Inputs:
        """Those of the test, in its order."""
        generator, pages = CudaGenerator(0, MULTIPROCESSORS), -(-max(LENGTHS) // PAGE_TOKENS)
        slots = len(LENGTHS) * pages + 1
        values = torch.from_numpy(generator.randn(slots * PAGE_TOKENS * DIMS)).view(slots, PAGE_TOKENS, DIMS)
        kv_pages = values.mul_(2).to(torch.float8_e4m3fn)
        table = torch.from_numpy(generator.randperm(len(LENGTHS) * pages)).view(len(LENGTHS), pages) + 1
        growth = torch.linspace(0.1, 4, slots)[:, None, None]
        q = torch.from_numpy(generator.randn(len(LENGTHS) * HEADS * DIMS)).view(len(LENGTHS), HEADS, DIMS)
        q = (3 * q).to(torch.float8_e4m3fn).float()
        return cls(q, (kv_pages.float() * growth).to(torch.float8_e4m3fn), table)

    def keys(self, request: int) -> torch.Tensor:
        """[tokens, dims] as float32."""
        pages = self.kv_pages[self.table[request]].float()
        return pages.view(-1, DIMS)[: LENGTHS[request]]


def owners(request: int) -> npt.NDArray[np.int64]:
    """The warpgroup that has the scores of each token: tiles of a block's span by turns."""
    tiles = [-(-length // PAGE_TOKENS) for length in LENGTHS]
    groups = MULTIPROCESSORS // ROW_TILES
    starts = np.arange(groups) * sum(tiles) // groups
    tile = np.arange(LENGTHS[request]) // PAGE_TOKENS + sum(tiles[:request])
    return (tile - starts[np.searchsorted(starts, tile, "right") - 1]) & 1


def lse_errors(inputs: Inputs, request: int, orders: tuple[tuple[int, ...], tuple[int, ...]]) -> Floats:
    """[heads]: by how much the sums of the two warpgroups' orders move the LSE. The 400 largest scores of a row count."""
    keys, owner = inputs.keys(request), owners(request)
    errors = []
    for q in inputs.q[request]:
        scores = (keys @ q).double() * SCALE
        top = torch.topk(scores, min(len(scores), 400)).indices.numpy()
        true, base = scores.numpy()[top], scores.max().item()
        cut = np.empty(len(top))
        for group, order in enumerate(orders):
            mine = owner[top] == group
            rows = keys[torch.from_numpy(top[mine])].double().numpy()
            cut[mine] = e4m3_product(np.broadcast_to(q.double().numpy(), rows.shape), rows, order) * SCALE
        moved = (np.exp(cut - base) - np.exp(true - base)).sum()
        errors.append(np.log1p(moved / np.exp(scores.numpy() - base).sum()))
    return np.array(errors)


def main() -> None:
    """Prints how many LSEs are off by more than the limit of the other tests, and the worst one."""
    inputs = Inputs.draw()
    kernels = {
        "row tiles of 64": (IN_ORDER, UPPER_HALF_FIRST),
        "row tiles of 32, the kernel before": (IN_ORDER, IN_ORDER),
    }
    for name, orders in kernels.items():
        errors = np.concatenate([lse_errors(inputs, request, orders) for request in range(len(LENGTHS))])
        worst = int(np.abs(errors).argmax())
        beyond = int((np.abs(errors) > LIMIT).sum())
        print(
            f"{name}: {beyond} of {len(errors)} LSEs off by more than {LIMIT}, number {worst} by {errors[worst]:+.4f}"
        )


if __name__ == "__main__":
    main()
