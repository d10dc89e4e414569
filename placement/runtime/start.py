# SPDX-License-Identifier: Apache-2.0
"""From ``--placement`` to verified plans: once when the engine is configured, and again in every worker.

The engine's configuration carries the outcome to the workers under :data:`KEY` of ``additional_config``. vLLM hashes that into
its compile-cache key, which is wanted here: another plan is another graph.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from tokenspeed_plugin.placement.algebra import PlacementError
from tokenspeed_plugin.placement.choice import choose
from tokenspeed_plugin.placement.cost import CostModel, CostTable
from tokenspeed_plugin.placement.models import declare
from tokenspeed_plugin.placement.models.bindings import ModelBinding, binding_of, bindings
from tokenspeed_plugin.placement.models.runtime_graph import runtime_graph, stage_graph
from tokenspeed_plugin.placement.plan_table import PlanTable
from tokenspeed_plugin.placement.residual import Residual
from tokenspeed_plugin.placement.spec import Fusing, Overlapping, PlacementSpec, check_runtime, split_options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tokenspeed_plugin.placement.graph import ModelGraph

KEY: Final = "tokenspeed_placement"


@dataclass(frozen=True)
class PlacementRequest:
    """What a worker needs to compile the same plans again.

    ``digest`` names the plans; a worker that comes to others stops. ``fused`` says whether the worker found what ``fusion``
    asks for, ``overlapped`` the same for ``overlap``: it is settled there, before anything is compiled, because another graph
    needs another key.
    """

    architecture: str
    spec: str
    residual: str
    digest: str = ""
    fusion: str = Fusing.AUTO.value
    fused: bool = False
    overlap: str = Overlapping.AUTO.value
    overlapped: bool = False

    @classmethod
    def of(cls, vllm_config: Any) -> PlacementRequest | None:
        """The request that a configuration carries; None when it has none or is that of a draft model."""
        given = vllm_config.additional_config
        if not isinstance(given, dict) or KEY not in given or vllm_config.model_config.runner_type == "draft":
            return None
        return cls(**given[KEY])

    def settle(self, vllm_config: Any, *, fused: bool, overlapped: bool) -> None:
        """Write into the configuration of this process, which vLLM's compile-cache keys are made from, what it runs."""
        settled = {**asdict(self), "fused": fused, "overlapped": overlapped}
        vllm_config.additional_config = {**vllm_config.additional_config, KEY: settled}

    def replicated_layers(self) -> tuple[str, ...]:
        """Suffixes, behind the number of a decoder layer, of linear layers that every rank has whole."""
        if PlacementSpec.parse(self.spec).dense_tp > 1:
            return ()
        path = binding_of(self.architecture).path("mlp")
        return (f"{path}.gate_up_proj", f"{path}.down_proj")


@dataclass(frozen=True)
class Plans:
    """Verified plans of one model for the ranks of one tensor-parallel group."""

    graph: ModelGraph
    table: PlanTable
    binding: ModelBinding

    @property
    def digest(self) -> str:
        """The same for equal plans, in every process."""
        shapes = [(limit, plan.shape()) for limit, plan in zip(self.table.limits_tokens, self.table.plans, strict=True)]
        return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]


def architectures() -> tuple[str, ...]:
    """Architectures that plans can run on."""
    return tuple(sorted(bindings()))


def expert_parallel(text: str) -> bool | None:
    """Whether a specification wants the MoE by experts; None when it leaves that open."""
    spec = split_options(text).spec
    return None if spec == "auto" or "moe=" not in spec else PlacementSpec.parse(spec).ep > 1


def request_for(text: str, vllm_config: Any) -> PlacementRequest:
    """Settle the specification, compile and verify its plans.

    Raises:
        PlacementError: the model, the specification and the configuration do not go together; names the number.
    """
    architecture = vllm_config.model_config.architecture
    options = split_options(text)
    binding = binding_of(architecture)
    graph = _declared(vllm_config, architecture)
    spec = _settled(options.spec, graph, binding, vllm_config.parallel_config)
    request = PlacementRequest(
        architecture,
        str(spec),
        options.residual.value,
        fusion=options.fusing.value,
        overlap=options.overlapping.value,
    )
    plans = compiled(request, graph, *_sizes(vllm_config))
    return PlacementRequest(**{**asdict(request), "digest": plans.digest})


