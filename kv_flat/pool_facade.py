# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache manager and block pool, as far as KV connectors use them, over the C++ pool."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from tokenspeed_plugin.host.names import KVCacheBlock, KVCacheBlocks, make_block_hash_with_group_id

NULL_BLOCK = 0


class PinningCore(Protocol):
    """What the facade needs of the core."""

    def pin(self, blocks: list[int]) -> None:
        """Become one more owner of each block."""

    def unpin(self, blocks: list[int]) -> None:
        """Give one share of each block back."""

    def num_owners(self, block: int) -> int:
        """Owners of a block."""


class _Blocks(Sequence[Any]):
    """`pool.blocks`: made when looked at, as nothing is kept of them in Python."""

    def __init__(self, pool: "BlockPoolFacade") -> None:
        self._pool = pool

    def __len__(self) -> int:
        return self._pool.num_gpu_blocks

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._pool.block(block) for block in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            msg = f"block {index}; the pool has blocks 0 to {len(self) - 1}"
            raise IndexError(msg)
        return self._pool.block(index)


class BlockPoolFacade:
    """Lets connectors hold blocks: a touched block is neither handed out nor evicted before it is freed as often."""

    def __init__(self, core: PinningCore, num_blocks: int, hash_block_tokens: int) -> None:
        """Build it.

        Args:
            core: that owns the pool. Held weakly, as a connector that is held by the core holds this.
            num_blocks: the null block included.
            hash_block_tokens: tokens behind one of vLLM's block hashes.
        """
        self._core = weakref.ref(core)
        self.num_gpu_blocks = num_blocks
        self.hash_block_size = hash_block_tokens
        self.blocks: Sequence[Any] = _Blocks(self)

    @property
    def null_block(self) -> Any:
        """Stands in tables where no KV is kept."""
        return self.block(NULL_BLOCK)

    def block(self, block_id: int) -> Any:
        """One block as vLLM's KVCacheBlock, with its owners counted now."""
        core = self._core()
        num_owners = core.num_owners(block_id) if core is not None and block_id != NULL_BLOCK else 0
        return KVCacheBlock(block_id=block_id, ref_cnt=num_owners, is_null=block_id == NULL_BLOCK)

    def touch(self, blocks: Iterable[Any]) -> None:
        """Hold these blocks."""
        core = self._core()
        if core is not None:
            core.pin([block.block_id for block in blocks if not block.is_null])

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Give back what `touch` took, in this order."""
        core = self._core()
        if core is not None:
            core.unpin([block.block_id for block in ordered_blocks if not block.is_null])


class KvManagerFacade:
    """What `bind_kv_cache_manager` hands to a connector."""

    def __init__(self, block_pool: BlockPoolFacade) -> None:
        self.block_pool = block_pool

    def __getattr__(self, name: str) -> Any:
        msg = f"the tokenspeed scheduler has no vLLM KVCacheManager; connectors can use its block_pool, not {name!r}"
        raise AttributeError(msg)


def allocated_blocks(
    table: tuple[list[int], ...],
    num_cached_tokens: int,
    block_tokens: Sequence[int],
    hashes: Sequence[bytes],
    hash_block_tokens: int,
) -> Any:
    """A request's table as vLLM's KVCacheBlocks. Blocks of the cached prefix carry their hash, others are to be filled.

    Args:
        table: block ids by group.
        num_cached_tokens: that the pool had already.
        block_tokens: tokens per block, by group.
        hashes: vLLM's block hashes of the request.
        hash_block_tokens: tokens behind one of them.
    """
    groups = []
    for group, ids in enumerate(table):
        num_cached = num_cached_tokens // block_tokens[group]
        per_block = block_tokens[group] // hash_block_tokens
        blocks = [KVCacheBlock(block_id=block, is_null=block == NULL_BLOCK) for block in ids]
        for index, block in enumerate(blocks[:num_cached]):
            last = (index + 1) * per_block - 1
            if not block.is_null and last < len(hashes):
                block.set_block_hash(make_block_hash_with_group_id(hashes[last], group))
        groups.append(blocks)
    return KVCacheBlocks(tuple(groups))
