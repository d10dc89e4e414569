# SPDX-License-Identifier: Apache-2.0
"""The binder on stand-ins with the attributes of vLLM's layers: what it switches off, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.placement.placement_cases import CONFIGS, compile_plan, model
from tokenspeed_plugin.hooks import hookimpl, plugin_manager
from tokenspeed_plugin.placement import Compiler, ModelPlan, PlacementError, Residual
from tokenspeed_plugin.placement.models.bindings import ModelBinding, binding_of
from tokenspeed_plugin.placement.models.decoder import SEND
from tokenspeed_plugin.placement.models.runtime_graph import runtime_graph, stage_graph
from tokenspeed_plugin.placement.runtime.start import KEY, PlacementRequest, expert_parallel, plans_of, request_for
from tokenspeed_plugin.placement.runtime.vllm_communicator import GroupCommunicator
from tokenspeed_plugin.placement.runtime.vllm_modules import StepInputs, bind
from tokenspeed_plugin.placement.verifier import VerificationError, verify


class Linear(nn.Module):
    """A layer that reduces over two ranks unless it is told not to."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce_results = True
        self.tp_size = 2
        self.weight = nn.Parameter(torch.ones(1))


class Block(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class Experts(nn.Module):
    def __init__(self, *, data_parallel: bool = False) -> None:
        super().__init__()
        self.moe_config = SimpleNamespace(
            skip_final_all_reduce=False,
            is_sequence_parallel=False,
            moe_parallel_config=SimpleNamespace(use_all2all_kernels=data_parallel),
            tp_size=2,
            ep_size=1,
        )


def layer(feed_forward: nn.Module) -> Block:
    return Block(
        input_layernorm=nn.Identity(),
        self_attn=Block(o_proj=Linear()),
        post_attention_layernorm=nn.Identity(),
        mlp=feed_forward,
    )


def inner(*layers: nn.Module) -> Block:
    return Block(embed_tokens=Linear(), layers=nn.ModuleList(layers), norm=nn.Identity())


def dense() -> Block:
    return inner(*(layer(Block(down_proj=Linear())) for _ in range(3)))


def test_every_declared_reduction_is_switched_off_and_the_embedding_stays_as_it_is_for_others() -> None:
    own = dense()
    bound = bind(runtime_graph(model("qwen3")), binding_of("Qwen3ForCausalLM"), own, list(own.layers))
    assert len(bound) == 5
    assert not any(m.reduce_results for n, m in own.named_modules() if isinstance(m, Linear) and "layers" in n)
    assert own.embed_tokens.reduce_results
    copied = bound[0]["embed_tokens"]._layer
    assert not copied.reduce_results
    assert copied.weight is own.embed_tokens.weight


def test_only_vllms_plain_row_parallel_layers_are_left_open() -> None:
    own = dense()
    bound = bind(runtime_graph(model("qwen3")), ModelBinding(), own, list(own.layers), open_linears=True)
    assert [bound[1][name].linear() for name in ("self_attn", "mlp")] == [None, None]  # type: ignore[attr-defined]
    assert type(own.layers[0].mlp.down_proj) is Linear


def test_the_moe_skips_its_reduction() -> None:
    own = inner(layer(Block(down_proj=Linear())), *(layer(Block(experts=Experts())) for _ in range(2)))
    bind(runtime_graph(model("qwen3_moe")), binding_of("Qwen3MoeForCausalLM"), own, list(own.layers))
    assert all(own.layers[i].mlp.experts.moe_config.skip_final_all_reduce for i in (1, 2))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (inner(*list(dense().layers)[:2]), "declares 3 layers, vLLM's model has 2"),
        (
            inner(*(layer(Block(down_proj=Linear(), extra=Linear())) for _ in range(3))),
            "layer 0: 'mlp.extra' reduces by",
        ),
        (inner(*(Block(input_layernorm=nn.Identity()) for _ in range(3))), "'self_attn': Block has no 'self_attn'"),
    ],
)
def test_a_model_that_is_not_as_declared_is_refused(own: Any, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        bind(runtime_graph(model("qwen3")), ModelBinding(), own, list(own.layers))


def test_a_moe_that_communicates_by_itself_is_refused() -> None:
    own = inner(
        layer(Block(down_proj=Linear())), *(layer(Block(experts=Experts(data_parallel=True))) for _ in range(2))
    )
    with pytest.raises(PlacementError, match="'experts': vLLM's MoE communicates by itself"):
        bind(runtime_graph(model("qwen3_moe")), binding_of("Qwen3MoeForCausalLM"), own, list(own.layers))


@pytest.mark.parametrize(
    ("first", "end", "names"), [(0, 1, ("entry", "layer", SEND)), (1, 3, ("layer", "layer", "exit"))]
)
def test_a_pipeline_stage_has_its_own_layers_and_sends_a_whole_stream(
    first: int, end: int, names: tuple[str, ...]
) -> None:
    graph = stage_graph(runtime_graph(model("qwen3")), first, end)
    assert graph.order == names
    plan = compile_plan(graph, residual=Residual.SHARDED, num_rows=1)
    verify(graph, plan)
    assert [str(layout) for layout in plan.sections[-1].exit] == ["R"]
    own = dense()
    bound = bind(graph, ModelBinding(), own, list(own.layers)[first:end])
    assert [set(modules) & {"embed_tokens", "mlp", "norm"} for modules in bound] == [
        {"entry": {"embed_tokens"}, "layer": {"mlp"}, "exit": {"norm"}, SEND: set()}[name] for name in names
    ]
    assert own.layers[2 if first == 0 else 0].mlp.down_proj.reduce_results
    config = vllm_config()
    request = request_for("attn=tp2,dense=tp2,residual=sharded", config)
    assert plans_of(request, config, (first, end)).graph.order == names
    assert plans_of(request, config, (0, 3)).digest == request.digest


def test_attention_sees_no_padding() -> None:
    own = dense()
    own.layers[0].self_attn.forward = lambda positions, hidden_states: hidden_states * positions[:, None]
    attend = bind(runtime_graph(model("qwen3")), ModelBinding(), own, list(own.layers))[1]["self_attn"]
    positions = torch.tensor([1.0, 2.0, 3.0])
    padded = torch.ones(4, 2)
    mixed = attend(padded, signature=None, step=StepInputs(positions, may_pad=True))
    assert mixed.tolist() == [[1, 1], [2, 2], [3, 3], [0, 0]]
    assert attend(padded[:3], signature=None, step=StepInputs(positions, may_pad=True)).tolist() == mixed[:3].tolist()


def test_architectures_without_a_binding_are_refused_with_those_that_have_one() -> None:
    with pytest.raises(
        PlacementError, match=r"'MambaForCausalLM' cannot be placed; supported are DeepseekV2.*Qwen3For"
    ):
        binding_of("MambaForCausalLM")


def test_other_distributions_add_bindings() -> None:
    class Plugin:
        @hookimpl
        def tokenspeed_bind_models(self) -> dict[str, ModelBinding]:
            return {"OtherForCausalLM": ModelBinding(inner="transformer")}

    manager = plugin_manager()
    plugin = Plugin()
    manager.register(plugin)
    try:
        assert binding_of("OtherForCausalLM").inner == "transformer"
    finally:
        manager.unregister(plugin)


def vllm_config(
    family: str = "qwen3",
    tensor: int = 2,
    data: int = 1,
    *,
    experts: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    **extra: Any,
) -> Any:
    """What of a ``VllmConfig`` start-up reads."""
    config = {**CONFIGS[family], **extra}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            architecture=config["architectures"][0],
            model=family,
            dtype=dtype,
            runner_type="generate",
            hf_config=SimpleNamespace(to_dict=lambda: config),
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tensor, data_parallel_size=data, enable_expert_parallel=experts
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        additional_config={},
    )


