# SPDX-License-Identifier: Apache-2.0
"""Refuses or adjusts, before the runners are built, what the tokenspeed scheduler cannot honour."""

from typing import Any

from tokenspeed_plugin.host import hosted_rows
from tokenspeed_plugin.host.config_rows import ADJUSTED, KV_REFUSED, REFUSED, REFUSED_TOGETHER, Adjusted
from tokenspeed_plugin.host.log import logger


class ConfigRefusedError(ValueError):
    """Settings that a part of ours cannot honour; one line for each, with the way on."""


def adjust(engine_args: Any) -> list[Adjusted]:
    """Set the arguments of `ADJUSTED`, with a warning for each that changes; returns those."""
    changed = [row for row in ADJUSTED if getattr(engine_args, row.argument) != row.value]
    for row in changed:
        logger(__name__).warning("--%s is set to %r: %s.", row.argument.replace("_", "-"), row.value, row.why)
        setattr(engine_args, row.argument, row.value)
    return changed


def refusals(vllm_config: Any, kv_cache_config: Any = None) -> list[str]:
    """One line for each setting that the tokenspeed scheduler cannot honour.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's `KVCacheConfig`, once it is known.
    """
    lines = [row.line(vllm_config) for row in REFUSED] + [row.line(vllm_config) for row in ADJUSTED]
    lines += [row.line(vllm_config) for row in REFUSED_TOGETHER]
    if kv_cache_config is not None:
        lines += [row.line(kv_cache_config) for row in KV_REFUSED]
    return [line for line in lines if line]


def check(vllm_config: Any, kv_cache_config: Any = None) -> None:
    """Refuse what the tokenspeed scheduler cannot honour; called by the start-up gate, and again by the scheduler itself.

    Raises:
        ConfigRefusedError: names every such setting, its value and the way on.
    """
    _refuse("the tokenspeed scheduler", refusals(vllm_config, kv_cache_config))


def check_kv_manager(vllm_config: Any, kv_cache_config: Any = None) -> None:
    """The same for the flat KV manager under vLLM's own scheduler.

    Raises:
        ConfigRefusedError: names every such setting, its value and the way on.
    """
    found = [row.line(vllm_config) for row in hosted_rows.REFUSED]
    if kv_cache_config is not None:
        found += [row.line(kv_cache_config) for row in hosted_rows.KV_REFUSED]
    _refuse("the flat KV manager", [line for line in found if line])


def _refuse(who: str, lines: list[str]) -> None:
    if lines:
        msg = f"{who} cannot honour:\n  " + "\n  ".join(lines)
        raise ConfigRefusedError(msg)
