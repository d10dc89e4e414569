# SPDX-License-Identifier: Apache-2.0
"""`--kernels append=NAME` at start-up: whether a kernel can write the new tokens of MLA layers, and what vLLM must leave alone then."""

import importlib
from typing import Any

from tokenspeed_plugin.host import mla_append
from tokenspeed_plugin.host.check import require_append
from tokenspeed_plugin.host.config_rows import is_many, is_set
from tokenspeed_plugin.host.log import logger
from tokenspeed_plugin.host.unserved import Unserved

_START = "tokenspeed_plugin.kernels.engine.append_start"
_HOST_OPERATION = "vllm::unified_mla_kv_cache_update"
_CACHE_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3")

# fmt: off
UNSERVED: tuple[Unserved, ...] = (
    Unserved("model_config.use_mla", lambda v: not v, "the model has no multi-head latent attention"),
    Unserved("model_config.hf_text_config.index_topk", is_set, "sparse MLA is not served"),
    Unserved("cache_config.cache_dtype", lambda v: v not in _CACHE_DTYPES, "a KV cache of the model's type or in e4m3 is served"),
    Unserved("parallel_config.decode_context_parallel_size", is_many, "context parallelism is not served"),
    Unserved("parallel_config.prefill_context_parallel_size", is_many, "context parallelism is not served"),
    Unserved("attention_config.hisparse_config", is_set, "HiSparse is not served"),
)
# fmt: on


def settle(config: Any, text: str, asked_by: str, platform: tuple[str, tuple[int, int], str]) -> None:
    """Have the layers of an engine append by the kernel that was named; without a name vLLM's own layers stay.

    Args:
        config: vLLM's configuration; adjusted when a kernel was named.
        text: the setting, such as `append=triton`.
        asked_by: how the user wrote it, for errors.
        platform: kind, architecture and product name of the GPU.

    Raises:
        HostError: the installed vLLM lacks what our layer relies on.
        SettingsError: what was named cannot be had.
    """
    start = importlib.import_module(_START)
    if start.named_append(text, asked_by) is None:
        mla_append.remove()
        return
    require_append(f"{asked_by} {text}")
    line = start.settle_append(
        text,
        asked_by,
        platform,
        str(config.model_config.dtype).removeprefix("torch."),
        config.cache_config.cache_dtype,
        reasons(config),
    )
    mla_append.install()
    logger(__name__).info("%s.", line)
    _keep_apart(config)


def reasons(config: Any) -> list[str]:
    """Why our layer cannot serve a configuration; empty when it can."""
    found = [line for row in UNSERVED if (line := row.line(config))]
    occupant = mla_append.occupant()
    if occupant is not None and not mla_append.is_ours(occupant):
        name = f"{occupant.__module__}.{occupant.__qualname__}"
        found.append(f"{name} replaces vLLM's {mla_append.REPLACED} already")
    return found


def _keep_apart(config: Any) -> None:
    """Treat our operation as vLLM treats its own, and switch off the pass that would fuse what ours has fused."""
    compilation = config.compilation_config
    operation = importlib.import_module(_START).OPERATION
    splitting = compilation.splitting_ops
    if splitting is not None and _HOST_OPERATION in splitting and operation not in splitting:
        # It finds the step's slots through vLLM's forward context, which a graph of a piece must not capture.
        splitting.append(operation)
    if compilation.pass_config.fuse_rope_kvcache_cat_mla:
        compilation.pass_config.fuse_rope_kvcache_cat_mla = False
        logger(__name__).info(
            "The pass fuse_rope_kvcache_cat_mla is off: it writes the cache without asking the layer that has appended already."
        )
