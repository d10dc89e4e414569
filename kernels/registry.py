# SPDX-License-Identifier: Apache-2.0
"""What a kernel is, as selection sees it, and the registry that holds all of them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


class Priority(enum.IntEnum):
    """Tiers, by which untuned kernels are ranked; `UNTRIED` has never run on the hardware that it is for."""

    UNTRIED = -1
    REFERENCE = 0
    PORTABLE = 1
    PERFORMANT = 2
    SPECIALIZED = 3
    PLUGIN = 4


class Objective(enum.Enum):
    """What the caller wants most; `DETERMINISM` means that a row's result does not depend on the batch around it."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    DETERMINISM = "determinism"
    PORTABILITY = "portability"


@dataclass(frozen=True)
class OperandFormat:
    """Element type of an operand and where its scales lie: `none`, `tensor`, `token` or `block`."""

    dtype: str
    scales: str = "none"

    def __str__(self) -> str:
        return self.dtype if self.scales == "none" else f"{self.dtype}/{self.scales}"


Signature = Mapping[str, OperandFormat]
"""Format by operand name."""


def signature_text(signature: Signature) -> str:
    """`q=bfloat16, kv=bfloat16`."""
    return ", ".join(f"{operand}={form}" for operand, form in sorted(signature.items()))


@dataclass(frozen=True)
class Platform:
    """A device: `cuda`, `rocm` or `cpu`, its architecture such as (9, 0), and its product name."""

    kind: str
    arch: tuple[int, int] = (0, 0)
    name: str = ""

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind} {self.arch[0]}.{self.arch[1]}"


@dataclass(frozen=True)
class Capability:
    """Platforms that a kernel runs on: a kind, and architectures from `first` up to but not including `end`."""

    kind: str
    first: tuple[int, int] = (0, 0)
    end: tuple[int, int] = (1000, 0)

    def admits(self, platform: Platform) -> bool:
        """Tell whether the platform is one of them."""
        return platform.kind == self.kind and self.first <= platform.arch < self.end

    def __str__(self) -> str:
        if self.kind == "cpu":
            return self.kind
        first, end = (".".join(map(str, arch)) for arch in (self.first, self.end))
        return f"{self.kind} {first} to below {end}"


@dataclass(frozen=True)
class ShapeTrait:
    """Values of one shape number that a kernel takes."""

    name: str
    minimum: int = 0
    maximum: int | None = None
    power_of_two: bool = False
    allowed: frozenset[int] | None = None

    def refusal(self, shape: Mapping[str, int]) -> str | None:
        """Return why the shape does not fit, or None. A number that the caller leaves out fits nothing."""
        value = shape.get(self.name)
        if value is None:
            return f"{self.name} is not given, allowed: {self}"
        fits = (
            value >= self.minimum
            and (self.maximum is None or value <= self.maximum)
            and (not self.power_of_two or (value > 0 and value & (value - 1) == 0))
            and (self.allowed is None or value in self.allowed)
        )
        return None if fits else f"{self.name}={value}, allowed: {self}"

    def __str__(self) -> str:
        if self.allowed is not None:
            return ", ".join(map(str, sorted(self.allowed)))
        bounds = f"at least {self.minimum}" if self.maximum is None else f"{self.minimum} to {self.maximum}"
        return f"{bounds}, a power of two" if self.power_of_two else bounds


def _always_available() -> str | None:
    return None


def _unremarked(*_: Any) -> str:
    return ""


def _unplanned(*_: Any) -> None:
    return None


