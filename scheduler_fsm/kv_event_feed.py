# SPDX-License-Identifier: Apache-2.0
"""The core's cache events, published as vLLM's."""

import time
from typing import TYPE_CHECKING, Any

from tokenspeed_plugin.host.names import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    KVEventBatch,
    maybe_convert_block_hash,
)
from tokenspeed_plugin.scheduler_fsm._core import Core, KvEventKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenspeed_plugin.host.names import KVEventsConfig, VllmConfig


class KvEventFeed:
    """Publishes what became hittable and what no longer is, after each step."""

    def __init__(self, vllm_config: "VllmConfig") -> None:
        events = vllm_config.kv_events_config
        self._enabled = events is not None and events.enable_kv_cache_events
        self._publisher = EventPublisherFactory.create(events, vllm_config.parallel_config.data_parallel_index)

    def publish(self, core: Core, others: "Sequence[Any]" = ()) -> None:
        """Publish the core's events since the last call, and those of a connector's tiers (`others`)."""
        events = [vllm_event(*event) for event in core.drain_kv_events()] if self._enabled else []
        if events or others:
            self._publisher.publish(KVEventBatch(ts=time.time(), events=[*events, *others]))

    def publisher_config(self) -> "KVEventsConfig | None":
        """The publisher's resolved configuration, for subscribers."""
        config: KVEventsConfig | None = self._publisher.get_publisher_config()
        return config

    def shutdown(self) -> None:
        """Stop publishing."""
        self._publisher.shutdown()


def vllm_event(
    kind: KvEventKind, group: int, block_tokens: int, key: bytes, parent: bytes | None, token_ids: list[int]
) -> Any:
    """An event of the core as vLLM's."""
    # Equality, not identity: each enum value that comes out of the core is an object of its own.
    if kind == KvEventKind.CLEARED:
        return AllBlocksCleared()
    if kind == KvEventKind.REMOVED:
        return BlockRemoved(block_hashes=[maybe_convert_block_hash(key)], medium=MEDIUM_GPU, group_idx=group)
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(key)],
        parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
        token_ids=token_ids,
        block_size=block_tokens,
        lora_id=None,
        medium=MEDIUM_GPU,
        lora_name=None,
        group_idx=group,
    )
