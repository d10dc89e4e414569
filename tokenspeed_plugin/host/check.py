# SPDX-License-Identifier: Apache-2.0
"""Whether the installed vLLM has what is relied on, and the names of what it lacks."""

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tokenspeed_plugin.host import capabilities, kernel_capabilities, manager_capabilities, placement_capabilities
from tokenspeed_plugin.host.capabilities import Capability
from tokenspeed_plugin.host.version import SUPPORTED, installed_version, is_supported


class HostError(RuntimeError):
    """The installed vLLM cannot carry what was asked for; the message names its version and what it lacks."""


@dataclass(frozen=True)
class HostReport:
    """What the check found.

    Attributes:
        version: of the installed vLLM, None when there is none.
        missing: one line per object, method, parameter or field that is not there.
    """

    version: str | None
    missing: tuple[str, ...] = ()

    @property
    def reason(self) -> str | None:
        """Why the plugin is off, in one line; None when the host carries it."""
        if self.version is None:
            return f"vLLM cannot be imported (supported: {SUPPORTED})"
        if not is_supported(self.version):
            return f"vLLM {self.version} is not supported (supported: {SUPPORTED})"
        if self.missing:
            return f"vLLM {self.version} lacks {', '.join(self.missing)}"
        return None


def check_start() -> HostReport:
    """The part that registration relies on; imports nothing beyond vLLM's engine arguments."""
    version = installed_version()
    if version is None or not is_supported(version):
        return HostReport(version)
    return HostReport(version, _missing_of_all(capabilities.START))


def _check_beyond_start(rows: Iterable[Capability]) -> HostReport:
    start = check_start()
    return start if start.reason else HostReport(start.version, _missing_of_all(rows))


def check_host() -> HostReport:
    """The whole table; imports vLLM's scheduler interface and what belongs to it."""
    start = check_start()
    if start.reason:
        return start
    missing = _missing_of_all(capabilities.SCHEDULER + manager_capabilities.KV_MANAGER)
    return HostReport(start.version, missing + _missing_request_attributes() + _new_abstract_methods())


def require_host(asked_by: str) -> None:
    """Stop when the host cannot carry what was asked for.

    Args:
        asked_by: what the user wrote, such as `--scheduler tokenspeed`.

    Raises:
        HostError: names `asked_by`, vLLM's version and what is missing.
    """
    _require(check_host(), asked_by)


def check_placement() -> HostReport:
    """What placed models rely on; imports vLLM's model layers."""
    return _check_beyond_start(placement_capabilities.PLACEMENT)


def require_placement(asked_by: str) -> None:
    """Stop when the host cannot carry placed models.

    Args:
        asked_by: what the user wrote, such as `--placement auto`.

    Raises:
        HostError: names `asked_by`, vLLM's version and what is missing.
    """
    _require(check_placement(), asked_by)


def check_kernels() -> HostReport:
    """What our attention backend relies on; imports vLLM's MLA layer."""
    return _check_beyond_start(kernel_capabilities.KERNELS)


def require_kernels(asked_by: str) -> None:
    """Stop when the host cannot carry our attention backend.

    Args:
        asked_by: what the user wrote, such as `--kernels auto`.

    Raises:
        HostError: names `asked_by`, vLLM's version and what is missing.
    """
    _require(check_kernels(), asked_by)


def check_append() -> HostReport:
    """What our MLA layer relies on; imports vLLM's."""
    return _check_beyond_start(kernel_capabilities.APPEND)


def check_linear() -> HostReport:
    """What our product of a few rows relies on; imports vLLM's linear layers."""
    return _check_beyond_start(kernel_capabilities.LINEAR)


def require_append(asked_by: str) -> None:
    """Stop when the host cannot carry our MLA layer.

    Args:
        asked_by: what the user wrote, such as `--kernels append=triton`.

    Raises:
        HostError: names `asked_by`, vLLM's version and what is missing.
    """
    _require(check_append(), asked_by)


def missing_flash_attn_mla() -> tuple[str, ...]:
    """What is missing of the backend that ours extends over a bf16 cache, which can be imported on GPUs only."""
    return _missing_of_all(kernel_capabilities.FLASH_ATTN_MLA)


