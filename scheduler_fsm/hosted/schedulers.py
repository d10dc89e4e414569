# SPDX-License-Identifier: Apache-2.0
"""vLLM's own schedulers with the flat KV manager in the place of vLLM's."""

import functools
from typing import TYPE_CHECKING, Any

from tokenspeed_plugin.host import config_gate, patches
from tokenspeed_plugin.host.differences import num_hash_lookahead_tokens
from tokenspeed_plugin.host.names import AsyncScheduler, Scheduler
from tokenspeed_plugin.scheduler_fsm import config_map
from tokenspeed_plugin.scheduler_fsm.hosted.manager import FlatKvCacheManager
from tokenspeed_plugin.scheduler_fsm.request_import import PromptImporter

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import KVCacheConfig, SchedulerStats, StructuredOutputManager, VllmConfig


class _WithFlatKv:
    """Goes in front of one of vLLM's schedulers."""

    kv_cache_manager: FlatKvCacheManager

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        structured_output_manager: "StructuredOutputManager",
        block_size: int,
        hash_block_size: int | None = None,
        **others: Any,
    ) -> None:
        """Take vLLM's arguments.

        Raises:
            ConfigRefusedError: names each setting that the flat KV manager cannot honour.
        """
        config_gate.check_kv_manager(vllm_config, kv_cache_config)
        hash_tokens = hash_block_size or block_size
        caching = bool(vllm_config.cache_config.enable_prefix_caching)
        key_tokens = config_map.key_tokens(kv_cache_config, hash_tokens) if caching else 0
        prompts = PromptImporter(key_tokens, num_hash_lookahead_tokens(vllm_config))
        with patches.kv_manager(functools.partial(FlatKvCacheManager, vllm_config, prompts)):
            construct: Any = super().__init__
            construct(vllm_config, kv_cache_config, structured_output_manager, block_size, hash_block_size, **others)
        has_connector = vllm_config.kv_transfer_config is not None
        hasher = prompts.hasher_beside_vllm if has_connector else prompts.hasher
        patches.install_block_hasher(hasher, vllm_config, has_connector=has_connector)

    def make_stats(self, *args: Any, **kwargs: Any) -> "SchedulerStats | None":
        """vLLM's statistics, with ours about the KV cache when it is time."""
        parent: Any = super()
        stats: SchedulerStats | None = parent.make_stats(*args, **kwargs)
        if stats is not None:
            stats.num_kv_fetch_reqs_by_stage |= self.kv_cache_manager.take_report()
        return stats

    def kv_map(self) -> dict[str, Any]:
        """The block pool at this moment, for pictures. O(pool)."""
        return self.kv_cache_manager.kv_map.take()

    def check_integrity(self) -> None:
        """Raise RuntimeError naming the first broken invariant of the blocks. O(pool): for tests and idle times."""
        self.kv_cache_manager.check_integrity()


class FlatKvScheduler(_WithFlatKv, Scheduler):
    """vLLM's synchronous scheduler over the flat KV manager."""


class FlatKvAsyncScheduler(_WithFlatKv, AsyncScheduler):
    """vLLM's asynchronous scheduler over the flat KV manager."""
