# SPDX-License-Identifier: Apache-2.0
"""What happens around `EngineArgs.create_engine_config`: nothing when nothing of ours is asked for, else the whole start-up gate."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed_plugin import availability, flag_carrier
from tokenspeed_plugin.host import config_gate, kernel_gate, mla_append, mla_backend, placed_models, placement_gate
from tokenspeed_plugin.host.check import require_host
from tokenspeed_plugin.host.log import logger
from tokenspeed_plugin.host.schedulers import (
    FLAT_KV_PATHS,
    is_tokenspeed,
    kv_manager_problem,
    loses_async_scheduling,
    scheduler_class,
    scheduler_path,
    target_problem,
)
from tokenspeed_plugin.settings import (
    ADDITIONAL_CONFIG_KEY,
    ResolvedSettings,
    SettingsError,
    Source,
    from_environment,
    resolve,
)


@dataclass(frozen=True)
class ChosenScheduler:
    """The scheduler that was asked for.

    Attributes:
        cls: the class, None for vLLM's own.
        value: what vLLM's `scheduler_cls` gets: a dotted path (it must travel to the engine core) or the class it was given.
        asked_by: how the user asked, for errors.
        settings: everything that was asked for.
        has_flat_kv: whether vLLM's own scheduler gets the flat KV manager.
    """

    cls: type | None
    value: Any
    asked_by: str
    settings: ResolvedSettings
    has_flat_kv: bool = False


def create_engine_config(original: Callable[..., Any], engine_args: Any, *args: Any, **kwargs: Any) -> Any:
    """Make the `VllmConfig`, with the gate around it when something of ours is asked for.

    Raises:
        SettingsError: a bad setting, or one that this version does not have.
        HostError: the installed vLLM lacks what is relied on.
        ConfigRefusedError: vLLM settings that the tokenspeed scheduler or the flat KV manager cannot honour.
    """
    if not is_asked(engine_args):
        placed_models.remove()
        mla_backend.remove()
        mla_append.remove()
        return original(engine_args, *args, **kwargs)
    chosen = choose_scheduler(engine_args)
    engine_args.scheduler_cls = chosen.value
    ours = chosen.cls is not None and is_tokenspeed(chosen.cls)
    if ours:
        config_gate.adjust(engine_args)
    config = placement_gate.create_engine_config(
        lambda: kernel_gate.create_engine_config(lambda: original(engine_args, *args, **kwargs), chosen.settings),
        engine_args,
        chosen.settings,
    )
    if ours:
        config_gate.check(config)
    elif chosen.has_flat_kv:
        config_gate.check_kv_manager(config)
        config.scheduler_config.scheduler_cls = FLAT_KV_PATHS[bool(config.scheduler_config.async_scheduling)]
    else:
        _warn_of_lost_overlap(chosen, config)
    return config


def is_asked(engine_args: Any) -> bool:
    """Whether a flag, the environment, `additional_config` or `scheduler_cls` names something of ours."""
    # An unsupported vLLM may have neither field; the gate still has to see the flags there, to refuse them.
    scheduler_cls, additional = (
        getattr(engine_args, "scheduler_cls", None),
        getattr(engine_args, "additional_config", None),
    )
    return bool(
        flag_carrier.recorded()
        or from_environment(os.environ)
        or (isinstance(additional, Mapping) and ADDITIONAL_CONFIG_KEY in additional)
        or (isinstance(scheduler_cls, str) and "." not in scheduler_cls)
        or is_tokenspeed(scheduler_cls)
    )


def choose_scheduler(engine_args: Any) -> ChosenScheduler:
    """Settle which scheduler runs, from all sources, and refuse what cannot be.

    `scheduler_cls` (set by `--scheduler`, `--scheduler-cls` or `LLM(scheduler_cls=...)`) counts as a flag.
    """
    given = getattr(engine_args, "scheduler_cls", None)
    resolved = _resolve(given, getattr(engine_args, "additional_config", None))
    availability.require(resolved)
    if isinstance(given, type):
        require_host(f"scheduler_cls={given.__qualname__}")
        _require_fitting_scheduler(resolved, given)
        return ChosenScheduler(given, given, f"scheduler_cls={given.__qualname__}", resolved)
    name, source = resolved.values.scheduler, resolved.source("scheduler")
    asked_by = f"{source.spelling('scheduler')} {name}"
    path = scheduler_path(name, source)
    if path is None:
        _require_fitting_scheduler(resolved, None)
        return _stock(resolved, asked_by)
    require_host(asked_by)
    chosen = scheduler_class(path, asked_by)
    _require_fitting_scheduler(resolved, chosen)
    return ChosenScheduler(chosen, path, asked_by, resolved)


def _stock(resolved: ResolvedSettings, asked_by: str) -> ChosenScheduler:
    has_flat_kv = resolved.values.kv_manager == "flat"
    if has_flat_kv:
        require_host(f"{resolved.source('kv_manager').spelling('kv_manager')} flat")
    return ChosenScheduler(None, None, asked_by, resolved, has_flat_kv)


def _require_fitting_scheduler(resolved: ResolvedSettings, chosen: type | None) -> None:
    for problem in (target_problem(resolved, chosen), kv_manager_problem(resolved, chosen)):
        if problem:
            raise SettingsError(problem)


def _resolve(given: Any, additional_config: object) -> ResolvedSettings:
    flags = flag_carrier.recorded()
    if given is not None:
        _refuse_two_schedulers(flags, given)
        if isinstance(given, str):
            flags.setdefault("scheduler", given)
    return resolve(flags, os.environ, additional_config)


def _refuse_two_schedulers(flags: Mapping[str, object], given: Any) -> None:
    flag = flags.get("scheduler")
    if flag is not None and given not in (flag, scheduler_path(str(flag))):
        msg = (
            f"{Source.FLAG.spelling('scheduler')} {flag} and scheduler_cls={given!r} name different schedulers; "
            "allowed: one of them"
        )
        raise SettingsError(msg)


def _warn_of_lost_overlap(chosen: ChosenScheduler, config: Any) -> None:
    if chosen.cls is not None and config.scheduler_config.async_scheduling and loses_async_scheduling(chosen.cls):
        logger(__name__).warning(
            "%s extends vLLM's synchronous Scheduler, so asynchronous scheduling gains nothing and every step waits for the host. "
            "Extend vllm.v1.core.sched.async_scheduler.AsyncScheduler, or set --no-async-scheduling to silence this.",
            chosen.asked_by,
        )
