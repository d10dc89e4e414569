# SPDX-License-Identifier: Apache-2.0
"""Subclasses of vLLM's model classes whose forward pass runs a compiled plan.

Layers, attention, quantisation and weight loading are inherited; only who reduces what, and when, is ours. A class is made
when vLLM asks this module for it by the name that ``host.placed_models`` registered.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from types import FunctionType
from typing import Any, Final

import torch
from torch import nn

from tokenspeed_plugin.host.log import logger
from tokenspeed_plugin.host.model_names import (
    IntermediateTensors,
    get_tp_group,
    make_empty_intermediate_tensors_factory,
    set_model_tag,
    support_torch_compile,
)
from tokenspeed_plugin.host.patches import whole_on_every_rank
from tokenspeed_plugin.host.placed_models import architecture_of, stock_class
from tokenspeed_plugin.placement.models.bindings import binding_of
from tokenspeed_plugin.placement.runtime.collective_check import check_collectives
from tokenspeed_plugin.placement.runtime.padding_mask import PaddingMask
from tokenspeed_plugin.placement.runtime.planned_model import PlannedModel
from tokenspeed_plugin.placement.runtime.start import PlacementRequest, Plans, plans_of
from tokenspeed_plugin.placement.runtime.vllm_communicator import (
    FusedGroupCommunicator,
    OverlappingGroupCommunicator,
    communicator_of,
)
from tokenspeed_plugin.placement.runtime.vllm_modules import StepInputs, bind
from tokenspeed_plugin.placement.spec import Fusing, Overlapping

SENT: Final = "hidden_states"
"""What a pipeline stage sends: the residual stream, whole, where vLLM's models send it in two parts."""
_BODY: Final = "_tokenspeed_body"
"""Kept out of the module tree: weight loaders and quantisation see vLLM's own model only."""


def __getattr__(name: str) -> type:
    architecture = architecture_of(name)
    if architecture is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return placed_class(architecture)


@cache
def placed_class(architecture: str) -> type:
    """The subclass of vLLM's class for ``architecture``."""
    stock = stock_class(architecture)

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:  # noqa: N807
        request = PlacementRequest.of(vllm_config)
        with whole_on_every_rank(request.replicated_layers() if request else ()):
            stock.__init__(self, vllm_config=vllm_config, prefix=prefix)
        self.__dict__[_BODY] = None
        if request is not None:
            self.__dict__[_BODY] = PlacedBody(self, request, vllm_config)
            hidden_size = vllm_config.model_config.get_hidden_size()
            self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory([SENT], hidden_size)

    def forward(
        self: Any,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **extra: Any,
    ) -> Any:
        body = self.__dict__[_BODY]
        if body is None:
            return stock.forward(self, input_ids, positions, intermediate_tensors, inputs_embeds, **extra)
        stream = input_ids if body.is_first else intermediate_tensors[SENT]
        if stream is None or inputs_embeds is not None:
            message = "a placed model takes token ids only; the start-up gate refuses what would send anything else"
            raise RuntimeError(message)
        hidden = body(stream, positions)
        return hidden if body.is_last else IntermediateTensors({SENT: hidden})

    members = {"__init__": __init__, "forward": forward, "__module__": __name__}
    return type(f"Placed{architecture}", (stock,), members)


