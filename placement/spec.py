# SPDX-License-Identifier: Apache-2.0
"""The ``--placement`` specification: ``attn=tp2,dense=tp2,moe=ep2`` (or ``moe=tp2ep4``), and whether a model fits it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from tokenspeed_plugin.placement.algebra import PlacementError, Shard
from tokenspeed_plugin.placement.mesh import Extent, Mesh
from tokenspeed_plugin.placement.residual import Residual

if TYPE_CHECKING:
    from tokenspeed_plugin.placement.graph import ModelGraph
    from tokenspeed_plugin.placement.module_spec import Param

FORM: Final = "attn=tpN,dense=tpN,moe=tpN|epN|tpNepM"
_GROUP: Final = re.compile(r"(?:tp([1-9][0-9]*))?(?:ep([1-9][0-9]*))?")


@dataclass(frozen=True)
class PlacementSpec:
    """Group sizes of attention, dense MLP and MoE inside one pipeline stage."""

    attn_tp: int
    dense_tp: int
    moe_tp: int = 1
    ep: int = 1

    @classmethod
    def parse(cls, text: str) -> PlacementSpec:
        """Read a specification; ``moe`` may be left out and then takes the dense group.

        Raises:
            PlacementError: names the part that is wrong and the form that is allowed.
        """
        groups: dict[str, tuple[int | None, int | None]] = {}
        for part in text.split(","):
            key, _, value = part.strip().partition("=")
            match = _GROUP.fullmatch(value)
            if key not in ("attn", "dense", "moe") or not value or match is None:
                _refuse(text, f"{part.strip()!r} is not of the form {FORM}")
            if key in groups:
                _refuse(text, f"{key!r} appears twice")
            groups[key] = tuple(int(g) if g else None for g in match.groups())  # type: ignore[assignment]
        for key in ("attn", "dense"):
            if key not in groups:
                _refuse(text, f"{key!r} is missing; the form is {FORM}")
            if groups[key][1] is not None:
                _refuse(text, f"{key!r} has no experts: only tpN is allowed")
        dense = groups["dense"][0] or 1
        moe_tp, ep = groups.get("moe", (dense, None))
        return cls(groups["attn"][0] or 1, dense, moe_tp or 1, ep or 1)

    def __str__(self) -> str:
        tensor = f"tp{self.moe_tp}" if self.moe_tp > 1 or self.ep == 1 else ""
        expert = f"ep{self.ep}" if self.ep > 1 else ""
        return f"attn=tp{self.attn_tp},dense=tp{self.dense_tp},moe={tensor}{expert}"

    def mesh(self, world_size: int, graph: ModelGraph, data_parallel: int | None = None) -> Mesh:
        """The devices of one stage of ``world_size`` ranks, cut by the groups that ``graph`` uses.

        ``data_parallel`` groups of ranks have tokens of their own; by default as many as there are attention groups.
        With fewer, attention is repeated by the ranks that share tokens.

        Raises:
            PlacementError: a group does not divide the world size, or two groups do not nest.
        """
        replicas = world_size // self.attn_tp if data_parallel is None else data_parallel
        sizes = {
            "attn=tp": self.attn_tp,
            "dense=tp": self.dense_tp,
            "moe=tp*ep": self.moe_tp * self.ep,
            "dp=": replicas,
        }
        for what, size in sizes.items():
            if size < 1 or world_size % size:
                _refuse(str(self), f"{what}{size} does not divide the world size {world_size}")
        if world_size // replicas % self.attn_tp:
            _refuse(str(self), f"attn=tp{self.attn_tp} does not fit {world_size} ranks in dp={replicas} groups")
        extents = {
            "attn_tp": Extent(1, self.attn_tp),
            "dense_tp": Extent(1, self.dense_tp),
            "moe_tp": Extent(1, self.moe_tp),
            "ep": Extent(self.moe_tp, self.ep),
            "dp": Extent(world_size // replicas, replicas),
        }
        unused = Extent(1, 1)
        return Mesh.from_extents(world_size, {name: e if name in graph.axes else unused for name, e in extents.items()})

    def check_model(self, graph: ModelGraph) -> None:
        """Whether every sharded dimension of ``graph`` can be cut into this many parts.

        Raises:
            PlacementError: names the module, the dimension, its length and the group size.
        """
        sizes = {"attn_tp": self.attn_tp, "dense_tp": self.dense_tp, "moe_tp": self.moe_tp, "ep": self.ep}
        for module in graph.modules():
            for param in module.params:
                for axis, num_parts in sizes.items():
                    self._check_param(graph, f"{module.name}.{param.name}", param, axis, num_parts)

    def _check_param(self, graph: ModelGraph, where: str, param: Param, axis: str, num_parts: int) -> None:
        placement = param.placements.get(axis)
        if not isinstance(placement, Shard) or num_parts == 1:
            return
        dim = param.dims[placement.dim]
        length = graph.sizes[dim]
        what = f"{where}: {length} {dim.replace('_', ' ')}"
        if dim in param.follows:
            if length % num_parts and num_parts % length:
                _refuse(str(self), f"{what} neither divide nor are divided by {axis}={num_parts}")
        elif length < num_parts:
            _refuse(str(self), f"{what} are fewer than {axis}={num_parts}")
        elif dim in graph.divisible and length % num_parts:
            _refuse(str(self), f"{what} do not divide evenly over {axis}={num_parts}")


class Fusing(str, Enum):
    """Whether an all-reduce and the norm behind it run as one kernel."""

    AUTO = "auto"
    """Where the GPUs of the group can write each other's memory."""
    OFF = "off"
    REFERENCE = "reference"
    """The operation without its kernel, on any device: to test that plans come out the same."""


