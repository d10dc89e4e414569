# SPDX-License-Identifier: Apache-2.0
"""Declared modules as vLLM's layers with their inner reductions switched off.

Nothing here names a class of vLLM: layers are found by the paths of a :class:`ModelBinding`, and what is relied on of them
(``reduce_results``, ``moe_config.skip_final_all_reduce``) is listed in ``host/capabilities.py``.
"""

from __future__ import annotations

import copy
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tokenspeed_plugin.host.linears import open_row_linear, row_linear_numbers
from tokenspeed_plugin.host.norms import rms_norm_numbers
from tokenspeed_plugin.kernels.comm.linear_operation import Linear
from tokenspeed_plugin.placement.algebra import PlacementError
from tokenspeed_plugin.placement.module_spec import ModuleKind
from tokenspeed_plugin.placement.runtime.residual_sum import ResidualAdd, RmsNorm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenspeed_plugin.placement.graph import ModelGraph
    from tokenspeed_plugin.placement.models.bindings import ModelBinding
    from tokenspeed_plugin.placement.module_spec import ModuleSpec, Signature
    from tokenspeed_plugin.placement.runtime.compiled_layer import Module


class StepInputs(NamedTuple):
    """What every module gets: positions ``[tokens]``, and whether the plan's values may be longer than that."""

    positions: torch.Tensor
    may_pad: bool


class Norm:
    """An RMS norm of vLLM, which can take a residual sum with it."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, *inputs: torch.Tensor, signature: Signature, step: Any) -> torch.Tensor:  # noqa: ARG002
        """The normalised values."""
        normalised: torch.Tensor = self._layer(inputs[0])
        return normalised

    def add_norm(self, residual: torch.Tensor, branch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalised sum, and the sum."""
        normalised, total = self._layer(branch, residual)
        return normalised, total

    def rms_norm(self) -> RmsNorm | None:
        """What a kernel needs to do the same; None when this is no plain RMS norm."""
        numbers = rms_norm_numbers(self._layer)
        return None if numbers is None else RmsNorm(*numbers)


class LayerWithLinear:
    """A layer of vLLM that ends in a row-parallel one, which may be left open."""

    def __init__(self, layer: Any, last: Any = None) -> None:
        """``last``: the linear layer, if it is open."""
        self._layer = layer
        self._last = last

    def linear(self) -> Linear | None:
        """The last step, if the layer leaves it out."""
        return None if self._last is None else Linear(*row_linear_numbers(self._last))

    def __call__(self, *inputs: torch.Tensor, signature: Signature, step: Any) -> torch.Tensor:
        """The layer's output; this rank's share of it, where the last step sums over ranks."""
        values, last = self.without_linear(*inputs, signature=signature, step=step), self.linear()
        return values if last is None else last(values)

    def without_linear(self, *inputs: torch.Tensor, signature: Signature, step: Any) -> torch.Tensor:  # noqa: ARG002
        """What the layer hands out: its output, or what its last step reads."""
        values: torch.Tensor = self._layer(inputs[0])
        return values


