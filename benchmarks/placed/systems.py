# SPDX-License-Identifier: Apache-2.0
"""The engines that the placement benchmark compares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.placed.bars import CONTROL, OVERLAP, SPLIT, UNFUSED


@dataclass(frozen=True)
class System:
    """An engine that is compared: a placement, or None for vLLM's own model, whether experts are split, scheduler and kernels."""

    placement: str | None
    expert_parallel: bool = False
    scheduler: str = "vllm"
    kernels: str | None = None
    compilation: dict[str, Any] = field(default_factory=dict)
    """Further fields of vLLM's `compilation_config`."""

    @property
    def flags(self) -> dict[str, str]:
        """Flags of this project that the engine gets."""
        scheduler = self.scheduler if self.scheduler != "vllm" else None
        given = {"placement": self.placement, "scheduler": scheduler, "kernels": self.kernels}
        return {flag: value for flag, value in given.items() if value is not None}


def systems_of(model: str, ranks: int, device: str = "cuda") -> dict[str, System]:
    """The engines that are compared; vLLM's CPU kernel cannot split experts."""
    whole = f"attn=tp{ranks},dense=tp{ranks}"
    found = {
        "stock": System(None),
        "placed": System("auto"),
        "ours": System("auto", scheduler="tokenspeed", kernels="auto"),
    }
    if ranks > 1:
        found[CONTROL] = System(None, compilation={"pass_config": {"fuse_allreduce_rms": False}})
        found[UNFUSED] = System("auto,fusion=off")
        found[OVERLAP] = System("auto,overlap=on")
        found[SPLIT] = System(f"{whole},residual=sharded")
    if ranks > 1 and model == "mla" and device != "cpu":
        found["stock-experts"] = System(None, expert_parallel=True)
        found["placed-experts"] = System(f"{whole},moe=ep{ranks}", expert_parallel=True)
    return found
