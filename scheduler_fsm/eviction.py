# SPDX-License-Identifier: Apache-2.0
"""From the name of an eviction policy to its weights."""

from collections.abc import Mapping

from tokenspeed_plugin.hooks import HookError, plugin_manager
from tokenspeed_plugin.scheduler_fsm import _core
from tokenspeed_plugin.settings import SettingsError

LRU = "lru"
SESSION = "session"


def added_policies() -> Mapping[str, _core.EvictionSpec]:
    """Policies of other distributions, by name.

    Raises:
        HookError: a name that is taken, or a weight that does not exist.
    """
    policies: dict[str, _core.EvictionSpec] = {}
    for added in plugin_manager().hook.tokenspeed_eviction_policies():
        for name, weights in added.items():
            if name in (LRU, SESSION) or name in policies:
                msg = f"eviction policy {name!r} is there already; rename one of them"
                raise HookError(msg)
            try:
                policies[name] = _core.EvictionSpec(name=SESSION, **weights)
            except TypeError as error:
                msg = f"eviction policy {name!r} has weights {dict(weights)!r}: {error}"
                raise HookError(msg) from error
    return policies


def eviction_spec(name: str) -> _core.EvictionSpec:
    """The policy of that name.

    Raises:
        SettingsError: there is none.
    """
    if name in (LRU, SESSION):
        return _core.EvictionSpec(name=name)
    added = added_policies()
    if name not in added:
        msg = f"kv_eviction: {name!r} is not an eviction policy; allowed: {', '.join((SESSION, LRU, *added))}"
        raise SettingsError(msg)
    return added[name]
