# SPDX-License-Identifier: Apache-2.0
"""Installs the patches that are always there, once in each process."""

from collections.abc import Callable
from functools import cache
from typing import Any

from tokenspeed_plugin.host import engine_gate, patches, placed_models
from tokenspeed_plugin.host.capabilities import Capability
from tokenspeed_plugin.host.check import HostReport, check_start, missing_of
from tokenspeed_plugin.host.log import is_main_process, logger


def install(add_flags: Callable[[Any, str | None], None]) -> HostReport:
    """Install the parser hook and the start-up gate.

    On a vLLM that is not supported the plugin is off, which one line says. What can still be patched is, so that asking for
    something of ours ends in an error with the reason instead of in silence.

    Args:
        add_flags: called as `add_flags(parser, reason)`; `reason` says why the plugin is off, None when it is on.

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
        patches.install_engine_config(engine_gate.create_engine_config)
    placed_models.install_inherited()
    return report


@cache
def _say_off(reason: str) -> None:
    """One line for each process and reason, however often vLLM registers the plugin."""
    logger(__name__).warning("tokenspeed-plugin is off: %s.", reason)


def _is_there(patch: patches.Patch) -> bool:
    return not missing_of(Capability(patch.target))
