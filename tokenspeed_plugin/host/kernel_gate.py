# SPDX-License-Identifier: Apache-2.0
"""`--kernels` at start-up: what our MLA kernels cannot serve, and the backend that the configuration gets for MLA layers.

A solution that was named and cannot be had stops the start. `auto` leaves the choice to vLLM, and says why in one line.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any

from tokenspeed_plugin.host import append_gate, few_rows, linear_gate, mla_append, mla_backend
from tokenspeed_plugin.host.check import missing_flash_attn_mla, missing_flashmla, require_kernels
from tokenspeed_plugin.host.config_rows import is_many, is_set, value_at
from tokenspeed_plugin.host.log import logger
from tokenspeed_plugin.host.unserved import Unserved
from tokenspeed_plugin.settings import ResolvedSettings, SettingsError

OFF = "off"
KIND = "mla_attention"
"""vLLM's kind of KV cache group whose layers our backend serves; layers of other kinds keep theirs."""
PAGE_TOKENS = 64
_START = "tokenspeed_plugin.kernels.engine.start"
_CACHE_DTYPES = ("auto", "bfloat16", *mla_backend.E4M3_CACHES)


def _is_no_bf16(dtype: Any) -> bool:
    return str(dtype) != "torch.bfloat16"


# fmt: off
UNSERVED: tuple[Unserved, ...] = (
    Unserved("model_config.use_mla", lambda v: not v, "the model has no multi-head latent attention"),
    Unserved("model_config.hf_text_config.index_topk", is_set, "sparse MLA is not served"),
    Unserved("model_config.hf_text_config.kv_lora_rank", lambda v: v != 512, "latents of 512 dimensions are served"),
    Unserved("model_config.hf_text_config.qk_rope_head_dim", lambda v: v != 64, "64 rotary dimensions are served"),
    Unserved("model_config.dtype", _is_no_bf16, "bfloat16 is served"),
    # vLLM gives up what was allocated beside the KV cache; the counts of arrivals must not come back as anything else.
    Unserved("model_config.enable_sleep_mode", bool, "an engine that sleeps is not served"),
    Unserved("cache_config.cache_dtype", lambda v: v not in _CACHE_DTYPES, "a KV cache of bfloat16 or in e4m3 is served"),
    Unserved("cache_config.kv_cache_dtype_skip_layers", bool, "layers with caches of several types are not served"),
    Unserved("parallel_config.decode_context_parallel_size", is_many, "context parallelism is not served"),
    Unserved("parallel_config.prefill_context_parallel_size", is_many, "context parallelism is not served"),
    Unserved("attention_config.use_non_causal", bool, "causal attention is served"),
    Unserved("attention_config.hisparse_config", is_set, "HiSparse is not served"),
    Unserved("speculative_config.enable_adaptive_verification", bool, "drafts that are trimmed on the device are not served"),
)
# fmt: on


def create_engine_config(original: Callable[[], Any], resolved: ResolvedSettings) -> Any:
    """Make the `VllmConfig`, with the chosen backend for its MLA layers.

    Args:
        original: called without arguments, returns vLLM's `VllmConfig`.
        resolved: what was asked for.

    Raises:
        HostError: the installed vLLM lacks what our backend relies on.
        SettingsError: what was named cannot be had, or two backends were asked for.
    """
    text, asked_by = resolved.values.kernels, resolved.source("kernels").spelling("kernels")
    if text == OFF:
        _remove()
        return original()
    require_kernels(f"{asked_by} {text}")
    start = importlib.import_module(_START)
    try:
        start.named_solution(text, asked_by)
        config = original()
        settled = _settle(start, text, asked_by, config)
        append_gate.settle(config, text, asked_by, _platform())
        linear_gate.settle(config, text, asked_by, _platform())
    except ValueError as error:
        _remove()
        raise error if isinstance(error, SettingsError) else SettingsError(str(error)) from error
    logger(__name__).info("%s.", settled.line)
    if settled.backend is None:
        mla_backend.remove()
        return config
    if settled.backend == mla_backend.SLOT:
        mla_backend.install(mla_backend.path_for(config.cache_config.cache_dtype))
    _use(config, settled.backend)
    return config


