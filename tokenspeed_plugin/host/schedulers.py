# SPDX-License-Identifier: Apache-2.0
"""From what a user writes after `--scheduler` to the class that vLLM builds."""

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from tokenspeed_plugin.hooks import HookError, plugin_manager
from tokenspeed_plugin.settings import ResolvedSettings, SettingsError, Source, allowed

STOCK = "vllm"
TOKENSPEED = "tokenspeed"
TOKENSPEED_PATH = "tokenspeed_plugin.scheduler_fsm.TokenSpeedScheduler"
# vLLM's schedulers with the flat KV manager: without and with asynchronous scheduling.
FLAT_KV_PATHS = (
    "tokenspeed_plugin.scheduler_fsm.hosted.schedulers.FlatKvScheduler",
    "tokenspeed_plugin.scheduler_fsm.hosted.schedulers.FlatKvAsyncScheduler",
)


def scheduler_names() -> Mapping[str, str]:
    """Short name -> dotted path: ours and those of other distributions.

    Raises:
        HookError: two of them claim the same name.
    """
    names = {TOKENSPEED: TOKENSPEED_PATH}
    for added in plugin_manager().hook.tokenspeed_schedulers():
        for name, path in added.items():
            if name == STOCK or names.get(name, path) != path:
                msg = (
                    f"scheduler name {name!r} is claimed by {path} and by {names.get(name, 'vLLM')}; rename one of them"
                )
                raise HookError(msg)
            names[name] = path
    return names


def scheduler_path(name: str, source: Source = Source.FLAG) -> str | None:
    """Dotted path for `name`, None for vLLM's own scheduler.

    Raises:
        SettingsError: `name` is neither a known name nor a dotted path.
    """
    if name == STOCK:
        return None
    names = scheduler_names()
    if name in names:
        return names[name]
    if "." in name:
        return name
    near = difflib.get_close_matches(name, [STOCK, *names], n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    extra = [n for n in names if n != TOKENSPEED]
    more = f"; other distributions add {', '.join(extra)}" if extra else ""
    msg = f"{source.spelling('scheduler')}: {name!r} is not a scheduler{hint}; allowed: {allowed('scheduler')}{more}"
    raise SettingsError(msg)


def scheduler_class(path: str, asked_by: str) -> type:
    """The class at `path`.

    Raises:
        SettingsError: it cannot be imported, or is not a class.
    """
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        msg = f"{asked_by}: no class at {path!r} ({error}); allowed: {allowed('scheduler')}"
        raise SettingsError(msg) from error
    if not isinstance(found, type):
        msg = f"{asked_by}: {path!r} is {found!r}, not a class; allowed: {allowed('scheduler')}"
        raise SettingsError(msg)
    return found


def is_tokenspeed(scheduler_cls: Any) -> bool:
    """Whether a value of vLLM's `scheduler_cls` (dotted path or class) is our scheduler or a subclass of it."""
    if isinstance(scheduler_cls, str):
        return scheduler_cls == TOKENSPEED_PATH
    if not isinstance(scheduler_cls, type):
        return False
    package, _, name = TOKENSPEED_PATH.rpartition(".")
    return any(c.__name__ == name and c.__module__.startswith(package) for c in scheduler_cls.__mro__)


def target_problem(resolved: ResolvedSettings, scheduler_cls: type | None) -> str | None:
    """Why the rate per user that was asked for would be kept by nobody: only our scheduler knows of it. None when all is well.

    Args:
        resolved: the settings.
        scheduler_cls: the class that will run; None for vLLM's own.
    """
    values = resolved.values
    if is_tokenspeed(scheduler_cls):
        return None
    scheduler = "vLLM's own scheduler" if scheduler_cls is None else scheduler_cls.__qualname__
    if values.target_tps_per_user != 0:
        key, value, without = "target_tps_per_user", f"{values.target_tps_per_user:g}", "0, or any rate"
    elif values.target_overload != "queue":
        key, value, without = "target_overload", repr(values.target_overload), "'queue', or any"
    elif values.step_time_profile:
        key, value, without = "step_time_profile", repr(values.step_time_profile), "none, or a file"
    else:
        return None
    spelling = resolved.source(key).spelling(key)
    return f"{spelling}: {value} has no effect with {scheduler}; allowed: {without} with `--scheduler tokenspeed`"


def kv_manager_problem(resolved: ResolvedSettings, scheduler_cls: type | None) -> str | None:
    """Why the flat KV manager cannot be put under the scheduler that was asked for. None when all is well.

    Args:
        resolved: the settings.
        scheduler_cls: the class that was asked for; None for vLLM's own.
    """
    if resolved.values.kv_manager != "flat" or scheduler_cls is None or is_tokenspeed(scheduler_cls):
        return None
    spelling = resolved.source("kv_manager").spelling("kv_manager")
    return (
        f"{spelling}: 'flat' does not go with {scheduler_cls.__qualname__}; "
        "allowed: vllm, or flat with `--scheduler vllm` (it is a part of `--scheduler tokenspeed`)"
    )


def loses_async_scheduling(scheduler_cls: type) -> bool:
    """Whether the class extends vLLM's synchronous scheduler only, and so gets no overlap when asynchronous scheduling is on."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    return issubclass(scheduler_cls, Scheduler) and not issubclass(scheduler_cls, AsyncScheduler)
