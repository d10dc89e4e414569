# SPDX-License-Identifier: Apache-2.0
"""Pluggy hooks by which other distributions add to the plugin: specifications and the manager that loads them."""

from tokenspeed_plugin.hooks.hookspecs import PROJECT, hookimpl
from tokenspeed_plugin.hooks.plugin_manager import ENTRY_POINT_GROUP, HookError, plugin_manager

__all__ = ["ENTRY_POINT_GROUP", "PROJECT", "HookError", "hookimpl", "plugin_manager"]
