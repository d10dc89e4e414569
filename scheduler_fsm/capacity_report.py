# SPDX-License-Identifier: Apache-2.0
"""What the KV cache holds, in requests, and from which length on prefixes are reused: said once, at start-up."""

from tokenspeed_plugin.host.log import logger as named_logger
from tokenspeed_plugin.scheduler_fsm import _core

logger = named_logger(__name__)


def log_capacity(config: _core.SchedulerConfig) -> None:
    """Log the capacity; warn when prefix caching is on and can never hit.

    Args:
        config: of the core that is about to start.
    """
    logger.info("KV cache: %s; %s.", _room(config), _reuse(config))
    if config.kv.prefix_caching and config.kv.groups and _least_reused_tokens(config) >= config.max_model_tokens:
        logger.warning(
            "Prefix caching can never hit: the smallest reusable prefix has %d tokens, a request at most %d. "
            "Choose a --block-size with a divisor from 16 to 128, or raise --max-model-len.",
            _least_reused_tokens(config),
            config.max_model_tokens,
        )


def _room(config: _core.SchedulerConfig) -> str:
    kv, num_usable = config.kv, config.kv.num_blocks - 1
    if not kv.groups:
        return "the model keeps none"
    num_long, num_short = (num_usable // _num_blocks(kv, tokens) for tokens in (config.max_model_tokens, 1))
    return (
        f"{num_usable} blocks for {len(kv.groups)} group{'s'[: len(kv.groups) > 1]}, "
        f"room for {num_long} requests of {config.max_model_tokens} tokens or at most {num_short} short ones"
    )


def _reuse(config: _core.SchedulerConfig) -> str:
    if not config.kv.prefix_caching or not config.kv.groups:
        return "prefixes are not cached"
    return f"prefixes are reused from {_least_reused_tokens(config)} tokens on, in steps of {config.kv.key_tokens}"


def _least_reused_tokens(config: _core.SchedulerConfig) -> int:
    # Drafters of the EAGLE kind compute one unit more again.
    return config.kv.key_tokens * (2 if config.drop_last_match_block else 1)


def _num_blocks(kv: _core.KvConfig, num_tokens: int) -> int:
    return sum(group.max_held_blocks(num_tokens, kv.in_flight_tokens) for group in kv.groups)
