# SPDX-License-Identifier: Apache-2.0
"""What `doctor` finds out: the host, the settings, the patches, what is switched on and what cannot be."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tokenspeed_plugin import __version__, availability
from tokenspeed_plugin.hooks import HookError
from tokenspeed_plugin.host import patches, plugins
from tokenspeed_plugin.host.check import HostReport, check_host, check_kernels, check_placement
from tokenspeed_plugin.host.schedulers import scheduler_class, scheduler_path, target_problem
from tokenspeed_plugin.host.version import SUPPORTED
from tokenspeed_plugin.settings import KEYS, ResolvedSettings, Settings, SettingsError, Source, allowed, resolve


@dataclass(frozen=True)
class HostFinding:
    """The installed vLLM and why the plugin is off there, if it is."""

    version: str | None
    supported: str
    missing: tuple[str, ...]
    reason_off: str | None


@dataclass(frozen=True)
class SettingFinding:
    """One setting: its value, where that came from, what it takes, and what of that this version has."""

    key: str
    value: str
    source: str
    allowed: str
    available: str


@dataclass(frozen=True)
class PatchFinding:
    """One row of the patch table and whether it is installed in a vLLM process."""

    name: str
    target: str
    installed: bool
    when: str
    why: str
    goes: str


@dataclass(frozen=True)
class Diagnosis:
    """Everything that `doctor` prints.

    Attributes:
        problems: what was asked for and cannot be; each names the culprit and the way on.
        notes: what is worth knowing and stops nothing.
    """

    version: str
    host: HostFinding
    settings: tuple[SettingFinding, ...]
    patches: tuple[PatchFinding, ...]
    switched_on: tuple[str, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def diagnose(flags: Mapping[str, object]) -> Diagnosis:
    """Look at this environment as `vllm serve` with `flags` would.

    Args:
        flags: settings by key, as if given on the command line.
    """
    report = check_host()
    not_loaded = plugins.loading_problem()
    if report.version is not None and not_loaded is None:
        plugins.load()
    try:
        resolved, problems = resolve(flags, os.environ, None), []
    except (SettingsError, ValueError) as error:
        resolved, problems = _defaults(), [str(error)]
    problems += availability.refusals(resolved)
    asked = [key for key in KEYS if getattr(resolved.values, key) != Settings.model_fields[key].default]
    problems += _why_off(report, not_loaded) if asked else []
    problems += _scheduler_problems(resolved) if not problems else []
    problems += _why_off(check_placement(), None) if "placement" in asked and not problems else []
    problems += _why_off(check_kernels(), None) if "kernels" in asked and not problems else []
    return Diagnosis(
        version=__version__,
        host=HostFinding(report.version, SUPPORTED, report.missing, report.reason),
        settings=tuple(_setting(resolved, key) for key in KEYS),
        patches=tuple(_patch(row) for row in patches.PATCHES),
        switched_on=() if problems else tuple(f"{key}={getattr(resolved.values, key)}" for key in asked),
        problems=tuple(problems),
        notes=() if asked else tuple(_why_off(report, not_loaded)),
    )


def _defaults() -> ResolvedSettings:
    return ResolvedSettings(Settings.model_validate({}), dict.fromkeys(KEYS, Source.DEFAULT))


def _why_off(report: HostReport, not_loaded: str | None) -> list[str]:
    reasons = (f"the plugin is off: {report.reason}" if report.reason else None, not_loaded)
    return [reason for reason in reasons if reason]


def _scheduler_problems(resolved: ResolvedSettings) -> list[str]:
    name, source = resolved.values.scheduler, resolved.source("scheduler")
    try:
        path = scheduler_path(name, source)
        chosen = None if path is None else scheduler_class(path, f"{source.spelling('scheduler')} {name}")
    except (SettingsError, HookError) as error:
        return [str(error)]
    problem = target_problem(resolved, chosen)
    return [problem] if problem else []


def _setting(resolved: ResolvedSettings, key: str) -> SettingFinding:
    return SettingFinding(
        key=key,
        value=f"{getattr(resolved.values, key)}",
        source=resolved.source(key).value,
        allowed=allowed(key),
        available=availability.available(key),
    )


def _patch(row: patches.Patch) -> PatchFinding:
    return PatchFinding(row.name, row.target, row.is_installed, row.when, row.why, row.goes)
