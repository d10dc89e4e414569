# SPDX-License-Identifier: Apache-2.0
"""The pluggy manager: loads hook implementations from entry points and refuses those that do not fit the specification."""

from functools import cache
from importlib.metadata import entry_points

import pluggy

from tokenspeed_plugin.hooks import hookspecs

ENTRY_POINT_GROUP = "tokenspeed_plugin.plugins"


class HookError(RuntimeError):
    """A hook implementation that cannot be loaded or does not fit; the message names distribution and plugin."""


@cache
def plugin_manager() -> pluggy.PluginManager:
    """The manager of this process, with every installed hook implementation registered and checked.

    Raises:
        HookError: an implementation fails to import, or does not match its specification.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        owner = entry.dist.name if entry.dist is not None else "unknown distribution"
        try:
            manager.register(entry.load(), name=entry.name)
            manager.check_pending()
        except Exception as error:
            msg = f"hook plugin {entry.name!r} ({entry.value}) of {owner} cannot be used: {error}"
            raise HookError(msg) from error
    return manager