class Overlapping(str, Enum):
    """Whether large steps reduce parts of a linear layer's product while the others are computed."""

    AUTO = "auto"
    """Where it is known to gain: by the width of the model and the name of the GPU."""
    OFF = "off"
    ON = "on"
    """Where the fused kernel is used, in steps of thousands of tokens."""
    REFERENCE = "reference"
    """In steps of two tokens and more: to test that results come out the same."""


class Options(NamedTuple):
    """A ``--placement`` value, taken apart: the specification (``auto`` when nothing else is there), and the rest."""

    spec: str
    residual: Residual
    fusing: Fusing
    overlapping: Overlapping


_KINDS: Final[dict[str, tuple[type[Enum], Enum]]] = {
    "residual": (Residual, Residual.AUTO),
    "fusion": (Fusing, Fusing.AUTO),
    "overlap": (Overlapping, Overlapping.AUTO),
}
"""Options beside the specification: their values, and the one that holds when none is given."""


def split_options(text: str) -> Options:
    """Take ``residual=...``, ``fusion=...`` and ``overlap=...`` out of a ``--placement`` value.

    Overlap needs all-reduces and the kernel behind them: who asks for it gets a replicated residual where that is left open.

    Raises:
        PlacementError: a value is none of those there are, or given twice, or two of them do not go together.
    """
    parts = [part.strip() for part in text.split(",")]
    kept = ",".join(part for part in parts if part.partition("=")[0] not in _KINDS)
    found: dict[str, Any] = {}
    for key, (kind, default) in _KINDS.items():
        values = [part.partition("=")[2] for part in parts if part.startswith(f"{key}=")]
        allowed = [str(member.value) for member in kind]
        if len(values) > 1 or any(value not in allowed for value in values):
            _refuse(text, f"{key}={'|'.join(values)} is not one of {', '.join(allowed)}")
        found[key] = kind(values[0]) if values else default
    options = Options(kept or "auto", found["residual"], found["fusion"], found["overlap"])
    if options.overlapping in (Overlapping.OFF, Overlapping.AUTO):
        return options
    together = f"overlap={options.overlapping.value}"
    if options.residual is Residual.SHARDED:
        _refuse(text, f"{together} goes with residual=replicated: a split residual has no all-reduces")
    if options.fusing is Fusing.OFF:
        _refuse(text, f"{together} goes with fusion=auto: the norm behind it is the fused kernel's")
    return options._replace(residual=Residual.REPLICATED)


def check_runtime(
    spec: PlacementSpec,
    tensor_parallel: int,
    data_parallel: int,
    *,
    has_experts: bool = True,
    has_shared_experts: bool = False,
) -> None:
    """Whether a run-time on vLLM's layers can execute ``spec``.

    Attention and MoE take the whole tensor-parallel group. Dense layers also take one rank (every rank has them whole),
    except shared experts, which vLLM computes inside its MoE.

    Raises:
        PlacementError: names the group that vLLM's layers cannot have and the sizes that they can.
    """
    hint = "(--tensor-parallel-size)"
    if spec.attn_tp != tensor_parallel:
        _refuse(
            str(spec), f"attn=tp{spec.attn_tp}: vLLM's attention takes the whole group, attn=tp{tensor_parallel} {hint}"
        )
    if spec.dense_tp not in (1, tensor_parallel):
        _refuse(str(spec), f"dense=tp{spec.dense_tp} is not tp1 or tp{tensor_parallel} {hint}")
    if has_shared_experts and spec.dense_tp != tensor_parallel:
        _refuse(str(spec), f"dense=tp{spec.dense_tp}: shared experts take the whole group, dense=tp{tensor_parallel}")
    if not has_experts:
        return
    if (spec.moe_tp, spec.ep) not in ((tensor_parallel, 1), (1, tensor_parallel)):
        _refuse(str(spec), f"moe is not tp{tensor_parallel} or ep{tensor_parallel}, the groups that vLLM's MoE has")
    if data_parallel != 1:
        _refuse(str(spec), f"dp={data_parallel}: compiled MoE communication needs dp=1")


def _refuse(text: str, reason: str) -> NoReturn:
    message = f"--placement {text!r}: {reason}"
    raise PlacementError(message)