@dataclass(frozen=True)
class KernelSpec:
    """One solution of one operation.

    Attributes:
        family: operation family, such as `mla`.
        mode: operation within the family, such as `decode`.
        solution: name of this implementation, unique for family and mode.
        capabilities: platforms it runs on; any of them.
        signatures: operand formats it takes; any of them.
        load: returns the callable; imports and builds only then.
        priority: rank where nothing was measured.
        traits: shape numbers it takes; all of them.
        objectives: objectives it may serve.
        host_backend: name of the host's own backend, when the solution is to leave the work to it.
        unavailable: returns why it cannot run in this process (a missing library), or None.
        preprocess_weights: applied once to weights at load time.
        plan: called once per step, before the layers; outside any captured graph unless it says otherwise.
        workspace: called once per engine with the largest shapes.
        source: hash of its source, part of the key under which measurements are kept.
        remark: what whoever chooses it for a shape and formats must know.
        prepare: called once before an engine starts; builds what would otherwise be built on first use.
        serves_engine: whether it can stand behind vLLM's decode: `workspace(heads, query_tokens, requests, device)`,
            `plan(workspace, requests)` with `update(seq_lens, block_table, page_tokens)`, and a callable that is used as
            `mla_decode` of `kernels/mla/sm90` is, or with e4m3 operands as `mla_decode_fp8`; of mode `append` see
            `kernels/mla/append_solutions.py`; of family `linear` it is called as `few_rows_linear` of `kernels/linear/operation.py` is.
    """

    family: str
    mode: str
    solution: str
    capabilities: tuple[Capability, ...]
    signatures: tuple[Signature, ...]
    load: Callable[[], Callable[..., Any]]
    priority: Priority
    traits: tuple[ShapeTrait, ...] = ()
    objectives: frozenset[Objective] = frozenset(Objective) - {Objective.DETERMINISM}
    host_backend: str | None = None
    unavailable: Callable[[], str | None] = _always_available
    preprocess_weights: Callable[..., Any] = field(default=_unplanned)
    plan: Callable[..., Any] = field(default=_unplanned)
    workspace: Callable[..., Any] = field(default=_unplanned)
    source: Callable[[], str] = field(default=lambda: "")
    remark: Callable[[Mapping[str, int], Signature], str] = _unremarked
    prepare: Callable[[], Any] = field(default=_unplanned)
    serves_engine: bool = False

    @property
    def name(self) -> str:
        """`family.mode/solution`."""
        return f"{self.family}.{self.mode}/{self.solution}"


class DuplicateKernelError(ValueError):
    """A family, mode and solution that is registered already."""


class Registry:
    """Kernel specifications by family, mode and solution."""

    def __init__(self, specs: Iterable[KernelSpec] = ()) -> None:
        self._specs: dict[tuple[str, str, str], KernelSpec] = {}
        for spec in specs:
            self.register(spec)

    def register(self, spec: KernelSpec) -> KernelSpec:
        """Add a specification and return it.

        Raises:
            DuplicateKernelError: its name is taken.
            ValueError: it names no platform or no signature, so that nothing could ever select it.
        """
        if not spec.capabilities or not spec.signatures:
            missing = "capabilities" if not spec.capabilities else "signatures"
            raise ValueError(f"kernel {spec.name}: {missing} is empty, allowed: at least one")
        key = (spec.family, spec.mode, spec.solution)
        if key in self._specs:
            raise DuplicateKernelError(f"kernel {spec.name} is registered already")
        self._specs[key] = spec
        return spec

    def candidates(self, family: str, mode: str) -> list[KernelSpec]:
        """Return all solutions of an operation, in order of registration."""
        return [spec for spec in self if (spec.family, spec.mode) == (family, mode)]

    def families(self) -> set[str]:
        """Return the families that have a solution."""
        return {spec.family for spec in self}

    def solutions(self, family: str) -> set[str]:
        """Return the names of all solutions of a family, whatever their mode."""
        return {spec.solution for spec in self if spec.family == family}

    def solutions_of_mode(self, family: str, mode: str) -> set[str]:
        """Return the names of the solutions of one operation."""
        return {spec.solution for spec in self.candidates(family, mode)}

    def __iter__(self) -> Iterator[KernelSpec]:
        return iter(list(self._specs.values()))

    def __len__(self) -> int:
        return len(self._specs)


_registry = Registry()
_loaded = False


def register_kernel(spec: KernelSpec) -> KernelSpec:
    """Add a specification to the registry of this process; see `Registry.register`."""
    return _registry.register(spec)


def default_registry() -> Registry:
    """The registry of this process: our own kernels and those of installed plugins, loaded on first use.

    Raises:
        HookError: a plugin's hook cannot be used.
        DuplicateKernelError: a plugin offers a name that is taken.
    """
    global _loaded  # noqa: PLW0603 - one registry per process, filled once
    if not _loaded:
        from tokenspeed_plugin.hooks import plugin_manager
        from tokenspeed_plugin.kernels.comm.solutions import SOLUTIONS as COMM
        from tokenspeed_plugin.kernels.linear.solutions import SOLUTIONS as LINEAR
        from tokenspeed_plugin.kernels.mla.append_solutions import SOLUTIONS as APPEND
        from tokenspeed_plugin.kernels.mla.cached_prefill.solutions import SOLUTIONS as CACHED_PREFILL
        from tokenspeed_plugin.kernels.mla.solutions import SOLUTIONS as MLA

        _loaded = True
        for spec in (*MLA, *CACHED_PREFILL, *APPEND, *COMM, *LINEAR):
            _registry.register(spec)
        for offered in plugin_manager().hook.tokenspeed_kernels():
            for spec in offered:
                _registry.register(spec)
    return _registry
