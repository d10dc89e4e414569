# SPDX-License-Identifier: Apache-2.0
"""Inputs for the append to the latent cache, with poison wherever nothing may be written or read, and what must come out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from tokenspeed_plugin.kernels.mla.append_reference import mla_append_reference

LATENT, ROPE = 512, 64
EPSILON = 0.05  # large enough to be seen
NAN = float("nan")
E4M3 = torch.float8_e4m3fn


@dataclass
class Case:
    """Operands of one call, by the names of its parameters."""

    q: torch.Tensor
    latent: torch.Tensor
    positions: torch.Tensor
    norm_weight: torch.Tensor | None
    rope_table: torch.Tensor
    kv_cache: torch.Tensor | None
    slots: torch.Tensor | None
    interleaved: bool
    kv_scale: torch.Tensor | None = None

    def run(self, append: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Call a solution; `q` and `kv_cache` change in place."""
        return append(
            self.q,
            self.latent,
            self.positions,
            self.norm_weight,
            EPSILON,
            self.rope_table,
            self.kv_cache,
            self.slots,
            interleaved=self.interleaved,
            kv_scale=self.kv_scale,
        )

    def copied(self, **changes: Any) -> Case:
        """The same operands, with a `q` and a cache of its own."""
        cache = None if self.kv_cache is None else self.kv_cache.clone()
        return replace(self, **{"q": self.q.clone(), "kv_cache": cache, **changes})


def make_case(
    tokens: int = 5,
    *,
    heads: int = 16,
    nope_dims: int = 128,
    page_tokens: int = 64,
    interleaved: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    padding: int = 2,
    unslotted: int = 1,
    has_weight: bool = True,
    scale: float = 0.25,
    device: str = "cpu",
    latent_pad: int = 64,
) -> Case:
    """Random operands; the last `padding` tokens have slot -1, and `unslotted` more have none at all.

    Latents are a slice of wider rows, as the fused projection leaves them. Free slots of the cache hold NaN.
    """
    generator = torch.Generator().manual_seed(tokens * 131 + heads)
    rows = tokens + padding + unslotted

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    pages = 2 + -(-tokens // page_tokens)
    slots = torch.randperm(pages * page_tokens, generator=generator)[:tokens]
    cache = torch.full((pages, page_tokens, LATENT + ROPE), NAN).to(cache_dtype or dtype)
    angles = torch.rand(300, ROPE // 2, generator=generator, dtype=torch.float64) * 2 * math.pi
    table = 1.25 * torch.cat((angles.cos(), angles.sin()), dim=-1)  # a factor, as YaRN has it
    wide_rows = 3.0 * normal(rows, latent_pad + LATENT + ROPE)
    case = Case(
        normal(rows, heads, nope_dims + ROPE),
        wide_rows[:, latent_pad:],
        torch.randint(0, 300, (rows,), generator=generator),
        1 + 0.2 * normal(LATENT) if has_weight else None,
        table.to(dtype),
        cache,
        torch.cat((slots, torch.full((padding,), -1))),
        interleaved,
        torch.tensor([scale]),
    )
    return moved(case, device)


def moved(case: Case, device: str) -> Case:
    """The operands on a device; the latents stay a slice of wider rows."""
    there = {name: value.to(device) for name, value in vars(case).items() if isinstance(value, torch.Tensor)}
    base = case.latent._base
    if base is not None:
        there["latent"] = base.to(device)[:, base.shape[1] - LATENT - ROPE :]
    return replace(case, **there)


def truth_of(case: Case) -> tuple[Case, tuple[torch.Tensor, torch.Tensor]]:
    """The reference in float64: the case with its `q` and an unrounded cache, and what is returned."""
    cache = None if case.kv_cache is None else torch.full_like(case.kv_cache, NAN, dtype=torch.float64)
    wide = case.copied(q=case.q.double(), latent=case.latent.double(), kv_cache=cache)
    return wide, wide.run(mla_append_reference)


def check(case: Case, append: Any, *, rounds: bool = True) -> None:
    """Run a solution and compare all that it leaves with the truth; what must stay untouched stays bit for bit.

    Each value is rounded once to the operands' type (half a unit in its last place, or one where the arithmetic only cuts off,
    as Triton's interpreter does), plus fp32's own error.
    """
    before = case.copied()
    truth, (true_latent, true_key) = truth_of(case)
    latent, key = case.run(append)
    unit = torch.finfo(case.q.dtype).eps
    for value, exact in ((case.q, truth.q), (latent, true_latent), (key, true_key)):
        assert value.dtype == before.q.dtype
        _assert_near(value.double(), exact, (0.51 if rounds else 1.01) * unit + 4e-7, 1e-5 * unit + 1e-6)
    assert torch.equal(case.q[..., :-ROPE], before.q[..., :-ROPE])
    assert torch.equal(case.latent, before.latent)
    if case.kv_cache is not None:
        _check_cache(case, torch.cat((latent, key), dim=-1), rounds)


def _check_cache(case: Case, tokens: torch.Tensor, rounds: bool) -> None:
    """Slots that were named hold what was returned, or its quantised form; all others are as poisoned as before."""
    assert case.kv_cache is not None
    slots = torch.zeros(0, dtype=torch.int64, device=tokens.device) if case.slots is None else case.slots
    real = slots >= 0
    rows = case.kv_cache.float().reshape(-1, LATENT + ROPE)
    free = torch.ones(rows.shape[0], dtype=torch.bool, device=rows.device)
    free[slots[real]] = False
    assert rows[free].isnan().all()
    stored, expected = rows[slots[real]], tokens[: slots.shape[0]][real].float()
    if case.kv_cache.dtype != E4M3:
        assert torch.equal(stored, expected.to(case.kv_cache.dtype).float())
        return
    scaled = (expected / case.kv_scale).clamp(-448, 448)
    if rounds:
        assert torch.equal(stored, scaled.to(E4M3).float())
    else:  # the interpreter also loses what a rounding carries into the exponent
        carried = torch.frexp(scaled.to(E4M3).float())[0].abs() == 0.5
        _assert_near(stored.double()[~carried], scaled.double()[~carried], 2**-3, 2**-9)


def _assert_near(value: torch.Tensor, exact: torch.Tensor, relative: float, absolute: float) -> None:
    excess = (value - exact).abs() - (absolute + relative * exact.abs())
    assert value.isfinite().all()
    assert (excess <= 0).all(), f"off by {excess.max():.3g} more than allowed"
