# SPDX-License-Identifier: Apache-2.0
"""A module input that has to arrive in some layout, and the moves that bring it there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenspeed_plugin.placement.algebra import Conversion, IllegalConversionError, PlacementError
from tokenspeed_plugin.placement.conversion_path import primitives
from tokenspeed_plugin.placement.graph import STREAM, Node, Section
from tokenspeed_plugin.placement.layout import Layout, check_convertible
from tokenspeed_plugin.placement.plan import Move, Phase, buffer_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenspeed_plugin.placement.conversion_path import Primitive
    from tokenspeed_plugin.placement.cost.cost_model import CostModel
    from tokenspeed_plugin.placement.module_spec import Port


@dataclass(frozen=True)
class Demand:
    """Input ``index`` of ``node``, wanted in ``layout``."""

    section: Section
    node: Node
    index: int
    layout: Layout

    @property
    def value(self) -> str:
        """Name of the value that is read."""
        return self.node.reads[self.index]

    @property
    def port(self) -> Port:
        """The declared input."""
        return self.node.spec.inputs[self.index]

    @property
    def carried(self) -> Port:
        """Dimensions of the value."""
        return self.section.port(self.value)

    def __str__(self) -> str:
        producer = "the residual stream" if self.value == STREAM else f"module {self.value!r}"
        return f"section {self.section.name!r}: {producer}"


class MoveBook:
    """Prices every conversion of one graph once."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._known: dict[tuple[str, str, int, Layout, Layout], tuple[Move, ...]] = {}

    def cheapest(self, demand: Demand, held: Sequence[Layout]) -> tuple[Move, ...]:
        """The cheapest conversion from any of ``held``; empty when the value already is in the layout.

        Raises:
            IllegalConversionError: no copy can be converted; names both modules and the axis.
        """
        options: list[tuple[Move, ...]] = []
        failure: IllegalConversionError | None = None
        for own in held:
            try:
                options.append(self._moves(demand, own))
            except IllegalConversionError as error:
                failure = error
        if not options:
            missing = f"module {demand.node.spec.name!r} reads {demand.value!r}, which no longer exists"
            raise failure or PlacementError(missing)
        return min(options, key=lambda moves: sum(m.time_us for m in moves))

    def conversion_us(self, port: Port, source: Layout, target: Layout) -> float:
        """Time to convert a value, infinite when that is illegal."""
        try:
            check_convertible(self._cost.mesh, source, target, "", "")
        except IllegalConversionError:
            return float("inf")
        return sum(self._cost.move_us(primitive, port) for primitive in primitives(source, target))

    def _moves(self, demand: Demand, own: Layout) -> tuple[Move, ...]:
        key = (demand.section.name, demand.node.spec.name, demand.index, own, demand.layout)
        if key not in self._known:
            reader = f"module {demand.node.spec.name!r}"
            check_convertible(self._cost.mesh, own, demand.layout, str(demand), reader)
            self._known[key] = tuple(self._priced(demand, own))
        return self._known[key]

    def _priced(self, demand: Demand, own: Layout) -> Iterator[Move]:
        for primitive in primitives(own, demand.layout):
            wire = self._wire_bytes(demand, primitive)
            after_producer = demand.value != STREAM and primitive.kind in (
                Conversion.ALL_REDUCE,
                Conversion.REDUCE_SCATTER,
            )
            yield Move(
                kind=primitive.kind,
                module=demand.value if after_producer else demand.node.spec.name,
                phase=Phase.POST if after_producer else Phase.PRE,
                source=buffer_name(demand.value, primitive.before),
                target=buffer_name(demand.value, primitive.after),
                value=demand.value,
                before=primitive.before,
                after=primitive.after,
                atoms=primitive.atoms,
                dim=primitive.dim,
                from_dim=primitive.from_dim,
                op=primitive.op,
                ring_bytes=self._cost.move_bytes(primitive, demand.carried, wire),
                time_us=self._cost.move_us(primitive, demand.carried, wire),
                wire_bytes=wire,
            )

    def _wire_bytes(self, demand: Demand, primitive: Primitive) -> float | None:
        """Quantised element size, for a gather that ends right at a consumer which quantises."""
        last = primitive.kind is Conversion.ALL_GATHER and primitive.after == demand.layout
        return demand.port.wire_bytes if last and self._cost.quantised_gathers else None
