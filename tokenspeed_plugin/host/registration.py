# SPDX-License-Identifier: Apache-2.0
"""Installs the patches that are always there, once in each process."""

from collections.abc import Callable
from functools import cache
from typing import Any

from tokenspeed_plugin.host import engine_gate, few_rows, mla_append, mla_backend, patches, placed_models
from tokenspeed_plugin.host.capabilities import Capability
from tokenspeed_plugin.host.check import HostReport, check_start, missing_of
from tokenspeed_plugin.host.log import is_main_process, logger
from tokenspeed_plugin.host.schedulers import FLAT_KV_PATHS, is_tokenspeed


def install(add_flags: Callable[[Any, str | None], None], stat_loggers: Callable[[], list[type]] = list) -> HostReport:
    """Install the parser hook and the start-up gate.

    On a vLLM that is not supported the plugin is off, which one line says. What can still be patched is, so that asking for
    something of ours ends in an error with the reason instead of in silence.

    Args:
        add_flags: called as `add_flags(parser, reason)`; `reason` says why the plugin is off, None when it is on.
        stat_loggers: our loggers for an engine with the flat KV manager, under either scheduler.

    Returns:
        What the check of the host found.
    """
    report = check_start()
    reason = report.reason
    if reason and is_main_process():
        _say_off(reason)
    if _is_there(patches.PARSER):
        patches.install_parser(lambda parser: add_flags(parser, reason))
    if _is_there(patches.ENGINE_CONFIG):
        patches.install_engine_config(_engine_config_with(stat_loggers))
    placed_models.install_inherited()
    mla_backend.install_inherited()
    mla_append.install_inherited()
    few_rows.install_inherited()
    return report


def _engine_config_with(stat_loggers: Callable[[], list[type]]) -> Callable[..., Any]:
    def loggers_for(vllm_config: Any) -> list[type]:
        return stat_loggers() if _has_flat_kv(vllm_config) else []

    def create(original: Callable[..., Any], engine_args: Any, *args: Any, **kwargs: Any) -> Any:
        config = engine_gate.create_engine_config(original, engine_args, *args, **kwargs)
        if engine_gate.is_asked(engine_args) and _has_flat_kv(config):
            patches.install_stat_loggers(loggers_for)
        return config

    return create


def _has_flat_kv(vllm_config: Any) -> bool:
    scheduler_cls = vllm_config.scheduler_config.scheduler_cls
    return is_tokenspeed(scheduler_cls) or scheduler_cls in FLAT_KV_PATHS


@cache
def _say_off(reason: str) -> None:
    """One line for each process and reason, however often vLLM registers the plugin."""
    logger(__name__).warning("tokenspeed-plugin is off: %s.", reason)


def _is_there(patch: patches.Patch) -> bool:
    return not missing_of(Capability(patch.target))
