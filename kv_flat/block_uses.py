# SPDX-License-Identifier: Apache-2.0
"""How the groups of a model fill the blocks of one pool: all are as large as the group that needs most makes them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed_plugin.kv_flat.groups import Group

# The shortest attention block that vLLM's kernels take.
LEAST_BLOCK_TOKENS = 16


@dataclass(frozen=True)
class BlockUse:
    """What one group makes of a block.

    Attributes:
        group: whose it is.
        block_bytes: of a block, the same for all groups.
        used_bytes: the part that a full block of this group uses, over all its layers.
    """

    group: Group
    block_bytes: int
    used_bytes: int

    @property
    def least_bytes(self) -> int:
        """The smallest block that this group can live with: its states, or 16 tokens of it."""
        if self.group.keeps_state or self.group.block_tokens <= LEAST_BLOCK_TOKENS:
            return self.used_bytes
        return self.used_bytes * LEAST_BLOCK_TOKENS // self.group.block_tokens

    @property
    def unused_share(self) -> float:
        """Part of the block that nothing is ever written to, 0 to 1."""
        return 1 - self.used_bytes / self.block_bytes


def block_uses(kv_cache_groups: Sequence[Any], groups: Iterable[Group]) -> list[BlockUse]:
    """What each group of a vLLM `KVCacheConfig` makes of a block.

    Args:
        kv_cache_groups: as vLLM reports them.
        groups: the same, as `groups_from` reads them.
    """
    layers = [_layer_specs(group) for group in kv_cache_groups]
    block_bytes = max((sum(spec.page_size_bytes for spec in specs) for specs in layers), default=0)
    return [
        BlockUse(group, block_bytes, sum(getattr(spec, "real_page_size_bytes", spec.page_size_bytes) for spec in specs))
        for specs, group in zip(layers, groups, strict=True)
    ]


def pinning_use(uses: Iterable[BlockUse]) -> BlockUse:
    """The group for whose sake all blocks are as large as they are."""
    return max(uses, key=lambda use: use.least_bytes)


def _layer_specs(group: Any) -> list[Any]:
    """One spec for each layer; layers of unequal width in one group have their own."""
    spec = group.kv_cache_spec
    if hasattr(spec, "kv_cache_specs"):
        return list(spec.kv_cache_specs.values())
    return [spec] * max(len(group.layer_names), 1)
