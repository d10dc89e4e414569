# SPDX-License-Identifier: Apache-2.0
"""What `--kernels` means for an engine: which solution decodes, whether it can, and the decode steps of a metadata builder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_plugin.kernels.autotune import SHIPPED, TuningFileError, TuningStore, TuningTable, load_tables
from tokenspeed_plugin.kernels.device import device_key, this_platform
from tokenspeed_plugin.kernels.engine.caches import BF16_CACHE, LatentCache, latent_cache
from tokenspeed_plugin.kernels.engine.decode_steps import DecodeSteps
from tokenspeed_plugin.kernels.engine.log_once import log_once
from tokenspeed_plugin.kernels.engine.named import servable
from tokenspeed_plugin.kernels.linear.solutions import FAMILY as LINEAR
from tokenspeed_plugin.kernels.mla.geometry import LATENT_DIMS, ROPE_DIMS
from tokenspeed_plugin.kernels.mla.share import PAGE_TOKENS, QUERY_TOKENS, DecodeShare
from tokenspeed_plugin.kernels.mla.solutions import decode_shape
from tokenspeed_plugin.kernels.nvcc import LibraryUnavailableError
from tokenspeed_plugin.kernels.registry import KernelSpec, Platform, default_registry
from tokenspeed_plugin.kernels.select import (
    OWN_KEYS,
    KernelRequest,
    KernelSelectionError,
    parse_overrides,
    select_kernel,
)
from tokenspeed_plugin.settings import resolve_in_process

FAMILY, MODE = "mla", "decode"
OWN_SLOT = "CUSTOM"
"""vLLM's slot for a backend from outside."""
NEAREST_MEASURED_GPU = "NVIDIA H200"


class KernelsRefusedError(ValueError):
    """A solution was asked for by name and cannot serve this engine; the message names it and what is allowed."""


@dataclass(frozen=True)
class Settled:
    """The outcome for one engine.

    Attributes:
        backend: vLLM's name of the backend for MLA layers; None leaves the choice to vLLM.
        line: what was chosen and why, for the log.
    """

    backend: str | None
    line: str


def allowed_solutions() -> list[str]:
    """Solutions of MLA decode that an engine can be given by name."""
    return servable(default_registry(), FAMILY, MODE)


def named_solution(text: str, asked_by: str) -> KernelSpec | None:
    """The solution that a setting names for decode; None for `auto`, and when it names other operations only.

    Raises:
        ValueError: it names another family, or a solution that cannot stand behind vLLM's decode.
    """
    chosen = parse_overrides(text, default_registry(), asked_by).by_family
    keys = (FAMILY, *OWN_KEYS, LINEAR)
    if others := sorted(set(chosen) - set(keys)):
        allowed_keys = ", ".join(f"{key}=NAME" for key in keys)
        raise ValueError(f"{asked_by} {text}: {', '.join(others)} cannot be chosen, allowed: auto, {allowed_keys}")
    name = chosen.get(FAMILY)
    for spec in default_registry().candidates(FAMILY, MODE):
        if spec.solution == name and (spec.serves_engine or spec.host_backend is not None):
            return spec
    if name is not None:
        allowed = ", ".join(allowed_solutions())
        raise ValueError(f"{asked_by} {text}: {name!r} cannot serve vLLM's decode, allowed: {allowed}")
    return None


def settle(
    text: str,
    asked_by: str,
    platform: tuple[str, tuple[int, int], str],
    heads: int,
    max_context: int,
    why_not: list[str],
    cache_dtype: str = "auto",
) -> Settled:
    """Decide what decodes an MLA model, and build it.

    Args:
        text: the setting, `auto` or `mla=NAME`.
        asked_by: how the user wrote it, for errors.
        platform: kind, architecture and product name of the GPU.
        heads: query heads on one GPU.
        max_context: longest context that the engine allows, in tokens.
        why_not: what of the engine's configuration our kernels cannot serve, in the host's words.
        cache_dtype: vLLM's name of the cache's type.

    Raises:
        KernelsRefusedError: a solution was named and cannot be had.
        ValueError: the setting names what there is not.
    """
    named = named_solution(text, asked_by)
    if named is not None and named.host_backend is not None:
        return Settled(named.host_backend, f"{asked_by} {text}: MLA decodes with vLLM's {named.host_backend}")
    chosen = (
        _Unfit("; ".join(why_not))
        if why_not
        else _ready(named, Platform(*platform), heads, max_context, latent_cache(cache_dtype))
    )
    if isinstance(chosen, KernelSpec):
        scope = "where it is the faster" if named is None else "as far as it can"
        others = latent_cache(cache_dtype).host_backend
        line = f"MLA decodes with {chosen.solution} {scope}, else with vLLM's {others}"
        return Settled(OWN_SLOT, f"{asked_by} {text}: {line}")
    if named is None:
        return Settled(None, f"{asked_by} {text}: MLA decode stays with vLLM's own backend: {chosen.reason}")
    allowed = ", ".join(allowed_solutions())
    raise KernelsRefusedError(
        f"{asked_by} {text} cannot be honoured: {chosen.reason}. Allowed: off, auto, or mla= one of {allowed}"
    )


@dataclass(frozen=True)
class _Unfit:
    """Why no kernel of ours can serve an engine."""

    reason: str


