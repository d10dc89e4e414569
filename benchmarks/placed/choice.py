# SPDX-License-Identifier: Apache-2.0
"""What the cost model itself chooses for a model of the benchmark."""

from __future__ import annotations

from typing import Any

from tokenspeed_plugin.placement.models import declare
from tokenspeed_plugin.placement.residual import Residual
from tokenspeed_plugin.placement.runtime.start import PlacementRequest, compiled


def splits_residual(name: str, config: dict[str, Any], num_ranks: int, num_tokens: int) -> bool:
    """Whether ``--placement auto`` splits the residual stream by tokens in a step of ``num_tokens``, by the shipped table."""
    spec = f"attn=tp{num_ranks},dense=tp{num_ranks},moe=tp{num_ranks}"
    request = PlacementRequest(config["architectures"][0], spec, Residual.AUTO.value)
    table = compiled(request, declare(name, {**config, "dtype": "bfloat16"}), num_ranks, num_tokens).table
    return table.plans[table.index(num_tokens)].token_multiple > 1
