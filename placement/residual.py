# SPDX-License-Identifier: Apache-2.0
"""Whether the residual stream is replicated over the attention group or split by tokens."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from tokenspeed_plugin.placement.algebra import REPLICATE, TOKENS
from tokenspeed_plugin.placement.cost.cost_model import TOKENWISE

if TYPE_CHECKING:
    from tokenspeed_plugin.placement.mesh import Mesh
    from tokenspeed_plugin.placement.module_spec import ModuleSpec, Signature


class Residual(str, Enum):
    """What norms and residual adds may do."""

    AUTO = "auto"
    REPLICATED = "replicated"
    SHARDED = "sharded"

    def allows(self, mesh: Mesh, spec: ModuleSpec, signature: Signature) -> bool:
        """Whether a norm, add or scale may run in ``signature``; other modules always may.

        Data-parallel ranks never hold each other's tokens in the residual stream: gathering it would move more than the
        module that needs it.
        """
        if spec.kind not in TOKENWISE:
            return True
        if any(signature.output[atom] == REPLICATE for atom in mesh.atoms("dp")):
            return False
        if any(signature.output[atom] == TOKENS for atom in mesh.atoms("attn_tp")):
            return self is not Residual.REPLICATED
        return self is not Residual.SHARDED or not mesh.atoms("attn_tp")
