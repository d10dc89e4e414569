# SPDX-License-Identifier: Apache-2.0
"""The compiled plan: for every section a list of steps in three phases per module, and how the sections follow each other.

A step reads buffers and writes one. A buffer is a value of the graph in one layout, named ``value@layout``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from tokenspeed_plugin.placement.algebra import Conversion
from tokenspeed_plugin.placement.layout import Layout, sharded_atoms, text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenspeed_plugin.placement.mesh import Mesh
    from tokenspeed_plugin.placement.module_spec import Signature


class Phase(str, Enum):
    """Where a step belongs in the compiled layer."""

    PRE = "pre-communication"
    COMPUTE = "compute"
    POST = "post-communication"


class FusionKind(str, Enum):
    """Neighbouring steps that one kernel can do."""

    ALL_REDUCE_ADD_NORM = "all-reduce + residual + norm"
    ALL_REDUCE_NORM = "all-reduce + norm"
    SHARDED_NORM = "reduce-scatter + norm + all-gather"
    QUANTISED_GATHER = "quantise before all-gather"


@dataclass(frozen=True)
class Move:
    """A change of layout of one value (a collective, or a local slice)."""

    kind: Conversion
    module: str
    phase: Phase
    source: str
    target: str
    value: str
    before: Layout
    after: Layout
    atoms: tuple[int, ...]
    dim: int | None = None
    from_dim: int | None = None
    op: str | None = None
    ring_bytes: float = 0.0
    time_us: float = 0.0
    wire_bytes: float | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """Its one buffer, as :class:`Compute` names its own."""
        return (self.source,)

    @property
    def is_collective(self) -> bool:
        """Whether devices exchange data."""
        return self.kind.is_collective


@dataclass(frozen=True)
class Compute:
    """One run of a module in the chosen signature."""

    module: str
    reads: tuple[str, ...]
    target: str
    signature: Signature
    time_us: float = 0.0


@dataclass(frozen=True)
class Fusion:
    """Indices into the steps of a section that belong in one kernel; ``crosses`` when the norm is in the next section."""

    kind: FusionKind
    steps: tuple[int, ...]
    crosses: bool = False


@dataclass(frozen=True)
class SectionPlan:
    """Steps of one section between two layouts of the residual stream."""

    section: str
    entry: Layout
    exit: Layout
    entry_buffer: str
    exit_buffer: str
    steps: tuple[Move | Compute, ...]
    fusions: tuple[Fusion, ...] = ()

    @property
    def moves(self) -> tuple[Move, ...]:
        """Changes of layout, local ones included."""
        return tuple(s for s in self.steps if isinstance(s, Move))

    @property
    def collectives(self) -> tuple[Move, ...]:
        """Steps in which devices exchange data."""
        return tuple(m for m in self.moves if m.is_collective)

    @property
    def ring_bytes(self) -> float:
        """Bytes that each rank sends, as a ring would."""
        return sum(m.ring_bytes for m in self.collectives)

    @property
    def time_us(self) -> float:
        """Estimated time of all steps."""
        return sum(s.time_us for s in self.steps)


@dataclass(frozen=True)
class ModelPlan:
    """Plans of all sections in order, for steps of one size."""

    mesh: Mesh
    num_tokens: int
    num_rows: int
    sections: tuple[SectionPlan, ...]

    @property
    def ring_bytes(self) -> float:
        """Bytes that each rank sends in one forward pass."""
        return sum(s.ring_bytes for s in self.sections)

    @property
    def token_multiple(self) -> int:
        """Steps are padded to a multiple of this many tokens at the entry; row selection drops the padding."""
        layouts = [layout for s in self.sections for step in s.steps for layout in _layouts(step)]
        return max((self.mesh.size(sharded_atoms(layout, 0)) for layout in layouts), default=1)

    @property
    def num_collectives(self) -> int:
        """Collectives of one forward pass."""
        return sum(len(s.collectives) for s in self.sections)

    @property
    def time_us(self) -> float:
        """Estimated time of one forward pass without attention's inner product and sampling."""
        return sum(s.time_us for s in self.sections)

    def distinct(self) -> Iterator[tuple[SectionPlan, int]]:
        """Each different section plan with the number of times it runs."""
        yield from Counter(self.sections).items()

    def shape(self) -> tuple[tuple[str, str, str, tuple[tuple[str, ...], ...]], ...]:
        """What the plan does, without sizes and times: equal shapes can share one compiled model."""
        return tuple(
            (s.section, text(s.entry), text(s.exit), tuple(_step_shape(step) for step in s.steps))
            for s in self.sections
        )


def buffer_name(value: str, layout: Layout) -> str:
    """Name of the buffer that holds ``value`` in ``layout``."""
    return f"{value}@{text(layout)}"


def _layouts(step: Move | Compute) -> tuple[Layout, ...]:
    if isinstance(step, Move):
        return step.before, step.after
    return *step.signature.inputs, step.signature.output


def _step_shape(step: Move | Compute) -> tuple[str, ...]:
    if isinstance(step, Compute):
        return ("compute", step.module, *step.reads, step.target)
    return (step.kind.value, step.source, step.target, str(step.atoms), str(step.dim), str(step.op))
