# SPDX-License-Identifier: Apache-2.0
"""The ways of appending to the latent cache: ours, and those of vLLM, each as a call that can be captured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tokenspeed_plugin.kernels.mla.geometry import LATENT_DIMS, ROPE_DIMS
from tokenspeed_plugin.kernels.mla.triton_append import mla_append_triton

EPSILON, NOPE_DIMS, Q_RANK = 1e-6, 128, 1536
PAGE_TOKENS, CACHED_PAGES, POSITIONS = 64, 2048, 131072
OURS = "ours (triton)"
Call = Callable[[], tuple[torch.Tensor, torch.Tensor]]


class WayUnavailableError(LookupError):
    """This machine has no such way; the message says why."""


class AppendOperands:
    """Random operands of DeepSeek's sizes, the same in each instance; the cache is larger than the L2."""

    def __init__(self, heads: int, tokens: int, cache: str) -> None:
        generator = torch.Generator("cuda").manual_seed(3)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device="cuda").to(torch.bfloat16)

        self.q = normal(tokens, heads, NOPE_DIMS + ROPE_DIMS)
        # A slice of the fused projection's rows, as in the model.
        self.latent = normal(tokens, Q_RANK + LATENT_DIMS + ROPE_DIMS)[:, Q_RANK:]
        self.positions = torch.randint(0, POSITIONS, (tokens,), generator=generator, device="cuda")
        self.weight = 1 + 0.1 * normal(LATENT_DIMS)
        angles = torch.rand(POSITIONS, ROPE_DIMS // 2, generator=generator, device="cuda") * 2 * math.pi
        self.table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(torch.bfloat16)
        slots = torch.randperm(CACHED_PAGES * PAGE_TOKENS, generator=generator, device="cuda")
        self.slots = slots[:tokens]
        self.is_fp8 = cache != "bfloat16"
        self.cache = torch.zeros(
            CACHED_PAGES, PAGE_TOKENS, LATENT_DIMS + ROPE_DIMS, dtype=torch.bfloat16, device="cuda"
        )
        if self.is_fp8:
            self.cache = self.cache.to(torch.float8_e4m3fn)
        self.scale = torch.tensor([0.5], device="cuda")

    def results(self, call: Call) -> list[torch.Tensor]:
        """All that one call leaves: queries, latents, keys, and the tokens in the cache."""
        self.cache.view(torch.uint8).zero_()
        before = self.q.clone()
        latent, key = call()
        rows = self.cache.view(-1, LATENT_DIMS + ROPE_DIMS).view(torch.uint8 if self.is_fp8 else torch.bfloat16)
        stored = rows[self.slots].view(self.cache.dtype).float() * (self.scale if self.is_fp8 else 1.0)
        found = [self.q[..., NOPE_DIMS:].clone(), latent.clone(), key.clone().view(-1, ROPE_DIMS), stored]
        self.q.copy_(before)
        return found


def ours(given: AppendOperands) -> Call:
    """One launch."""

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return mla_append_triton(
            given.q, given.latent, given.positions, given.weight, EPSILON, given.table, given.cache, given.slots,
            interleaved=True, kv_scale=given.scale if given.is_fp8 else None,
        )  # fmt: skip

    return call


def _normed(latent: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A norm as models are written: fp32 arithmetic, the weight behind it."""
    values = latent[:, :LATENT_DIMS].float()
    values = values * torch.rsqrt(values.pow(2).mean(dim=-1, keepdim=True) + EPSILON)
    return values.to(latent.dtype) * weight


def _turned(q: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Queries in place and new keys, in the type of the operands."""
    cos, sin = (part.repeat_interleave(2, dim=-1).unsqueeze(-2) for part in table[positions].chunk(2, dim=-1))

    def turn(values: torch.Tensor) -> torch.Tensor:
        first, second = values[..., ::2], values[..., 1::2]
        across = torch.stack((-second, first), dim=-1).flatten(-2)
        return values * cos + across * sin

    q[..., NOPE_DIMS:] = turn(q[..., NOPE_DIMS:])
    return turn(latent[:, LATENT_DIMS:].unsqueeze(1))


_compiled: dict[str, Any] = {}


def compiled(given: AppendOperands) -> Call:
    """What vLLM runs by default: norm and rotation from torch's compiler, and its own kernel for the write."""
    ops = _vllm_operations()
    if not _compiled:
        _compiled["normed"] = torch.compile(_normed, fullgraph=True, dynamic=True)
        _compiled["turned"] = torch.compile(_turned, fullgraph=True, dynamic=True)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        latent = _compiled["normed"](given.latent, given.weight)
        key = _compiled["turned"](given.q, given.latent, given.positions, given.table)
        _write(ops, given, latent, key)
        return latent, key

    return call


def kernels(given: AppendOperands) -> Call:
    """vLLM's own kernels for all three, as without its compiler."""
    ops = _vllm_operations()

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        values = given.latent[:, :LATENT_DIMS]
        latent = torch.empty_like(values, memory_format=torch.contiguous_format)
        ops.rms_norm(latent, values, given.weight, EPSILON)
        key = given.latent[:, LATENT_DIMS:].unsqueeze(1).clone()
        ops.rotary_embedding(given.positions, given.q[..., NOPE_DIMS:], key, ROPE_DIMS, given.table, False)
        _write(ops, given, latent, key)
        return latent, key

    return call


def fused_write(given: AppendOperands) -> Call:
    """vLLM's norm, and its kernel that turns and writes, which its pass fuse_rope_kvcache_cat_mla puts in."""
    ops = _vllm_operations()
    if not hasattr(ops, "concat_and_cache_mla_rope_fused"):
        raise WayUnavailableError("this vLLM has no concat_and_cache_mla_rope_fused")

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        values = given.latent[:, :LATENT_DIMS]
        latent = torch.empty_like(values, memory_format=torch.contiguous_format)
        ops.rms_norm(latent, values, given.weight, EPSILON)
        key = given.latent[:, LATENT_DIMS:].clone()
        ops.concat_and_cache_mla_rope_fused(
            given.positions, given.q[..., NOPE_DIMS:], key, latent, given.table, False, given.slots,
            _bytes(given), "fp8" if given.is_fp8 else "auto", given.scale,
        )  # fmt: skip
        return latent, key

    return call


def _write(ops: Any, given: AppendOperands, latent: torch.Tensor, key: torch.Tensor) -> None:
    kind = "fp8" if given.is_fp8 else "auto"
    ops.concat_and_cache_mla(latent, key.squeeze(1), _bytes(given), given.slots, kv_cache_dtype=kind, scale=given.scale)


def _bytes(given: AppendOperands) -> torch.Tensor:
    return given.cache.view(torch.uint8) if given.is_fp8 else given.cache


def _vllm_operations() -> Any:
    try:
        from vllm import _custom_ops as ops
    except ImportError as error:
        raise WayUnavailableError(f"vLLM cannot be imported: {error}") from error
    if not hasattr(torch.ops._C_cache_ops, "concat_and_cache_mla"):
        raise WayUnavailableError("this vLLM has no kernels for this GPU")
    return ops


WAYS: dict[str, Callable[[AppendOperands], Call]] = {
    OURS: ours,
    "vLLM, compiled": compiled,
    "vLLM, kernels": kernels,
    "vLLM, fused write": fused_write,
}
"""By the name in tables and figures; what the judged ratio is taken to is the fastest of vLLM's."""
