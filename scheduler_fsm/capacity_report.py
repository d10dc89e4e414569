# SPDX-License-Identifier: Apache-2.0
"""What the KV cache holds, in requests, and from which length on prefixes are reused: said once, at start-up."""

from typing import TYPE_CHECKING

from tokenspeed_plugin.host.log import logger as named_logger
from tokenspeed_plugin.kv_flat.block_uses import BlockUse, block_uses, pinning_use
from tokenspeed_plugin.kv_flat.groups import groups_from
from tokenspeed_plugin.scheduler_fsm import _core

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import KVCacheConfig

logger = named_logger(__name__)


def log_capacity(
    kv: _core.KvConfig, kv_cache_config: "KVCacheConfig", max_model_tokens: int, *, drops_last: bool
) -> None:
    """Log the capacity and what it suffers from; warn when prefix caching is on and can never hit.

    Args:
        kv: what the core is about to start with.
        kv_cache_config: what it was made from.
        max_model_tokens: of the longest request.
        drops_last: the last unit of a match is computed again, for a drafter of the EAGLE kind.
    """
    least_reused_tokens = kv.key_tokens * (2 if drops_last else 1)
    logger.info("KV cache: %s; %s.", _room(kv, max_model_tokens), _reuse(kv, least_reused_tokens))
    groups = kv_cache_config.kv_cache_groups
    if text := _losses(block_uses(groups, groups_from(groups))):
        logger.info("KV cache blocks: %s.", text)
    if kv.prefix_caching and kv.groups and least_reused_tokens >= max_model_tokens:
        logger.warning(
            "Prefix caching can never hit: the smallest reusable prefix has %d tokens, a request at most %d. "
            "Choose a --block-size with a divisor from 16 to 128, or raise --max-model-len.",
            least_reused_tokens,
            max_model_tokens,
        )


def _room(kv: _core.KvConfig, max_model_tokens: int) -> str:
    num_usable = kv.num_blocks - 1
    if not kv.groups:
        return "the model keeps none"
    num_long, num_short = (num_usable // _num_blocks(kv, tokens) for tokens in (max_model_tokens, 1))
    return (
        f"{num_usable} blocks for {len(kv.groups)} group{'s'[: len(kv.groups) > 1]}, "
        f"room for {num_long} requests of {max_model_tokens} tokens or at most {num_short} short ones"
    )


def _reuse(kv: _core.KvConfig, least_reused_tokens: int) -> str:
    if not kv.prefix_caching or not kv.groups:
        return "prefixes are not cached"
    return f"prefixes are reused from {least_reused_tokens} tokens on, in steps of {kv.key_tokens}"


def _losses(uses: list[BlockUse]) -> str:
    """Which group makes the blocks as large as they are, and what the others lose by it; empty where nothing is lost."""
    padded = [use for use in uses if use.block_bytes > use.used_bytes]
    pinning = pinning_use(uses) if uses else None
    attention = [use.group for use in uses if not use.group.keeps_state]
    is_state = pinning is not None and pinning.group.keeps_state and bool(attention)
    if pinning is None or not (padded or is_state):
        return ""
    reason = "states" if pinning.group.keeps_state else "widest tokens"
    text = (
        f"{pinning.block_bytes:,} bytes, set by the {reason} of {pinning.group.name!r} ({pinning.used_bytes:,} bytes)"
    )
    if padded:
        shares = (f"{use.unused_share:.1%} of a block of {use.group.name!r}" for use in padded)
        text += f"; never used: {', '.join(shares)}"
    if is_state:
        text += (
            f"; so a block of attention has {max(group.block_tokens for group in attention)} tokens: with a smaller "
            "--kv-cache-dtype it has more of them, and only longer requests gain"
        )
    return text


def _num_blocks(kv: _core.KvConfig, num_tokens: int) -> int:
    return sum(group.max_held_blocks(num_tokens, kv.in_flight_tokens) for group in kv.groups)
