# SPDX-License-Identifier: Apache-2.0
"""`vllm.general_plugins` entry point: vLLM calls `register()` in every process, possibly several times."""

import logging
import os
import sys

PLUGIN_NAME = "tokenspeed"


def register() -> None:
    """Make the flags known to vLLM. Changes nothing else until one of them is used.

    Nothing of vLLM or of ours is imported before this is called, and no error of ours reaches vLLM unless the user asked for the
    plugin by name: every `vllm` command must go on working with the plugin installed.
    """
    try:
        _install()
    except Exception:
        # "vllm." puts the line under vLLM's handler; the log module itself may be what failed.
        logging.getLogger("vllm.tokenspeed_plugin").exception(
            "tokenspeed-plugin %s (vLLM plugin %r) failed to register and is off.", _version(), PLUGIN_NAME
        )
        if is_asked_by_name():
            raise


def is_asked_by_name() -> bool:
    """Whether the user named the plugin: in `VLLM_PLUGINS`, by a `TOKENSPEED_*` setting, or by a flag with our name."""
    named = PLUGIN_NAME in os.environ.get("VLLM_PLUGINS", "").split(",")
    in_environment = any(name.startswith("TOKENSPEED_") and value for name, value in os.environ.items())
    return named or in_environment or any(PLUGIN_NAME in argument for argument in sys.argv[1:])


def _install() -> None:
    from tokenspeed_plugin.entry_points.cli import add_flags
    from tokenspeed_plugin.host.registration import install

    install(add_flags, _stat_loggers)


def _stat_loggers() -> list[type]:
    from tokenspeed_plugin.entry_points.pace_stats import PaceStatLogger
    from tokenspeed_plugin.entry_points.stats import KvCacheStatLogger

    return [KvCacheStatLogger, PaceStatLogger]


def _version() -> str:
    from tokenspeed_plugin import __version__

    return __version__