def plans_of(request: PlacementRequest, vllm_config: Any, layers: tuple[int, int] | None = None) -> Plans:
    """The plans of a request, compiled and verified in this process.

    ``layers``: first layer and the one behind the last of this process' pipeline stage; None for all of them.

    Raises:
        PlacementError: they are not those that the engine settled on (another version of the plugin in a worker).
    """
    graph = _declared(vllm_config, request.architecture)
    plans = compiled(request, graph, *_sizes(vllm_config))
    if plans.digest != request.digest:
        message = f"placement {request.spec!r}: this worker compiles plans {plans.digest}, the engine {request.digest}"
        raise PlacementError(message)
    if layers in (None, (0, len(graph.order) - 2)):
        return plans
    return compiled(request, graph, *_sizes(vllm_config), layers)


def compiled(
    request: PlacementRequest,
    graph: ModelGraph,
    num_ranks: int,
    max_tokens: int,
    layers: tuple[int, int] | None = None,
) -> Plans:
    """The plans of a request for one group of ``num_ranks`` and steps of up to ``max_tokens``, by the shipped cost table."""
    spec, binding = PlacementSpec.parse(request.spec), binding_of(request.architecture)
    mesh, costs = spec.mesh(num_ranks, graph, data_parallel=1), CostTable.load()
    run = runtime_graph(graph, binding.together)
    run = stage_graph(run, *layers) if layers else run
    table = PlanTable.build(
        lambda num_tokens: CostModel(run, mesh, costs, num_tokens, 1), max_tokens, Residual(request.residual)
    )
    return Plans(run, table, binding)


def _sizes(vllm_config: Any) -> tuple[int, int]:
    """Ranks of the tensor-parallel group, and tokens of the largest step."""
    return (
        vllm_config.parallel_config.tensor_parallel_size,
        vllm_config.scheduler_config.max_num_batched_tokens,
    )


def _declared(vllm_config: Any, architecture: str) -> ModelGraph:
    model = vllm_config.model_config
    config: Mapping[str, Any] = model.hf_config.to_dict()
    name, dtype = str(model.model), str(model.dtype).removeprefix("torch.")
    whole = {**config, "architectures": [architecture], "dtype": dtype}
    binding_of(architecture).check(name, whole)
    return declare(name, whole)


def _settled(text: str, graph: ModelGraph, binding: ModelBinding, parallel: Any) -> PlacementSpec:
    size = parallel.tensor_parallel_size
    has_experts = "ep" in graph.axes
    names = {module.name for module in graph.modules()}

    def check(spec: PlacementSpec) -> None:
        spec.check_model(graph)
        if has_experts and parallel.enable_expert_parallel and size > 1 and spec.ep == 1:
            message = f"--placement '{spec}': the MoE is split by width, but --enable-expert-parallel is on"
            raise PlacementError(message)
        check_runtime(
            spec,
            size,
            parallel.data_parallel_size,
            has_experts=has_experts,
            has_shared_experts=len(names & set(binding.together)) > 1,
        )

    if text != "auto":
        spec = PlacementSpec.parse(text)
        check(spec)
        return spec
    # Expert parallelism is settled before vLLM's configuration exists, so what nobody asked for is not chosen here.
    without = "moe=ep" if not parallel.enable_expert_parallel else None
    return choose(graph, size, CostTable.load(), lambda spec: _check_choice(spec, check, without))


def _check_choice(spec: PlacementSpec, check: Callable[[PlacementSpec], None], without: str | None) -> None:
    check(spec)
    if without and without in str(spec):
        message = f"--placement '{spec}': needs --enable-expert-parallel"
        raise PlacementError(message)