@pytest.mark.parametrize(
    ("text", "config", "spec", "residual"),
    [
        ("auto", vllm_config(), "attn=tp2,dense=tp1,moe=tp2", "auto"),
        ("auto,residual=sharded", vllm_config(tensor=1), "attn=tp1,dense=tp1,moe=tp1", "sharded"),
        ("attn=tp2,dense=tp2,residual=replicated", vllm_config(), "attn=tp2,dense=tp2,moe=tp2", "replicated"),
        ("auto", vllm_config("qwen3_moe", experts=True), "attn=tp2,dense=tp1,moe=ep2", "auto"),
        ("auto", vllm_config("deepseek_v3"), "attn=tp2,dense=tp2,moe=tp2", "auto"),
        ("attn=tp2,dense=tp2,moe=ep2", vllm_config("deepseek_v3"), "attn=tp2,dense=tp2,moe=ep2", "auto"),
        ("attn=tp2,dense=tp1,moe=tp2", vllm_config("qwen3_moe"), "attn=tp2,dense=tp1,moe=tp2", "auto"),
    ],
)
def test_a_worker_compiles_the_plans_that_the_engine_settled_on(
    text: str, config: Any, spec: str, residual: str
) -> None:
    request = request_for(text, config)
    assert (request.spec, request.residual) == (spec, residual)
    config.additional_config = {KEY: vars(request)}
    assert PlacementRequest.of(config) == request
    assert plans_of(request, config).digest == request.digest
    config.model_config.runner_type = "draft"
    assert PlacementRequest.of(config) is None


