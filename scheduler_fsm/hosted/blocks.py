# SPDX-License-Identifier: Apache-2.0
"""Blocks as vLLM's scheduler and KV connectors look at them, over the C++ pool."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenspeed_plugin.host.names import KVCacheBlock, KVCacheBlocks
from tokenspeed_plugin.kv_flat.pool_facade import NULL_BLOCK, BlockPoolFacade
from tokenspeed_plugin.scheduler_fsm._core import Departure, HostedKv

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenspeed_plugin.host.names import KVCacheSpec

BlockIds = tuple[list[int], ...]


class FlatBlocks(KVCacheBlocks):
    """Block ids of one request by group. vLLM's objects are made when somebody reads `blocks`, which only connectors do."""

    def __init__(self, ids: BlockIds, make_blocks: "Callable[[BlockIds], Any]") -> None:
        """Hold ids.

        Args:
            ids: by group.
            make_blocks: makes vLLM's KVCacheBlocks of them.
        """
        self._ids = ids
        self._make_blocks = make_blocks

    @property
    def blocks(self) -> Any:
        """By group, vLLM's KVCacheBlock objects as they are now."""
        return self._make_blocks(self._ids).blocks

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """The ids by group.

        Args:
            allow_none: None when there are none.
            group_ids: groups to return; all of them by default.
        """
        ids = self._ids if group_ids is None else tuple(self._ids[group] for group in group_ids)
        return None if allow_none and not any(ids) else ids

    def new_empty(self) -> KVCacheBlocks:
        """No blocks, of as many groups."""
        return KVCacheBlocks(tuple(() for _ in self._ids))


class LeavingBlock(KVCacheBlock):
    """A block of a request that has ended, whose return vLLM's scheduler puts off. Carries what is known of the request."""

    departure: Departure


class HostedPool(BlockPoolFacade):
    """vLLM's BlockPool: what connectors use of it, and what its own scheduler does."""

    def __init__(self, kv: HostedKv, num_blocks: int, hash_block_tokens: int) -> None:
        super().__init__(kv, num_blocks, hash_block_tokens)
        self._kv = kv

    def leaving_blocks(self, ids: list[int], departure: Departure) -> list[Any]:
        """Pinned blocks of a request that has ended, for `free_blocks` later."""
        blocks = [LeavingBlock(block_id=block) for block in ids]
        for block in blocks:
            block.departure = departure
        return blocks

    def pinned_blocks(self, ids: Iterable[int]) -> list[Any]:
        """Pinned blocks as vLLM's objects."""
        return [KVCacheBlock(block_id=block) for block in ids]

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Give back what `touch` took or what a request left, in this order."""
        blocks = [block for block in ordered_blocks if block.block_id != NULL_BLOCK]
        if blocks:
            departure = getattr(blocks[0], "departure", None) or Departure()
            self._kv.unpin([block.block_id for block in blocks], departure)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Make these blocks unhittable."""
        self._kv.unpublish([block for block in block_ids if block != NULL_BLOCK])

    def get_num_free_blocks(self) -> int:
        """Blocks that nobody owns."""
        return self._kv.num_free

    def get_usage(self) -> float:
        """Share of the blocks that have an owner, 0 to 1."""
        return 1.0 - self._kv.num_free / self._kv.num_usable


@dataclass(frozen=True)
class GroupManager:
    """What vLLM's engine reads of a group's manager.

    Attributes:
        block_size: tokens behind one block number.
        kv_cache_spec: vLLM's.
    """

    block_size: int
    kv_cache_spec: "KVCacheSpec"


class FlatCoordinator:
    """vLLM's KV cache coordinator: the members that its scheduler and EngineCore read."""

    # A match may end anywhere in a block without vLLM's splitting of chunks for state layers.
    enable_partial_hash_hits = False

    def __init__(self, kv: HostedKv, managers: Sequence[GroupManager], pool: HostedPool) -> None:
        self._kv = kv
        self.single_type_managers = tuple(managers)
        self.block_pool = pool

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, **_: Any) -> int:
        """Blocks that a request may still take until it holds `num_tokens`."""
        return self._kv.blocks_to_complete(request_id, num_tokens)

    def __getattr__(self, name: str) -> Any:
        msg = f"the flat KV manager has no vLLM coordinator; {name!r} is not known"
        raise AttributeError(msg)
