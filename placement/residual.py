# SPDX-License-Identifier: Apache-2.0
"""Whether the residual stream is replicated over the attention group or split by tokens."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from tokenspeed_plugin.placement.algebra import REPLICATE, TOKENS
from tokenspeed_plugin.placement.cost.cost_model import TOKENWISE
from tokenspeed_plugin.placement.module_spec import ModuleKind

if TYPE_CHECKING:
    from tokenspeed_plugin.placement.mesh import Mesh
    from tokenspeed_plugin.placement.module_spec import ModuleSpec, Signature


class Residual(str, Enum):
    """What norms and residual adds may do."""

    AUTO = "auto"
    REPLICATED = "replicated"
    SHARDED = "sharded"

    def allows(self, mesh: Mesh, spec: ModuleSpec, signature: Signature) -> bool:
        """Whether a module may run in ``signature``.

        REPLICATED splits tokens over the attention group nowhere, SHARDED does so in every norm.
        Data-parallel ranks never hold each other's tokens in the residual stream: gathering it would move more than the
        module that needs it.
        """
        atoms = mesh.atoms("attn_tp")
        if self is Residual.REPLICATED and any(signature.output[a] == TOKENS for a in atoms):
            return False
        if spec.kind in TOKENWISE and any(signature.output[a] == REPLICATE for a in mesh.atoms("dp")):
            return False
        must_split = self is Residual.SHARDED and spec.kind is ModuleKind.NORM
        return not must_split or all(signature.output[a] == TOKENS for a in atoms)