class Attention(LayerWithLinear):
    """An attention block of vLLM. It gets exactly the step's tokens: its KV cache knows of no padding."""

    def __init__(self, layer: Any, extra: dict[str, None], last: Any = None) -> None:
        super().__init__(layer, last)
        self._extra = extra

    def without_linear(self, *inputs: torch.Tensor, signature: Signature, step: StepInputs) -> torch.Tensor:  # noqa: ARG002
        """What the block hands out, one row for each token and for each of the padding."""
        values = inputs[0]
        if not step.may_pad or (not torch.compiler.is_compiling() and len(values) == step.positions.shape[-1]):
            return self._attend(values, step.positions)
        num_tokens = step.positions.shape[-1]
        mixed = self._attend(values[:num_tokens], step.positions)
        return torch.nn.functional.pad(mixed, (0, 0, 0, values.shape[0] - num_tokens))

    def _attend(self, values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self._layer(positions=positions, hidden_states=values, **self._extra)
        return mixed


class TokenwiseLayer:
    """A layer that takes one tensor: embedding, MoE."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, *inputs: torch.Tensor, signature: Signature, step: Any) -> torch.Tensor:  # noqa: ARG002
        """The layer's output."""
        values: torch.Tensor = self._layer(inputs[0])
        return values


class Scale:
    """Multiplication by a constant; vLLM keeps it in the type of the model."""

    def __init__(self, factor: Any) -> None:
        self._factor = factor

    def __call__(self, *inputs: torch.Tensor, signature: Signature, step: Any) -> torch.Tensor:  # noqa: ARG002
        """The product."""
        scaled: torch.Tensor = inputs[0] * self._factor
        return scaled


class Identity:
    """Hands a value on."""

    def __call__(self, *inputs: torch.Tensor, signature: Signature, step: Any) -> torch.Tensor:  # noqa: ARG002
        """The value."""
        return inputs[0]


def bind(
    graph: ModelGraph, binding: ModelBinding, inner: Any, layers: Sequence[Any], *, open_linears: bool = False
) -> list[dict[str, Module]]:
    """The modules of every section, in the order of the graph, with all reductions inside of them switched off.

    ``inner`` is vLLM's inner model, ``layers`` those of its decoder layers that this process has. ``open_linears``: leave the
    last linear layers of attention and MLPs open, where they are plain ones.

    Raises:
        PlacementError: vLLM's model lacks a declared module, or reduces somewhere that no declaration covers.
    """
    declared = [name for i, name in enumerate(graph.order) if not _is_end(graph, i)]
    if len(declared) != len(layers):
        message = f"{graph.name!r} declares {len(declared)} layers, vLLM's model has {len(layers)}"
        raise PlacementError(message)
    rest = iter(layers)
    owners = [inner if _is_end(graph, position) else next(rest) for position in range(len(graph.order))]
    bound = [
        {node.spec.name: _bind(node.spec, binding, owner, open_linears) for node in graph.sections[name].nodes}
        for name, owner in zip(graph.order, owners, strict=True)
    ]
    for index, layer in enumerate(layers):
        _check_silent(layer, f"layer {index}")
    return bound


def _is_end(graph: ModelGraph, position: int) -> bool:
    """Whether a section is the embedding, the final norm or what sends the stream on, rather than a decoder layer."""
    kinds = {node.spec.kind for node in graph.sections[graph.order[position]].nodes}
    return bool(kinds & {ModuleKind.EMBEDDING, ModuleKind.SINK})


def _bind(spec: ModuleSpec, binding: ModelBinding, owner: Any, open_linears: bool) -> Module:
    if spec.kind is ModuleKind.ADD:
        return ResidualAdd()
    if spec.kind is ModuleKind.SINK:
        return Identity()
    layer = _found(spec.name, binding, owner)
    if spec.kind is ModuleKind.NORM:
        return Norm(layer)
    return _of_kind(spec, layer, open_linears)


def _found(name: str, binding: ModelBinding, owner: Any) -> Any:
    path = binding.path(name)
    try:
        return attrgetter(path)(owner)
    except AttributeError as error:
        message = f"declared module {name!r}: {type(owner).__name__} has no {path!r}; bind it to another path"
        raise PlacementError(message) from error


def _of_kind(spec: ModuleSpec, layer: Any, open_linears: bool) -> Module:
    if spec.kind is ModuleKind.EMBEDDING:
        return TokenwiseLayer(_unreduced_copy(layer))
    if spec.kind is ModuleKind.SCALE:
        return Scale(layer)
    if spec.kind in (ModuleKind.ATTENTION, ModuleKind.MLA):
        layer.o_proj.reduce_results = False
        # DeepSeek's attention has a parameter that only other models use, and no default for it.
        extra = {"llama_4_scaling": None} if spec.kind is ModuleKind.MLA else {}
        return Attention(layer, extra, _opened(layer.o_proj) if open_linears else None)
    if spec.kind is ModuleKind.MLP:
        layer.down_proj.reduce_results = False
        return LayerWithLinear(layer, _opened(layer.down_proj) if open_linears else None)
    if spec.kind is ModuleKind.MOE:
        _check_moe(spec.name, layer.experts.moe_config)
        layer.experts.moe_config.skip_final_all_reduce = True
        return TokenwiseLayer(layer)
    message = f"declared module {spec.name!r}: kind {spec.kind.value!r} has no counterpart among vLLM's layers"
    raise PlacementError(message)


def _opened(linear: Any) -> Any:
    return linear if open_row_linear(linear) else None


def _unreduced_copy(embedding: Any) -> Any:
    """The same weights without the reduction; drafters and logits go on using the original."""
    own = copy.copy(embedding)
    own.reduce_results = False
    return own


def _check_moe(name: str, config: Any) -> None:
    if config.is_sequence_parallel or config.moe_parallel_config.use_all2all_kernels:
        message = f"declared module {name!r}: vLLM's MoE communicates by itself here (data parallel); use dp=1"
        raise PlacementError(message)


def _check_silent(layer: Any, where: str) -> None:
    """Whether something that reduces is left, which would be reduced a second time."""
    for name, module in layer.named_modules():
        loud = getattr(module, "reduce_results", False) and getattr(module, "tp_size", 1) > 1
        moe = getattr(module, "moe_config", None)
        if loud or (moe is not None and not moe.skip_final_all_reduce and moe.tp_size * moe.ep_size > 1):
            message = f"{where}: {name!r} reduces by itself and belongs to no declared module; bind it"
            raise PlacementError(message)
