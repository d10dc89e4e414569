# SPDX-License-Identifier: Apache-2.0
"""Chooses a kernel for a request and says why: filters first, then measurements, then priority."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from tokenspeed_plugin.kernels.autotune import TuningTable
from tokenspeed_plugin.kernels.registry import (
    KernelSpec,
    Objective,
    Platform,
    Priority,
    Registry,
    Signature,
    default_registry,
    signature_text,
)

ENVIRONMENT_VARIABLE = "TOKENSPEED_KERNELS"
OWN_KEYS = {"append": ("mla", "append")}
"""Operations that are chosen by a key of their own, whatever the rest of their family is."""


@dataclass(frozen=True)
class KernelRequest:
    """What a caller needs: an operation, operand formats, shape numbers and an objective, on a platform."""

    family: str
    mode: str
    signature: Signature
    shape: Mapping[str, int]
    platform: Platform
    objective: Objective = Objective.LATENCY

    def __str__(self) -> str:
        shape = ", ".join(f"{name}={value}" for name, value in sorted(self.shape.items()))
        formats = signature_text(self.signature)
        return f"{self.family}.{self.mode} ({formats}; {shape}; {self.objective.value}; {self.platform})"


@dataclass(frozen=True)
class Rejection:
    """A solution that was not chosen, and the reason."""

    solution: str
    reason: str


@dataclass(frozen=True)
class Selection:
    """The kernel chosen, the reason, and everyone else with theirs."""

    spec: KernelSpec
    reason: str
    rejections: tuple[Rejection, ...] = ()


class KernelSelectionError(LookupError):
    """Nothing fits the request, or an override does not; the message lists every solution with its reason."""


@dataclass(frozen=True)
class Overrides:
    """Solutions asked for by name, by family or by one of `OWN_KEYS`; where they were asked for."""

    by_family: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""


def parse_overrides(text: str, registry: Registry, origin: str) -> Overrides:
    """Read `auto`, `off` (nothing is asked for), or `mla=NAME,append=NAME`.

    Raises:
        ValueError: an unknown family or solution; the message names it and what is allowed.
    """
    if text in {"", "auto", "off"}:
        return Overrides(origin=origin)
    keys = registry.families() | {key for key, mode in OWN_KEYS.items() if registry.candidates(*mode)}
    chosen: dict[str, str] = {}
    for part in text.split(","):
        key, separator, solution = (piece.strip() for piece in part.partition("="))
        if not separator or key not in keys:
            allowed = ", ".join(sorted(keys))
            raise ValueError(
                f"{origin}: {part.strip()!r}, allowed: auto, or FAMILY=SOLUTION with a family of {allowed}"
            )
        named = registry.solutions_of_mode(*OWN_KEYS[key]) if key in OWN_KEYS else registry.solutions(key)
        if solution not in named:
            raise ValueError(f"{origin}: {key}={solution!r}, allowed solutions: {', '.join(sorted(named))}")
        if key in chosen:
            raise ValueError(f"{origin}: {key} is given twice, as {chosen[key]!r} and {solution!r}")
        chosen[key] = solution
    return Overrides(chosen, origin)


def override_key(family: str, mode: str) -> str:
    """What an override names an operation by."""
    return next((key for key, operation in OWN_KEYS.items() if operation == (family, mode)), family)


_context: ContextVar[Overrides | None] = ContextVar("kernel_overrides", default=None)


@contextlib.contextmanager
def use_kernels(text: str, registry: Registry | None = None) -> Iterator[None]:
    """Override by name within a `with` block; same checks as everywhere.

    Raises:
        ValueError: see `parse_overrides`.
    """
    token = _context.set(parse_overrides(text, registry or default_registry(), "use_kernels"))
    try:
        yield
    finally:
        _context.reset(token)


def select_kernel(
    request: KernelRequest,
    *,
    solution: str | None = None,
    setting: str = "auto",
    registry: Registry | None = None,
    tuning: TuningTable | None = None,
) -> Selection:
    """Choose the kernel for a request.

    An override is taken from the argument `solution`, else from `use_kernels`, else from the environment variable
    TOKENSPEED_KERNELS, else from `setting` (the flag `--kernels`). It must pass the same filters as any other solution.

    Args:
        request: what is needed.
        solution: the name of a solution.
        setting: value of the flag: `auto`, or `mla=NAME,moe=NAME`.
        registry: default: that of this process.
        tuning: measurements for this device; without them priority decides.

    Raises:
        KernelSelectionError: nothing fits, or the override does not.
        ValueError: an override names an unknown family or solution.
    """
    registry = registry or default_registry()
    named, origin = _override(override_key(request.family, request.mode), solution, setting, registry)
    fitting, rejections = _filter(request, registry)
    if named is not None:
        return _named(request, named, origin, fitting, rejections)
    if not fitting:
        raise KernelSelectionError(f"no kernel fits {request}: {_listed(rejections)}")
    times_us = tuning.times_us(request.family, request.mode, request.signature, request.shape) if tuning else {}
    ranked = sorted(fitting, key=lambda spec: _rank(spec, request.objective, times_us))
    best = ranked[0]
    losers = tuple(
        Rejection(spec.solution, _remarked(_why_not(spec, best, request.objective, times_us), spec, request))
        for spec in ranked[1:]
    )
    return Selection(best, _remarked(_why(best, request.objective, times_us), best, request), (*losers, *rejections))


def _override(key: str, solution: str | None, setting: str, registry: Registry) -> tuple[str | None, str]:
    if solution is not None:
        parsed = parse_overrides(f"{key}={solution}", registry, "argument solution")
        return parsed.by_family[key], parsed.origin
    context = _context.get()
    environment = parse_overrides(os.environ.get(ENVIRONMENT_VARIABLE, ""), registry, ENVIRONMENT_VARIABLE)
    flag = parse_overrides(setting, registry, "--kernels")
    for overrides in (context, environment, flag):
        if overrides is not None and key in overrides.by_family:
            return overrides.by_family[key], overrides.origin
    return None, ""


def _filter(request: KernelRequest, registry: Registry) -> tuple[list[KernelSpec], list[Rejection]]:
    fitting, rejections = [], []
    for spec in registry.candidates(request.family, request.mode):
        reason = _refusal(spec, request)
        if reason is None:
            fitting.append(spec)
        else:
            rejections.append(Rejection(spec.solution, reason))
    return fitting, rejections


def _refusal(spec: KernelSpec, request: KernelRequest) -> str | None:
    """The first reason why a specification cannot serve a request, cheapest checks first."""
    if not any(capability.admits(request.platform) for capability in spec.capabilities):
        return f"platform {request.platform}, allowed: {'; '.join(map(str, spec.capabilities))}"
    if not any(dict(signature) == dict(request.signature) for signature in spec.signatures):
        allowed = "; ".join(map(signature_text, spec.signatures))
        return f"formats {signature_text(request.signature)}, allowed: {allowed}"
    for trait in spec.traits:
        if (refusal := trait.refusal(request.shape)) is not None:
            return refusal
    if request.objective not in spec.objectives:
        allowed = ", ".join(sorted(objective.value for objective in spec.objectives))
        return f"objective {request.objective.value}, allowed: {allowed}"
    return spec.unavailable()


def _named(
    request: KernelRequest, named: str, origin: str, fitting: list[KernelSpec], rejections: list[Rejection]
) -> Selection:
    for spec in fitting:
        if spec.solution == named:
            others = (Rejection(other.solution, f"{named} was asked for") for other in fitting if other is not spec)
            return Selection(spec, _remarked(f"asked for by {origin}", spec, request), (*others, *rejections))
    reason = next((r.reason for r in rejections if r.solution == named), f"it has no mode {request.mode}")
    key = override_key(request.family, request.mode)
    raise KernelSelectionError(f"{origin} asks for {key}={named}, which does not fit {request}: {reason}")


def _rank(spec: KernelSpec, objective: Objective, times_us: Mapping[str, float]) -> tuple[float, ...]:
    if objective is Objective.PORTABILITY:
        return (abs(spec.priority - Priority.PORTABLE), -spec.priority)
    measured = times_us.get(spec.solution)
    # A table that lacks a solution says nothing about it, so a measured one goes first.
    return (0.0, measured, -spec.priority) if measured is not None else (1.0, 0.0, -spec.priority)


def _why(spec: KernelSpec, objective: Objective, times_us: Mapping[str, float]) -> str:
    if objective is Objective.PORTABILITY:
        return f"tier {spec.priority.name.lower()}, the nearest to portable"
    if spec.solution in times_us:
        return f"measured fastest: {times_us[spec.solution]:.1f} us"
    return f"tier {spec.priority.name.lower()}, nothing was measured"


def _why_not(spec: KernelSpec, best: KernelSpec, objective: Objective, times_us: Mapping[str, float]) -> str:
    if objective is not Objective.PORTABILITY and best.solution in times_us:
        if spec.solution not in times_us:
            return "not measured"
        return f"measured {times_us[spec.solution]:.1f} us, {best.solution} {times_us[best.solution]:.1f} us"
    return f"tier {spec.priority.name.lower()}, {best.solution} is {best.priority.name.lower()}"


def _remarked(reason: str, spec: KernelSpec, request: KernelRequest) -> str:
    remark = spec.remark(request.shape, request.signature)
    return f"{reason}; {remark}" if remark else reason


def _listed(rejections: list[Rejection]) -> str:
    return "; ".join(f"{r.solution}: {r.reason}" for r in rejections) or "none is registered"