class PlacedBody:
    """All plans of one model on this rank, and which one serves a step."""

    def __init__(self, model: Any, request: PlacementRequest, vllm_config: Any) -> None:
        """Compile and verify the plans, bind them to the layers of ``model``.

        Raises:
            PlacementError: a plan fails its proof, or vLLM's model does not have what is declared.
        """
        binding = binding_of(request.architecture)
        inner = getattr(model, binding.inner)
        layers = list(getattr(inner, binding.layers))
        first, end = getattr(inner, "start_layer", 0), getattr(inner, "end_layer", len(layers))
        self.is_first, self.is_last = first == 0, end == len(layers)
        plans = plans_of(request, vllm_config, (first, end))
        group = get_tp_group()
        hidden, dtype = vllm_config.model_config.get_hidden_size(), vllm_config.model_config.dtype
        communicator = communicator_of(
            group,
            plans.table.plans,
            hidden,
            dtype,
            Fusing(request.fusion),
            Overlapping(request.overlap),
            plans.table.limits_tokens[-1],
        )
        check_collectives(communicator, group, plans.table.plans, dtype)
        overlaps = isinstance(communicator, OverlappingGroupCommunicator)
        request.settle(vllm_config, fused=isinstance(communicator, FusedGroupCommunicator), overlapped=overlaps)
        modules = bind(plans.graph, binding, inner, layers[first:end], open_linears=overlaps)
        least_tokens = communicator.least_tokens if isinstance(communicator, OverlappingGroupCommunicator) else 1
        self._table = table = plans.table.split(least_tokens)
        planned = PlannedModel(plans.graph, table, group.rank_in_group, modules, communicator, least_tokens)
        most_parts = max(plan.token_multiple for plan in table.plans)
        captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self._mask = PaddingMask(max(table.limits_tokens[-1], captured) + most_parts, group.device)
        self._bodies = [
            _body(index, vllm_config=vllm_config, inner=inner, planned=planned, multiple=plan.token_multiple)
            for index, plan in enumerate(table.plans)
        ]
        overlapped = sum(
            getattr(own, "linear", _no_linear)() is not None for section in modules for own in section.values()
        )
        logger(__name__).info("%s", _summary(request, plans, overlapped))

    def __call__(self, stream: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[tokens, hidden]``, whole on every rank: after the final norm, or to be sent to the next stage.

        ``stream`` is token ids in the first pipeline stage, and what the stage before sent in the others.
        """
        index = self._table.index(min(len(stream), self._table.limits_tokens[-1]))
        multiple = self._table.plans[index].token_multiple
        self._mask.cover(len(stream), len(stream) + -len(stream) % multiple)
        hidden: torch.Tensor = self._bodies[index](stream, positions)
        return hidden


class PlanBody(nn.Module):
    """One plan as a forward pass that vLLM can compile."""

    def __init__(
        self,
        *,
        vllm_config: Any,  # noqa: ARG002 - vLLM's decorator wants it
        inner: nn.Module,
        planned: PlannedModel,
        index: int,
        multiple: int,
    ) -> None:
        super().__init__()
        self.inner = inner
        self._planned = planned
        self._index = index
        self._multiple = multiple

    def forward(self, stream: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states for ``stream``, padded inside to a multiple of the parts that tokens are split into."""
        if self._multiple == 1:
            return self._planned.run(self._index, stream, StepInputs(positions, may_pad=False))
        num_tokens = stream.shape[0]
        padding = (0, 0) * (stream.dim() - 1) + (0, -num_tokens % self._multiple)
        padded = torch.nn.functional.pad(stream, padding)
        return self._planned.run(self._index, padded, StepInputs(positions, may_pad=True))[:num_tokens]


@cache
def compiled_body(index: int) -> Any:
    """:class:`PlanBody` for plan ``index``, as vLLM compiles it.

    vLLM keeps compiled code by the name and the code object of ``forward``, so each plan needs one of its own.
    """
    name = f"PlanBody{index}"
    code = PlanBody.forward
    forward = FunctionType(code.__code__.replace(), code.__globals__, "forward", code.__defaults__, code.__closure__)
    forward.__qualname__ = f"{name}.forward"
    forward.__annotations__ = code.__annotations__
    own = type(name, (PlanBody,), {"forward": forward, "__module__": __name__})
    return support_torch_compile(dynamic_arg_dims={"stream": 0, "positions": -1})(own)


def _body(index: int, **arguments: Any) -> Any:
    """A body whose compiled code goes into a folder of its own; the first one keeps vLLM's."""
    with set_model_tag(f"placement_{index}") if index else nullcontext():
        return compiled_body(index)(index=index, **arguments)


def _no_linear() -> None:
    """What a module without a last linear layer has of it."""


def _summary(request: PlacementRequest, plans: Plans, overlapped: int) -> str:
    """One line for the log: what runs, with how many collectives for which steps, and under how many linear layers."""
    limits, table = plans.table.limits_tokens, plans.table.plans
    counts = ", ".join(
        f"{plan.num_collectives} up to {limit} tokens" for limit, plan in zip(limits, table, strict=True)
    )
    return (
        f"Placement {request.spec} of {request.architecture} ({request.residual} residual), verified; "
        f"collectives in a forward pass: {counts}; linear layers that overlap theirs: {overlapped}."
    )