def _ready(
    named: KernelSpec | None, platform: Platform, heads: int, max_context: int, cache: LatentCache
) -> KernelSpec | _Unfit:
    """The kernel for an engine, built."""
    spec = _fitting(named, platform, heads, cache)
    if isinstance(spec, _Unfit):
        return spec
    share = _share(spec, named, platform, heads, max_context, cache)
    if not share.takes_anything():
        return _Unfit(f"{spec.solution} was nowhere measured faster with {heads} heads")
    try:
        spec.prepare()
    except LibraryUnavailableError as error:
        return _Unfit(f"{spec.solution} cannot be built: {error}")
    return spec


def decode_steps(
    vllm_config: Any,
    num_heads: int,
    mla_dims: Any,
    kv_cache_spec: Any,
    device: torch.device,
    cache: LatentCache = BF16_CACHE,
) -> DecodeSteps | None:
    """The decode steps for a metadata builder in a worker; None when all its batches stay with vLLM's backend.

    Args:
        vllm_config: vLLM's configuration.
        num_heads: query heads of the builder's layers on this GPU.
        mla_dims: vLLM's sizes of those layers.
        kv_cache_spec: of those layers, in kernel pages.
        device: where they run.
        cache: what the builder's backend reads.
    """
    dims = (mla_dims.kv_lora_rank, mla_dims.qk_rope_head_dim, kv_cache_spec.block_size, kv_cache_spec.dtype)
    if dims != (LATENT_DIMS, ROPE_DIMS, PAGE_TOKENS, cache.stored):
        return None
    resolved = resolve_in_process(vllm_config.additional_config)
    text = resolved.values.kernels if resolved.values.kernels != "off" else "auto"
    named = named_solution(text, resolved.source("kernels").spelling("kernels"))
    platform = this_platform()
    spec = _fitting(named, platform, num_heads, cache)
    if isinstance(spec, _Unfit):
        return None
    max_context = vllm_config.model_config.max_model_len
    share = _share(spec, named, platform, num_heads, max_context, cache)
    largest = max(
        vllm_config.scheduler_config.max_num_seqs, vllm_config.compilation_config.max_cudagraph_capture_size or 0
    )
    steps = DecodeSteps(spec, share, num_heads, largest, kv_cache_spec.block_size, device)
    drafts = getattr(vllm_config.speculative_config, "num_speculative_tokens", None) or 0
    for query_tokens in {1, 1 + drafts}:
        steps.reserve(query_tokens)
    log_once(f"{_described(share, spec, num_heads)}; others go to {cache.host_backend}.")
    return steps


def share_of(
    named: KernelSpec | None, platform: Platform, heads: int, max_context: int, cache_dtype: str = "auto"
) -> DecodeShare:
    """The batches that a kernel would take on a GPU.

    Raises:
        KernelsRefusedError: no kernel runs there.
        ValueError: no kernel reads such a cache.
    """
    cache = latent_cache(cache_dtype)
    spec = _fitting(named, platform, heads, cache)
    if isinstance(spec, _Unfit):
        raise KernelsRefusedError(spec.reason)
    return _share(spec, named, platform, heads, max_context, cache)


def _share(
    spec: KernelSpec, named: KernelSpec | None, platform: Platform, heads: int, max_context: int, cache: LatentCache
) -> DecodeShare:
    tuning, is_named = _tuning(platform), named is not None
    return DecodeShare(spec, cache.host_solution, heads, max_context, tuning, named=is_named, formats=cache.formats)


def tuning_of_this_gpu() -> TuningTable:
    """Measurements that count in this process.

    Raises:
        KernelsRefusedError: the file is damaged.
    """
    return _tuning(this_platform())


def _fitting(named: KernelSpec | None, platform: Platform, heads: int, cache: LatentCache) -> KernelSpec | _Unfit:
    """The kernel of the highest tier that runs there and reads the cache, or the named one."""
    request = KernelRequest(FAMILY, MODE, cache.formats, decode_shape(heads, 1, PAGE_TOKENS, 1, 1), platform)
    candidates = default_registry().candidates(FAMILY, MODE)
    ours = [spec for spec in candidates if spec.serves_engine and cache.formats in spec.signatures]
    reasons = []
    for spec in sorted(ours, key=lambda spec: -spec.priority) if named is None else [named]:
        try:
            return select_kernel(request, solution=spec.solution).spec
        except KernelSelectionError as error:
            reasons.append(str(error).removeprefix("argument solution asks for "))
    return _Unfit("; ".join(reasons) or "no kernel is registered for it")


def _tuning(platform: Platform) -> TuningTable:
    """Measurements of this GPU; those of the one that was measured most where there are none."""
    try:
        table = load_tables(device_key(platform.name, default_registry()))
    except TuningFileError as error:
        raise KernelsRefusedError(str(error)) from error
    return table if table.buckets else TuningStore(SHIPPED).load(NEAREST_MEASURED_GPU)


def _described(share: DecodeShare, spec: KernelSpec, heads: int) -> str:
    taken = [
        f"{query_tokens} query tokens: {_counts(share, query_tokens)}"
        for query_tokens in QUERY_TOKENS
        if share.takes(query_tokens, 1)
    ]
    return f"MLA decode, {heads} heads: {spec.solution} takes {'; '.join(taken) or 'nothing'}"


def _counts(share: DecodeShare, query_tokens: int) -> str:
    for requests in (1 << exponent for exponent in range(12)):
        if not share.takes(query_tokens, 2 * requests):
            largest = next(n for n in range(2 * requests, 0, -1) if share.takes(query_tokens, n))
            return f"up to {largest} requests"
    return "any number of requests"
