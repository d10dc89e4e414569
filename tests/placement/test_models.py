# SPDX-License-Identifier: Apache-2.0
"""Declarations from configurations: layer kinds, sizes, refusals, and architectures of other packages."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pluggy
import pytest
import torch

from tests.placement.placement_cases import FAMILIES, compile_plan, model
from tests.placement.real_configs import REAL
from tokenspeed_plugin.hooks import PROJECT, hookimpl
from tokenspeed_plugin.placement import PlacementError, Residual
from tokenspeed_plugin.placement.models import declare, declared_architectures, register_declaration
from tokenspeed_plugin.placement.models.bindings import binding_of
from tokenspeed_plugin.placement.models.runtime_graph import runtime_graph
from tokenspeed_plugin.placement.runtime.vllm_modules import bind
from tokenspeed_plugin.placement.verifier import verify


def test_layer_kinds_follow_the_configuration() -> None:
    assert Counter(declare("d", REAL["DeepSeek-V3"]).order) == {
        "entry": 1,
        "dense_layer": 3,
        "moe_layer": 58,
        "exit": 1,
    }
    assert Counter(declare("g", REAL["gpt-oss-120b"]).order[1:-1]) == {"sliding_attention": 18, "full_attention": 18}
    assert declare("m", REAL["gemma-3-27b"]).order[1:8] == (
        *["sliding_attention"] * 5,
        "full_attention",
        "sliding_attention",
    )
    assert model("qwen3_moe").order == ("entry", "dense_layer", "moe_layer", "moe_layer", "exit")


@pytest.mark.parametrize(
    "name", ["Llama-3.1-8B", "Qwen3-32B", "Qwen3-235B-A22B", "DeepSeek-V3", "gpt-oss-120b", "gemma-3-27b"]
)
def test_declared_parameters_add_up_to_the_published_size(name: str) -> None:
    published_billions = {
        "Llama-3.1-8B": 8.0,
        "Qwen3-32B": 32.8,
        "Qwen3-235B-A22B": 235,
        "DeepSeek-V3": 671,
        "gpt-oss-120b": 116.8,
        "gemma-3-27b": 27.0,
    }
    graph = declare(name, REAL[name])
    total = 0
    for section, times in graph.layer_counts.items():
        for node in graph.sections[section].nodes:
            for param in node.spec.params:
                elements = 1
                for dim in param.dims:
                    elements *= graph.sizes[dim]
                total += times * elements
    if name == "gemma-3-27b":  # embedding and head share their weights
        total -= graph.sizes["vocab"] * graph.sizes["hidden"]
    assert total / 1e9 == pytest.approx(published_billions[name], rel=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_declaration_names_a_collective(family: str) -> None:
    words = ("all_reduce", "all-reduce", "gather", "scatter", "all_to_all")
    for module in model(family).modules():
        assert not any(word in repr(module) for word in words)


def test_an_unknown_architecture_lists_the_declared_ones() -> None:
    with pytest.raises(PlacementError, match=r"architectures \['FooForCausalLM'\] are not declared.*LlamaForCausalLM"):
        declare("foo", {"architectures": ["FooForCausalLM"]})


def test_a_missing_field_is_named() -> None:
    with pytest.raises(PlacementError, match="config of 'llama': num_hidden_layers is None, a positive whole number"):
        model("llama", num_hidden_layers=None)
    with pytest.raises(PlacementError, match="8 query heads do not divide over 3 key-value heads"):
        model("llama", num_key_value_heads=3)
    with pytest.raises(PlacementError, match="dtype 'int3' is not one of float32, bfloat16, float16"):
        model("llama", dtype="int3")
    with pytest.raises(PlacementError, match="layer_types has 1 entries"):
        model("gemma3", layer_types=["full_attention"])


def test_a_second_declaration_of_an_architecture_is_refused() -> None:
    assert "Qwen3ForCausalLM" in declared_architectures()
    with pytest.raises(PlacementError, match="'Qwen3ForCausalLM' is declared already"):
        register_declaration("Qwen3ForCausalLM", declare)


def test_the_number_of_experts_has_two_names() -> None:
    before = dict(REAL["Qwen3-235B-A22B"])
    after = {**before, "num_local_experts": before["num_experts"]}
    del after["num_experts"]
    assert declare("q", after) == declare("q", before)


def documented_plugin() -> ModuleType:
    """The example of docs/placement.md as a module."""
    page = (Path(__file__).parents[2] / "docs" / "placement.md").read_text()
    module = ModuleType("documented_plugin")
    exec(page.split("```python\n")[1].split("```")[0], module.__dict__)
    return module


def hooked(*plugins: ModuleType) -> pluggy.PluginManager:
    class Specification:
        @staticmethod
        @pluggy.HookspecMarker(PROJECT)
        def tokenspeed_declare_models() -> None:
            """Architecture name -> declaration."""

        @staticmethod
        @pluggy.HookspecMarker(PROJECT)
        def tokenspeed_bind_models() -> None:
            """Architecture name -> binding."""

    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Specification)
    for plugin in plugins:
        manager.register(plugin)
    manager.check_pending()
    return manager


def test_the_documented_third_party_model_compiles_to_one_reduction_per_layer() -> None:
    manager = hooked(documented_plugin())
    assert "ParallelDecoderForCausalLM" in declared_architectures(manager)
    config = {
        "architectures": ["ParallelDecoderForCausalLM"],
        "hidden_size": 32,
        "vocab_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
    }
    graph = declare("third-party", config, manager)
    plan = compile_plan(graph, residual=Residual.REPLICATED)
    verify(graph, plan)
    assert [len(s.collectives) for s in plan.sections[2:4]] == [1, 1]


def test_the_documented_binding_finds_its_modules_and_silences_them() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, **attributes: object) -> None:
            super().__init__()
            for name, value in attributes.items():
                setattr(self, name, value)

    def loud() -> Layer:
        return Layer(reduce_results=True, tp_size=2)

    manager = hooked(documented_plugin())
    binding = binding_of("ParallelDecoderForCausalLM", manager)
    block = Layer(input_layernorm=Layer(), attention=Layer(o_proj=loud()), mlp=Layer(down_proj=loud()))
    own = Layer(embed_tokens=loud(), blocks=torch.nn.ModuleList([block]), norm=Layer())
    config = {
        "hidden_size": 32,
        "vocab_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
    }
    graph = declare("third-party", {**config, "architectures": ["ParallelDecoderForCausalLM"]}, manager)
    bound = bind(runtime_graph(graph), binding, own, list(own.blocks))
    assert set(bound[1]) == {"input_layernorm", "self_attn", "mlp", "branches", "residual"}
    assert not block.attention.o_proj.reduce_results
    assert not block.mlp.down_proj.reduce_results
    assert binding.inner == "transformer"


def test_a_hook_cannot_replace_a_shipped_binding() -> None:
    plugin = documented_plugin()
    plugin.tokenspeed_bind_models = hookimpl(lambda: {"Qwen3ForCausalLM": binding_of("LlamaForCausalLM")})
    plugin.tokenspeed_bind_models.__name__ = "tokenspeed_bind_models"
    with pytest.raises(PlacementError, match="'Qwen3ForCausalLM' is bound already; a second binding through"):
        binding_of("Qwen3ForCausalLM", hooked(plugin))


def test_a_hook_cannot_replace_a_shipped_declaration() -> None:
    plugin = documented_plugin()
    plugin.tokenspeed_declare_models = hookimpl(lambda: {"Qwen3ForCausalLM": declare})
    plugin.tokenspeed_declare_models.__name__ = "tokenspeed_declare_models"
    with pytest.raises(PlacementError, match="'Qwen3ForCausalLM' is declared already; a second declaration through"):
        declare("x", REAL["Qwen3-32B"], hooked(plugin))


def test_planning_does_not_import_torch() -> None:
    code = "import sys, tokenspeed_plugin.placement.cli as c, tokenspeed_plugin.placement.verifier; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