def test_a_worker_with_other_plans_stops() -> None:
    config = vllm_config()
    request = request_for("attn=tp2,dense=tp2,residual=replicated", config)
    other = PlacementRequest(request.architecture, request.spec, "sharded", request.digest)
    with pytest.raises(PlacementError, match=f"this worker compiles plans .*, the engine {request.digest}"):
        plans_of(other, config)


@pytest.mark.parametrize(
    ("text", "config", "message"),
    [
        ("attn=tp1,dense=tp2", vllm_config(), "attn=tp1: vLLM's attention takes the whole group, attn=tp2"),
        ("attn=tp2,dense=tp4", vllm_config(), "dense=tp4 is not tp1 or tp2"),
        ("attn=tp2,dense=tp2,moe=ep4", vllm_config("qwen3_moe"), "moe is not tp2 or ep2"),
        ("attn=tp2,dense=tp2", vllm_config("qwen3_moe", experts=True), "by width, but --enable-expert-parallel is on"),
        ("attn=tp2,dense=tp1,moe=tp2", vllm_config("deepseek_v3"), "dense=tp1: shared experts take the whole group"),
        ("attn=tp2,dense=tp2,moe=ep2", vllm_config("qwen3_moe", data=2), "dp=2: compiled MoE communication needs dp=1"),
        ("attn=tp16,dense=tp16", vllm_config(tensor=16), "8 heads are fewer than attn_tp=16"),
        ("auto", vllm_config("deepseek_v3", index_topk=2048), "index_topk is 2048, which no declaration covers"),
        ("auto", vllm_config("deepseek_v3", dtype=torch.float16), "'deepseek_v3' in float16: vLLM rescales this model"),
        ("auto", vllm_config("qwen3", architectures=["BertModel"]), "'BertModel' cannot be placed; supported are"),
        ("auto,residual=split", vllm_config(), "residual=split is not one of auto, replicated, sharded"),
        ("auto,fusion=on", vllm_config(), "fusion=on is not one of auto, off, reference"),
        ("auto,fusion=off,fusion=auto", vllm_config(), r"fusion=off\|auto is not one of auto, off, reference"),
    ],
)
def test_what_does_not_fit_is_refused_by_number(text: str, config: Any, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        request_for(text, config)


def test_dense_layers_of_one_rank_are_named_for_the_builder() -> None:
    whole = PlacementRequest("Qwen3ForCausalLM", "attn=tp2,dense=tp1,moe=tp2", "auto")
    assert whole.replicated_layers() == ("mlp.gate_up_proj", "mlp.down_proj")
    assert PlacementRequest("Qwen3ForCausalLM", "attn=tp2,dense=tp2,moe=tp2", "auto").replicated_layers() == ()


@pytest.mark.parametrize("residual", ["replicated", "sharded"])
def test_a_dropped_reduction_stops_the_start(residual: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Compiler.compile

    def forgetful(self: Compiler) -> ModelPlan:
        plan = honest(self)
        section = plan.sections[1]
        lost = next(move for move in section.collectives if move.op == "sum")
        kept = tuple(step for step in section.steps if step is not lost)
        broken = type(section)(**{**vars(section), "steps": kept})
        return type(plan)(plan.mesh, plan.num_tokens, plan.num_rows, (plan.sections[0], broken, *plan.sections[2:]))

    monkeypatch.setattr(Compiler, "compile", forgetful)
    with pytest.raises(VerificationError, match="section 'layer', module"):
        request_for(f"attn=tp2,dense=tp2,residual={residual}", vllm_config())


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("auto", None),
        ("attn=tp2,dense=tp2", None),
        ("attn=tp2,dense=tp2,moe=ep2", True),
        ("attn=tp2,dense=tp2,moe=tp2,residual=auto", False),
    ],
)
def test_the_moe_part_says_whether_experts_are_split(text: str, wanted: bool | None) -> None:
    assert expert_parallel(text) is wanted


def test_collectives_over_part_of_the_group_are_refused() -> None:
    plan = compile_plan(model("qwen3"))
    GroupCommunicator(SimpleNamespace(world_size=2), [plan])
    with pytest.raises(PlacementError, match=r"over 2 ranks: vLLM's group has .* over 4 ranks"):
        GroupCommunicator(SimpleNamespace(world_size=4), [plan])
