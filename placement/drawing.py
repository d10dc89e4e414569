# SPDX-License-Identifier: Apache-2.0
"""An SVG picture of one compiled section: modules as boxes, changes of layout on the arrows between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree as Xml

from tokenspeed_plugin.placement.layout import text
from tokenspeed_plugin.placement.plan import Compute, Move

if TYPE_CHECKING:
    from tokenspeed_plugin.placement.plan import ModelPlan, SectionPlan

WIDTH: Final = 760
ROW: Final = 46
TOP: Final = 70
CENTRE: Final = 250
COLOURS: Final = {"compute": "#dbe9f6", "collective": "#f6c28b", "local": "#e8e8e8"}


@dataclass(frozen=True)
class _Box:
    title: str
    detail: str
    colour: str
    fused: str


def draw(plan: ModelPlan, section: SectionPlan) -> str:
    """SVG text with one row per step, fusions named at the right."""
    boxes = [_box(plan, section, index) for index in range(len(section.steps))]
    height = TOP + ROW * (len(boxes) + 1)
    root = Xml.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {WIDTH} {height}",
            "width": str(WIDTH),
            "height": str(height),
            "font-family": "sans-serif",
            "font-size": "13",
        },
    )
    Xml.SubElement(root, "rect", {"width": str(WIDTH), "height": str(height), "fill": "white"})
    _label(root, 20, 26, f"{section.section}, {plan.num_tokens} tokens, {plan.mesh.world_size} ranks", weight="bold")
    _label(
        root, 20, 48, f"stream {text(section.entry)} to {text(section.exit)}   (R whole, S0 split by tokens, P partial)"
    )
    for row, box in enumerate(boxes):
        _row(root, TOP + row * ROW, box, last=row + 1 == len(boxes))
    return Xml.tostring(root, encoding="unicode")


def _box(plan: ModelPlan, section: SectionPlan, index: int) -> _Box:
    step = section.steps[index]
    fused = "; ".join(f.kind.value for f in section.fusions if f.steps[0] == index)
    if isinstance(step, Compute):
        layouts = " + ".join(text(layout) for layout in step.signature.inputs)
        return _Box(step.module, f"{layouts} -> {text(step.signature.output)}", COLOURS["compute"], fused)
    return _Box(f"{step.kind.value} over {plan.mesh.label(step.atoms)}", _moved(step), _colour(step), fused)


def _moved(move: Move) -> str:
    size = f", {move.ring_bytes / 1024:,.1f} KiB, {move.time_us:,.1f} us" if move.is_collective else ""
    return f"{move.value}: {text(move.before)} -> {text(move.after)}{size}"


def _colour(move: Move) -> str:
    return COLOURS["collective" if move.is_collective else "local"]


def _row(root: Xml.Element, top: int, box: _Box, *, last: bool) -> None:
    Xml.SubElement(
        root,
        "rect",
        {"x": "20", "y": str(top), "width": "460", "height": "34", "rx": "5", "fill": box.colour, "stroke": "#555"},
    )
    _label(root, 30, top + 15, box.title, weight="bold")
    _label(root, 30, top + 29, box.detail, size=11)
    if box.fused:
        _label(root, 495, top + 22, f"one kernel: {box.fused}", size=11)
    if not last:
        ends = {"x1": str(CENTRE), "x2": str(CENTRE), "y1": str(top + 34), "y2": str(top + ROW)}
        Xml.SubElement(root, "line", {**ends, "stroke": "#555"})


def _label(root: Xml.Element, x: int, y: int, content: str, *, size: int = 13, weight: str = "normal") -> None:
    attributes = {"x": str(x), "y": str(y), "font-size": str(size), "font-weight": weight}
    Xml.SubElement(root, "text", attributes).text = content
