# SPDX-License-Identifier: Apache-2.0
"""Modules that end in a linear layer and can leave it to the all-reduce behind them, which then overlaps the two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from tokenspeed_plugin.placement.plan import Compute

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from tokenspeed_plugin.kernels.comm.linear_operation import Linear
    from tokenspeed_plugin.placement.module_spec import Signature
    from tokenspeed_plugin.placement.plan import Move


@runtime_checkable
class OpenModule(Protocol):
    """A module whose last step can be left out."""

    def linear(self) -> Linear | None:
        """The last step, which turns what :meth:`without_linear` returns into the output; None when it cannot be left out."""
        ...

    def without_linear(self, *inputs: torch.Tensor, signature: Signature, step: Any) -> torch.Tensor:
        """What the last step reads, ``[tokens, in]``."""
        ...


def open_writer(steps: Iterable[Move | Compute], buffer: str, modules: Mapping[str, Any]) -> OpenModule | None:
    """The module that fills a buffer, if it can leave its last step to whoever reads that."""
    written = next((step for step in steps if step.target == buffer), None)
    module = modules.get(written.module) if isinstance(written, Compute) else None
    return module if isinstance(module, OpenModule) and module.linear() is not None else None
