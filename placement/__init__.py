# SPDX-License-Identifier: Apache-2.0
"""Placement: a model declares how its tensors lie over the devices, the compiler inserts the communication."""

from tokenspeed_plugin.placement.algebra import (
    Conversion,
    IllegalConversionError,
    Partial,
    Placement,
    PlacementError,
    Replicate,
    Shard,
    conversion,
)
from tokenspeed_plugin.placement.compiler import Compiler
from tokenspeed_plugin.placement.graph import ModelGraph, Node, Section
from tokenspeed_plugin.placement.mesh import Mesh
from tokenspeed_plugin.placement.module_spec import Freedom, ModuleKind, ModuleSpec, Param, Port
from tokenspeed_plugin.placement.plan import ModelPlan, SectionPlan
from tokenspeed_plugin.placement.residual import Residual
from tokenspeed_plugin.placement.spec import PlacementSpec

__all__ = [
    "Compiler",
    "Conversion",
    "Freedom",
    "IllegalConversionError",
    "Mesh",
    "ModelGraph",
    "ModelPlan",
    "ModuleKind",
    "ModuleSpec",
    "Node",
    "Param",
    "Partial",
    "Placement",
    "PlacementError",
    "PlacementSpec",
    "Port",
    "Replicate",
    "Residual",
    "Section",
    "SectionPlan",
    "Shard",
    "conversion",
]
