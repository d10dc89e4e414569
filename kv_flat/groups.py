# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache groups, reduced to what block bookkeeping depends on."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# By class name, so that this room needs no vLLM. Subclasses are found through the method resolution order, the nearest name first.
_WINDOWED = frozenset({"SlidingWindowSpec", "SlidingWindowMLASpec"})
_CHUNKED = frozenset({"ChunkedLocalAttentionSpec"})
_FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
_STATE = frozenset({"MambaSpec"})
# How vLLM's workers place states: by the column of the last token, or (without prefix caching) in one block.
_STATE_MODES = ("align", "none")


# Largest unit in which prefixes are matched; and the smallest for whose sake a block is divided, because each costs a key.
MOST_MATCH_TOKENS = 128
LEAST_MATCH_TOKENS = 16


class UnsupportedGroupError(ValueError):
    """A KV cache group of a kind that the flat manager does not know."""


@dataclass(frozen=True)
class Group:
    """One KV cache group.

    Attributes:
        name: of its first layer, for messages.
        block_tokens: tokens in a block.
        window_tokens: how far back a token reads, itself included; None when it reads everything.
        window_is_chunk: a token reads back to the last multiple of the window instead (chunked local attention).
        keeps_state: one state stands for all tokens so far (Mamba, GDN, KDA, short convolutions).
    """

    name: str
    block_tokens: int
    window_tokens: int | None = None
    window_is_chunk: bool = False
    keeps_state: bool = False


def groups_from(kv_cache_groups: Iterable[Any], num_context_ranks: int = 1) -> list[Group]:
    """The groups of a vLLM `KVCacheConfig`, in its order.

    Args:
        kv_cache_groups: as vLLM reports them.
        num_context_ranks: ranks of decode context parallelism, among which the tokens of a sharded group are dealt out. A block
            number then stands for one block on each of them.

    Raises:
        UnsupportedGroupError: names the group, its kind and the kinds that are known; or a window that is sharded.
    """
    return [_group(group, num_context_ranks) for group in kv_cache_groups]


def match_unit_tokens(kv_cache_groups: Iterable[Any], hash_block_tokens: int) -> int:
    """Tokens of a logical block: the unit of keys, matching and events.

    The largest divisor of vLLM's hash block from 16 to 128 tokens, or the hash block itself where there is none. A layer that
    keeps one state for several tokens is never cut inside such a run.

    Args:
        kv_cache_groups: of a vLLM `KVCacheConfig`.
        hash_block_tokens: vLLM's resolved `hash_block_size`. It divides the block of every group, except where states are kept
            without prefix caching.
    """
    specs = [spec for group in kv_cache_groups for spec in _layer_specs(group)]
    if any(hasattr(spec, "mamba_cache_mode") for spec in specs):
        hash_block_tokens = math.gcd(hash_block_tokens, *(spec.block_size for spec in specs))
    run_tokens = math.lcm(*(_run_tokens(spec) for spec in specs))
    most = min(hash_block_tokens, MOST_MATCH_TOKENS)
    least = min(LEAST_MATCH_TOKENS, MOST_MATCH_TOKENS)
    fitting = (unit for unit in range(most, least - 1, -1) if hash_block_tokens % unit == 0 and unit % run_tokens == 0)
    return next(fitting, hash_block_tokens)


def _run_tokens(spec: Any) -> int:
    """Tokens that share one stored state; 1 where each has its own."""
    tokens = getattr(spec, "tokens_per_state", 1)
    return tokens if isinstance(tokens, int) and tokens > 1 else 1


def _layer_specs(group: Any) -> list[Any]:
    spec = group.kv_cache_spec
    return list(spec.kv_cache_specs.values()) if hasattr(spec, "kv_cache_specs") else [spec]


def _group(group: Any, num_context_ranks: int) -> Group:
    spec = group.kv_cache_spec
    # Layers of unequal width share one table, so any of them tells how tokens map to blocks.
    layers = getattr(spec, "kv_cache_specs", None)
    if layers:
        spec = next(iter(layers.values()))
    name = group.layer_names[0] if group.layer_names else type(spec).__name__
    num_shards = num_context_ranks if getattr(spec, "dcp_sharded", False) else 1
    for cls in type(spec).__mro__:
        if cls.__name__ in _WINDOWED | _CHUNKED:
            if num_shards > 1:
                msg = f"KV cache group of layer {name!r} is a sliding window; it cannot be sharded over {num_shards} ranks"
                raise UnsupportedGroupError(msg)
            if cls.__name__ in _CHUNKED:
                return Group(name, spec.block_size, spec.attention_chunk_size, window_is_chunk=True)
            return Group(name, spec.block_size, spec.sliding_window)
        if cls.__name__ in _FULL:
            return Group(name, spec.block_size * num_shards)
        if cls.__name__ in _STATE:
            return _state_group(name, spec)
    known = ", ".join(sorted(_FULL | _WINDOWED | _CHUNKED | _STATE))
    msg = f"KV cache group of layer {name!r} is a {type(spec).__name__}; known kinds: {known}"
    raise UnsupportedGroupError(msg)


def _state_group(name: str, spec: Any) -> Group:
    if spec.mamba_cache_mode not in _STATE_MODES:
        msg = f"layer {name!r} keeps states in mode {spec.mamba_cache_mode!r}; allowed: {', '.join(_STATE_MODES)}"
        raise UnsupportedGroupError(msg)
    if spec.num_speculative_blocks:
        msg = f"layer {name!r} keeps states for {spec.num_speculative_blocks} draft tokens; allowed: none"
        raise UnsupportedGroupError(msg)
    return Group(name, spec.block_size, keeps_state=True)
