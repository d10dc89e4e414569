# SPDX-License-Identifier: Apache-2.0
"""The engines of a run: vLLM's and ours in pairs, which differ in `--kernels` alone, and what each of them is built with.

`stock` and `ours` decode the sessions and one context that grows, and compute turns that come back; a pair for each number of
drafts decodes the sessions with drafts. `ours-append` is ours with the append to the cache fused; the control (`stock-flashmla`, with an
e4m3 cache `stock-triton`) answers only.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import EngineOptions

SYSTEMS = STOCK, OURS = ("stock", "ours")
CONTROL_BACKENDS = {"stock-flashmla": "FLASHMLA", "stock-triton": "TRITON_MLA"}
APPEND = "ours-append"
"""Ours, which also writes new tokens: norm, rotation and cache write in one kernel."""
KV_TOKEN_BYTES = {"auto": 1152, "fp8": 576}
"""Of a layer, by `--kv-cache-dtype`."""
MIXED_PROMPT_TOKENS = 512
LARGEST_CAPTURE = 512
"""Tokens of the largest CUDA graph of a server with vLLM's defaults."""
_SPARE_TOKENS = 128
_TURNS = 4
"""Of each number of new tokens in each rep, with some to spare."""


def control(cache_dtype: str) -> str:
    """Stock with another of vLLM's own kernels: how far its answers lie from stock's is what rounding does to this model.

    Stock itself has FlashAttention MLA; with an e4m3 cache it has FlashMLA, and Triton is the only other one.
    """
    return "stock-triton" if cache_dtype == "fp8" else "stock-flashmla"


def drafting(drafts: int) -> tuple[str, str]:
    """Stock and ours with so many drafts in each step."""
    return f"stock-drafts{drafts}", f"ours-drafts{drafts}"


def draft_tokens(drafts: int) -> str:
    """Where the comparison of answers with so many drafts stands among the figures."""
    return f"tokens_drafts{drafts}"


def systems(options: argparse.Namespace) -> tuple[str, ...]:
    """Every engine of the run."""
    pairs = [SYSTEMS, *(drafting(drafts) for drafts in options.drafts)]
    more = (*((APPEND,) if options.append else ()), *(() if options.no_control else (control(options.kv_cache_dtype),)))
    return (*(system for pair in pairs for system in pair), *more)


def decoding(options: argparse.Namespace) -> tuple[str, ...]:
    """The engines that decode the sessions without drafts."""
    return (*SYSTEMS, APPEND) if options.append else SYSTEMS


def entry(system: str, options: argparse.Namespace, model_folder: Path, layers: int) -> EngineOptions:
    """What an engine is built with."""
    counts = options.sessions if system in (*SYSTEMS, APPEND, *CONTROL_BACKENDS) else options.draft_sessions
    new_tokens = max(options.returning, default=0)
    session = max(options.context_tokens, MIXED_PROMPT_TOKENS) + new_tokens + options.token_outputs
    longest = max((session, *options.contexts)) if system in SYSTEMS else session
    longest += options.output_tokens * (1 + max(options.drafts, default=0)) + _SPARE_TOKENS
    tokens = max(counts) * (session + 2 * _SPARE_TOKENS) + 640 * options.token_requests
    if system in (*SYSTEMS, APPEND):
        tokens += _TURNS * new_tokens * (options.reps + 1) * len(options.returning)
    if system in SYSTEMS:
        tokens += max(options.contexts, default=0)
    return EngineOptions(
        system,
        str(model_folder),
        tokens * KV_TOKEN_BYTES[options.kv_cache_dtype] * layers + (1 << 28),
        options.device,
        max_requests=max(16, *counts),
        max_model_tokens=longest,
        llm_settings={
            "scheduler_cls": None,  # vLLM's own in all of them, so that nothing else differs
            "gpu_memory_utilization": 0.05,
            "worker_extension_cls": "benchmarks.served.worker.Timed",
            "additional_config": {"tokenspeed": {"kernels": _kernels(system, options)}}
            if system.startswith("ours")
            else {},
            "kv_transfer_config": _HOLDING,
            "kv_cache_dtype": options.kv_cache_dtype,
            **_settings(system, options, longest),
        },
    )


_HOLDING = {
    "kv_connector": "HeldPrefix",
    "kv_connector_module_path": "benchmarks.served.held_prefix",
    "kv_role": "kv_consumer",
}


def _kernels(system: str, options: argparse.Namespace) -> str:
    """What `append=` does not name stays as under `auto`."""
    if system != APPEND:
        return str(options.kernels)
    named = f"append={options.append}"
    return named if options.kernels == "auto" else f"{options.kernels},{named}"


def _settings(system: str, options: argparse.Namespace, longest: int) -> dict[str, Any]:
    for drafts in options.drafts:
        if system in drafting(drafts):
            ngram = {"method": "ngram", "num_speculative_tokens": drafts}
            return {"speculative_config": {**ngram, "prompt_lookup_min": 1, "prompt_lookup_max": 4}}
    settings: dict[str, Any] = {}
    if options.contexts and system in SYSTEMS:
        # The model's positions end before the contexts do; rotary embedding of any position costs the same.
        settings["hf_overrides"] = {"max_position_embeddings": longest}
    if options.returning:
        turns = {tokens for tokens in options.returning if tokens <= LARGEST_CAPTURE}
        sizes = sorted({1, 2, 4, 8, 16, *options.sessions, *turns})
        settings["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    backend = CONTROL_BACKENDS.get(system)
    return settings | ({} if backend is None else {"attention_backend": backend})