def missing_flashmla() -> tuple[str, ...]:
    """What is missing of the backend that ours extends over an e4m3 cache."""
    return _missing_of_all(kernel_capabilities.FLASHMLA)


def _require(report: HostReport, asked_by: str) -> None:
    if reason := report.reason:
        msg = f"{asked_by} cannot be honoured: {reason}"
        raise HostError(msg)


def missing_of(capability: Capability) -> list[str]:
    """Names of what one row of the table does not find."""
    try:
        found = _find(capability.target)
    except (ImportError, AttributeError):
        return [capability.target]
    lacking = [f"{capability.target}.{name}" for name in capability.attributes if not _has(found, name)]
    if capability.parameters:
        lacking += [f"{capability.target}({name})" for name in _lacking_parameters(found, capability.parameters)]
    if capability.fields:
        lacking += [f"{capability.target}.{name}" for name in capability.fields if name not in _fields(found)]
    return lacking


def signature_differences(cls: type, base: type) -> list[str]:
    """Methods of `cls` that do not accept every call that `base`'s own signature accepts, with both signatures."""
    differences = []
    for name, theirs in inspect.getmembers(base, inspect.isfunction):
        ours = cls.__dict__.get(name)
        if not inspect.isfunction(ours) or (name.startswith("__") and name != "__init__"):
            continue
        if not _accepts(inspect.signature(ours), inspect.signature(theirs)):
            differences.append(f"{name}{inspect.signature(ours)} does not take {name}{inspect.signature(theirs)}")
    return differences


def _accepts(ours: inspect.Signature, theirs: inspect.Signature) -> bool:
    """Whether each parameter of `theirs` can be passed to `ours` by position and by name, and nothing more is needed."""
    if any(p.kind is p.VAR_KEYWORD for p in ours.parameters.values()):
        return True
    mine, given = list(ours.parameters.values()), list(theirs.parameters.values())
    if [p.name for p in mine[: len(given)]] != [p.name for p in given]:
        return False
    needs_more = any(p.default is p.empty for p in mine[len(given) :])
    keeps_optional = all(m.default is not m.empty or g.default is g.empty for m, g in zip(mine, given, strict=False))
    return keeps_optional and not needs_more


def _missing_of_all(rows: Iterable[Capability]) -> tuple[str, ...]:
    return tuple(name for row in rows for name in missing_of(row))


def _missing_request_attributes() -> tuple[str, ...]:
    try:
        request = _find("vllm.v1.request:Request")
        parameters = _find("vllm.sampling_params:SamplingParams")
        probe = request("probe", [1], parameters(max_tokens=1), None)
    except Exception as error:  # whatever its constructor raises, the name of the class is the answer
        return (f"vllm.v1.request:Request (cannot be built: {error})",)
    return tuple(
        f"vllm.v1.request:Request.{name}" for name in capabilities.REQUEST_ATTRIBUTES if not hasattr(probe, name)
    )


def _new_abstract_methods() -> tuple[str, ...]:
    """Abstract members of the scheduler interface that this version of the plugin does not know, so cannot implement."""
    try:
        interface = _find(capabilities.INTERFACE)
    except (ImportError, AttributeError):
        return ()
    known = capabilities.OTHER_ABSTRACT_MEMBERS.union(capabilities.SCHEDULER_METHODS)
    new = sorted(getattr(interface, "__abstractmethods__", frozenset()) - known)
    return tuple(f"an implementation here of {capabilities.INTERFACE}.{name}" for name in new)


def _find(target: str) -> Any:
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _has(found: Any, name: str) -> bool:
    return hasattr(found, name) or name in getattr(found, "__annotations__", {})


def _fields(found: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(found):
        return tuple(f.name for f in dataclasses.fields(found))
    return tuple(getattr(found, "__struct_fields__", ()))


def _lacking_parameters(found: Callable[..., Any], wanted: tuple[str, ...]) -> list[str]:
    try:
        present = inspect.signature(found).parameters
    except (TypeError, ValueError):
        return list(wanted)
    if any(p.kind is p.VAR_KEYWORD for p in present.values()):
        return []
    return [name for name in wanted if name not in present]