def _remove() -> None:
    mla_backend.remove()
    mla_append.remove()
    few_rows.remove()


def _settle(start: Any, text: str, asked_by: str, config: Any) -> Any:
    why_not = reasons(config)
    if own := _chosen_by_user(config):
        if start.named_solution(text, asked_by) is not None:
            msg = f"{asked_by} {text} and {own} both choose the backend of MLA layers; allowed: one of them"
            raise SettingsError(msg)
        why_not.append(f"{own} chose it")
    heads = config.model_config.get_num_attention_heads(config.parallel_config) if not why_not else 0
    max_context, cache_dtype = config.model_config.max_model_len, config.cache_config.cache_dtype
    return start.settle(text, asked_by, _platform(), heads, max_context, why_not, cache_dtype)


def reasons(config: Any) -> list[str]:
    """Why our kernels cannot serve a configuration; empty when they can."""
    found = [line for row in UNSERVED if (line := row.line(config))]
    if not config.model_config.use_mla:
        return found[:1]
    if value_at(config, "cache_config.user_specified_block_size") and config.cache_config.block_size % PAGE_TOKENS:
        found.append(f"cache_config.block_size={config.cache_config.block_size}: multiples of {PAGE_TOKENS} are served")
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in {"", "0"}:
        found.append("VLLM_BATCH_INVARIANT: results depend on the batch")
    occupant = mla_backend.occupant()
    if occupant not in (None, *mla_backend.OURS):
        found.append(f"the slot {mla_backend.SLOT} for attention backends holds {occupant}")
    return found or _missing_base(config.cache_config.cache_dtype)


def _missing_base(cache_dtype: str) -> list[str]:
    """Why vLLM's own backend for the cache, which ours extends, cannot be had."""
    kind, arch, _ = _platform()
    if kind != "cuda" or arch[0] != 9:
        there = f"{kind} {arch[0]}.{arch[1]}" if kind == "cuda" else kind
        return [f"this machine has {there}, Hopper (cuda 9.0) is served"]
    return _missing_flashmla() if cache_dtype in mla_backend.E4M3_CACHES else _missing_flash_attn_mla()


def _missing_flash_attn_mla() -> list[str]:
    if missing := missing_flash_attn_mla():
        return [f"vLLM lacks {', '.join(missing)}"]
    supports = importlib.import_module("vllm.v1.attention.backends.fa_utils").flash_attn_supports_mla
    return [] if supports() else ["vLLM's FlashAttention 3 does not run here"]


def _missing_flashmla() -> list[str]:
    if missing := missing_flashmla():
        return [f"vLLM lacks {', '.join(missing)}"]
    supported, reason = importlib.import_module("vllm.v1.attention.ops.flashmla").is_flashmla_dense_supported()
    return [] if supported else [f"vLLM's FlashMLA does not run here: {reason}"]


def _platform() -> tuple[str, tuple[int, int], str]:
    """Kind, architecture and product name of the GPU, without touching it."""
    platform = importlib.import_module("vllm.platforms").current_platform
    if not platform.is_cuda():
        return ("rocm" if platform.is_rocm() else "cpu", (0, 0), "")
    capability = platform.get_device_capability()
    return "cuda", (capability.major, capability.minor), platform.get_device_name()


def _chosen_by_user(config: Any) -> str | None:
    attention = config.attention_config
    if attention.backend is not None:
        return f"--attention-backend {attention.backend.name}"
    if KIND in attention.backend_per_kind:
        return f"attention_config.backend_per_kind[{KIND!r}]={attention.backend_per_kind[KIND].name}"
    return None


def _use(config: Any, backend: str) -> None:
    backends = importlib.import_module("vllm.v1.attention.backends.registry").AttentionBackendEnum
    # By kind, so that a drafter without MLA keeps the backend that vLLM finds for it.
    config.attention_config.backend_per_kind[KIND] = backends[backend]
