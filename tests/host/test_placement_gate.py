# SPDX-License-Identifier: Apache-2.0
"""`--placement` at start-up: what is refused, and what the configuration and the registry hold afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plugin_fixtures import changed

from tokenspeed_plugin.host import patches, placed_models
from tokenspeed_plugin.host.check import HostError, check_placement
from tokenspeed_plugin.host.placement_gate import UNPLACED, create_engine_config
from tokenspeed_plugin.settings import SettingsError, resolve

pytestmark = pytest.mark.host_matrix

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 128,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
}


@pytest.fixture(autouse=True)
def stock_registry() -> Iterator[None]:
    yield
    placed_models.remove()


def config_with(**changes: Any) -> SimpleNamespace:
    """A configuration of vLLM's, as far as it is read, with settings below it changed."""
    model = SimpleNamespace(
        architecture="Qwen3ForCausalLM",
        model="tiny",
        dtype=torch.float32,
        runner_type="generate",
        hf_config=SimpleNamespace(to_dict=lambda: QWEN3),
        enable_prompt_embeds=False,
        is_multimodal_model=False,
    )
    parallel = SimpleNamespace(tensor_parallel_size=2, data_parallel_size=1, enable_expert_parallel=False)
    config = SimpleNamespace(
        model_config=model,
        parallel_config=parallel,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=32),
        lora_config=None,
        speculative_config=None,
        additional_config={"other": 1},
    )
    return changed(config, changes)


def gate(text: str, config: Any, **arguments: Any) -> tuple[Any, Any]:
    engine_args = SimpleNamespace(**{"enable_expert_parallel": False, **arguments})
    return create_engine_config(lambda: config, engine_args, resolve({"placement": text}, {}, None)), engine_args


def test_the_installed_vllm_has_what_placed_models_rely_on() -> None:
    assert check_placement().missing == ()


def test_without_placement_vllms_own_models_stay_or_come_back() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    before = dict(ModelRegistry.models)
    gate("attn=tp2,dense=tp2", config_with())
    assert ModelRegistry.models != before
    config = config_with()
    assert gate("off", config)[0] is config
    assert config.additional_config == {"other": 1}
    assert ModelRegistry.models == before
    assert placed_models.VARIABLE not in os.environ


def test_the_configuration_carries_the_settled_plans_and_children_learn_what_to_replace() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    config, _ = gate("attn=tp2,dense=tp2", config_with())
    request = config.additional_config["tokenspeed_placement"]
    assert request["spec"] == "attn=tp2,dense=tp2,moe=tp2"
    assert config.additional_config["other"] == 1
    assert "Qwen3ForCausalLM" in os.environ[placed_models.VARIABLE].split(",")
    name = ModelRegistry.models["Qwen3ForCausalLM"].class_name
    assert placed_models.architecture_of(name) == "Qwen3ForCausalLM"
    assert placed_models.stock_class("Qwen3ForCausalLM").__name__ == "Qwen3ForCausalLM"
    other, _ = gate("attn=tp2,dense=tp2,residual=sharded", config_with())
    assert other.additional_config["tokenspeed_placement"]["digest"] != request["digest"]


def test_a_placed_class_is_vllms_with_another_forward_and_its_plans_do_not_share_compiled_code() -> None:
    from tokenspeed_plugin.placement.runtime.placed_models import compiled_body, placed_class

    gate("auto", config_with())
    placed, stock = placed_class("Qwen3ForCausalLM"), placed_models.stock_class("Qwen3ForCausalLM")
    assert issubclass(placed, stock)
    assert placed.load_weights is stock.load_weights
    first, second = compiled_body(0).forward, compiled_body(1).forward
    assert first.__qualname__ != second.__qualname__
    assert first.__code__ is not second.__code__


def test_the_specification_switches_expert_parallelism_on() -> None:
    _, engine_args = gate("attn=tp2,dense=tp2,moe=ep2", config_with())
    assert engine_args.enable_expert_parallel


def test_a_moe_by_width_and_expert_parallelism_exclude_each_other() -> None:
    with pytest.raises(SettingsError, match=r"--placement .*: the MoE is split by width, but --enable-expert-parallel"):
        gate("attn=tp2,dense=tp2,moe=tp2", config_with(), enable_expert_parallel=True)


WANTED = {
    "model_config.runner_type": "pooling",
    "lora_config": SimpleNamespace(),
    "speculative_config.method": "eagle3",
}


@pytest.mark.parametrize("row", UNPLACED, ids=lambda row: row.setting)
def test_each_row_stops_the_start_and_leaves_vllms_models(row: Any) -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    before = dict(ModelRegistry.models)
    value = WANTED.get(row.setting, 2)
    with pytest.raises(SettingsError) as error:
        gate("auto", config_with(**{row.setting: value}))
    assert f"{row.setting}=" in str(error.value)
    assert f"{row.way_on}, or use `--placement off`" in str(error.value)
    assert ModelRegistry.models == before


def test_a_specification_for_another_group_size_names_both() -> None:
    with pytest.raises(ValueError, match="attn=tp4: vLLM's attention takes the whole group, attn=tp2"):
        gate("attn=tp4,dense=tp4", config_with())


def test_layers_that_every_rank_has_whole_are_named_by_their_place_in_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.model_executor.layers.linear import RowParallelLinear

    built: dict[str, bool] = {}

    def note(self: Any, *, prefix: str, disable_tp: bool = False) -> None:
        built[prefix] = disable_tp

    monkeypatch.setattr(RowParallelLinear, "__init__", note)
    names = (
        "model.layers.7.mlp.down_proj",
        "model.layers.7.mlp.shared_experts.down_proj",
        "model.layers.7.self_attn.o_proj",
    )
    with patches.whole_on_every_rank(("mlp.gate_up_proj", "mlp.down_proj")):
        assert patches.ROW_LINEAR.is_installed
        for name in names:
            RowParallelLinear(prefix=name)
    assert built == dict(zip(names, (True, False, False), strict=True))
    assert RowParallelLinear.__init__ is note


def test_a_vllm_without_a_switch_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.parallel_state import GroupCoordinator

    monkeypatch.delattr(GroupCoordinator, "reduce_scatter")
    with pytest.raises(HostError, match=r"--placement auto cannot be honoured: .*GroupCoordinator\.reduce_scatter"):
        gate("auto", config_with())
