# SPDX-License-Identifier: Apache-2.0
"""The engines of a run: vLLM's and ours in pairs, which differ in `--kernels` alone, and what each of them is built with.

`stock` and `ours` decode the sessions, a pair for each number of drafts does so with drafts, and `stock-long` and `ours-long`
hold one context that grows. `stock-flashmla` answers only.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import EngineOptions

SYSTEMS = STOCK, OURS = ("stock", "ours")
CONTROL = "stock-flashmla"
"""Stock with another of vLLM's own kernels: how far its answers lie from stock's is what rounding does to this model."""
LONG = tuple(f"{system}-long" for system in SYSTEMS)
KV_TOKEN_BYTES_PER_LAYER = 1152
MIXED_PROMPT_TOKENS = 512
_SPARE_TOKENS = 128


def drafting(drafts: int) -> tuple[str, str]:
    """Stock and ours with so many drafts in each step."""
    return f"stock-drafts{drafts}", f"ours-drafts{drafts}"


def draft_tokens(drafts: int) -> str:
    """Where the comparison of answers with so many drafts stands among the figures."""
    return f"tokens_drafts{drafts}"


def systems(options: argparse.Namespace) -> tuple[str, ...]:
    """Every engine of the run."""
    pairs = [SYSTEMS, *(drafting(drafts) for drafts in options.drafts), LONG if options.contexts else ()]
    return (*(system for pair in pairs for system in pair), *(() if options.no_control else (CONTROL,)))


def entry(system: str, options: argparse.Namespace, model_folder: Path, layers: int) -> EngineOptions:
    """What an engine is built with."""
    longest = options.output_tokens + _SPARE_TOKENS
    if system in LONG:
        longest += max(options.contexts)
        tokens, requests = longest + _SPARE_TOKENS, 1
    else:
        counts = options.sessions if system in (*SYSTEMS, CONTROL) else options.draft_sessions
        longest += max(options.context_tokens, MIXED_PROMPT_TOKENS) + options.token_outputs
        tokens, requests = max(counts) * (longest + _SPARE_TOKENS) + 640 * options.token_requests, max(16, *counts)
    return EngineOptions(
        system,
        str(model_folder),
        tokens * KV_TOKEN_BYTES_PER_LAYER * layers + (1 << 28),
        options.device,
        max_requests=requests,
        max_model_tokens=longest,
        llm_settings={
            "scheduler_cls": None,  # vLLM's own in all of them, so that nothing else differs
            "gpu_memory_utilization": 0.05,
            "worker_extension_cls": "benchmarks.served.worker.Timed",
            "additional_config": {"tokenspeed": {"kernels": options.kernels}} if system.startswith("ours") else {},
            **_settings(system, options),
        },
    )


def _settings(system: str, options: argparse.Namespace) -> dict[str, Any]:
    if system == CONTROL:
        return {"attention_backend": "FLASHMLA"}
    if system in LONG:
        # The model's positions end before the contexts do; rotary embedding of any position costs the same.
        connector = {
            "kv_connector": "HeldPrefix",
            "kv_connector_module_path": "benchmarks.served.held_prefix",
            "kv_role": "kv_consumer",
        }
        positions = max(options.contexts) + options.output_tokens + _SPARE_TOKENS
        return {"hf_overrides": {"max_position_embeddings": positions}, "kv_transfer_config": connector}
    for drafts in options.drafts:
        if system in drafting(drafts):
            ngram = {"method": "ngram", "num_speculative_tokens": drafts}
            return {"speculative_config": {**ngram, "prompt_lookup_min": 1, "prompt_lookup_max": 4}}
    return {}
