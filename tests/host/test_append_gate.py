# SPDX-License-Identifier: Apache-2.0
"""`--kernels append=NAME` at start-up: what is registered, what vLLM is told to leave alone, and what is refused by name."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plugin_fixtures import changed

from tokenspeed_plugin.host import append_gate, kernel_gate, linear_gate, mla_append, mla_backend, registration
from tokenspeed_plugin.host.check import HostError, check_append
from tokenspeed_plugin.settings import SettingsError, resolve

pytestmark = pytest.mark.host_matrix

H200 = ("cuda", (9, 0), "NVIDIA H200")
CPU = ("cpu", (0, 0), "")
OURS = "tokenspeed::mla_append"


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Hopper GPU whose MLA decode stays with vLLM."""
    monkeypatch.setattr(kernel_gate, "_platform", lambda: H200)
    monkeypatch.setattr(linear_gate, "reasons", lambda _: ["not here"])  # else auto builds its library
    monkeypatch.setattr(kernel_gate, "_missing_base", lambda _: ["no backend here"])
    yield
    mla_backend.remove()
    mla_append.remove()


def config_with(**changes: Any) -> SimpleNamespace:
    """A configuration of vLLM's for an MLA model, as far as it is read, with settings below it changed."""
    from vllm.config import AttentionConfig

    model = SimpleNamespace(
        use_mla=True,
        dtype=torch.bfloat16,
        max_model_len=65536,
        hf_text_config=SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64),
        get_num_attention_heads=lambda _: 16,
    )
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16, user_specified_block_size=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        attention_config=AttentionConfig(),
        speculative_config=None,
        additional_config={},
        compilation_config=SimpleNamespace(
            splitting_ops=["vllm::unified_mla_attention_with_output", "vllm::unified_mla_kv_cache_update"],
            pass_config=SimpleNamespace(fuse_rope_kvcache_cat_mla=False),
        ),
    )
    return changed(config, changes)


def gate(text: str, config: Any) -> Any:
    return kernel_gate.create_engine_config(lambda: config, resolve({"kernels": text}, {}, None))


def test_the_installed_vllm_has_what_our_layer_relies_on() -> None:
    assert check_append().missing == ()


@pytest.mark.parametrize("cache_dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3"])
def test_a_named_kernel_gets_its_layer_and_a_place_between_the_pieces(
    cache_dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_with(**{"cache_config.cache_dtype": cache_dtype})
    with caplog.at_level(logging.INFO, logger="vllm"):
        gate("append=triton", config)
        gate("append=triton", config)
    assert mla_append.is_ours(mla_append.occupant())
    assert os.environ[mla_append.VARIABLE]
    assert config.compilation_config.splitting_ops.count(OURS) == 1
    assert "--kernels append=triton: new tokens of MLA layers are written by triton" in caplog.text
    assert "--kernels append=triton: MLA decode stays with vLLM's own backend: " in caplog.text


@pytest.mark.parametrize("splitting", [None, [], ["vllm::unified_mla_attention_with_output"]])
def test_where_vllms_own_write_is_no_place_to_split_ours_is_none(splitting: list[str] | None) -> None:
    config = config_with(**{"compilation_config.splitting_ops": None if splitting is None else list(splitting)})
    gate("append=triton", config)
    assert config.compilation_config.splitting_ops == splitting


def test_vllms_fusion_of_the_same_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    config = config_with(**{"compilation_config.pass_config.fuse_rope_kvcache_cat_mla": True})
    gate("auto", config)
    assert config.compilation_config.pass_config.fuse_rope_kvcache_cat_mla
    with caplog.at_level(logging.INFO, logger="vllm"):
        gate("append=triton", config)
    assert not config.compilation_config.pass_config.fuse_rope_kvcache_cat_mla
    assert "The pass fuse_rope_kvcache_cat_mla is off" in caplog.text


@pytest.mark.parametrize("text", ["off", "auto", "mla=flashmla", "append=vllm"])
def test_nothing_happens_without_a_name_and_what_was_there_goes(text: str) -> None:
    gate("append=triton", config_with())
    config = config_with()
    gate(text, config)
    assert (mla_append.occupant(), mla_append.VARIABLE in os.environ) == (None, False)
    assert OURS not in config.compilation_config.splitting_ops


def test_a_backend_of_the_users_own_decodes_what_it_has_appended() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    config = config_with(**{"attention_config.backend": AttentionBackendEnum.TRITON_MLA})
    gate("append=triton", config)
    assert mla_append.is_ours(mla_append.occupant())
    assert config.attention_config.backend_per_kind == {}


def test_workers_do_what_the_process_that_started_them_did(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.custom_op import op_registry_oot

    gate("mla=flashmla,append=triton", config_with())
    del op_registry_oot[mla_append.REPLACED]
    monkeypatch.setattr(registration, "check_start", lambda: SimpleNamespace(reason=None))
    registration.install(lambda *_: None)
    assert mla_append.is_ours(mla_append.occupant())


ROWS = {row.setting: row.what for row in append_gate.UNSERVED}
WANTED: dict[str, Any] = {"model_config.use_mla": False, "cache_config.cache_dtype": "fp8_ds_mla"}


@pytest.mark.parametrize("setting", ROWS)
def test_what_it_cannot_serve_is_refused_by_its_name(setting: str) -> None:
    with pytest.raises(SettingsError) as error:
        gate("append=triton", config_with(**{setting: WANTED.get(setting, 2)}))
    assert "--kernels append=triton cannot be honoured: " in str(error.value)
    assert f"{setting}=" in str(error.value)
    assert f"{ROWS[setting]}. Allowed: off, auto, or append= one of reference, triton, vllm" in str(error.value)
    assert mla_append.occupant() is None


@pytest.mark.parametrize(
    ("text", "platform", "changes", "message"),
    [
        ("append=best", H200, {}, "append='best', allowed solutions: reference, triton, vllm"),
        ("append=reference", H200, {}, "platform cuda 9.0, allowed: cpu"),
        ("append=triton", CPU, {}, "platform cpu, allowed: cuda 8.9"),
        ("append=triton", H200, {"model_config.dtype": torch.float16}, "formats kv=float16, new=float16, allowed"),
    ],
)
def test_a_name_that_cannot_be_had_stops_the_start(
    text: str, platform: Any, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_gate, "_platform", lambda: platform)
    with pytest.raises(SettingsError) as error:
        gate(text, config_with(**changes))
    assert message in str(error.value)
    assert "--kernels" in str(error.value)


def test_a_replacement_of_others_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.custom_op import op_registry_oot

    theirs = type("Theirs", (), {"__module__": "others"})
    monkeypatch.setitem(op_registry_oot, mla_append.REPLACED, theirs)
    with pytest.raises(SettingsError, match=r"others\.Theirs replaces vLLM's MultiHeadLatentAttentionWrapper already"):
        gate("append=triton", config_with())
    assert mla_append.occupant() is theirs


def test_a_vllm_without_such_a_layer_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.model_executor.layers.mla as layers

    monkeypatch.delattr(layers.MLAModules, "__dataclass_fields__")
    with pytest.raises(HostError, match=r"--kernels append=triton cannot be honoured: .*MLAModules\.kv_a_layernorm"):
        gate("append=triton", config_with())


def test_the_page_on_compatibility_lists_what_is_not_served() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "compatibility.md").read_text()
    section = page[page.index("`append=NAME` is refused") : page.index("## vLLM's settings under")]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    listed = {
        setting.strip("` "): line.split("|")[2].strip() for line in rows for setting in line.split("|")[1].split(",")
    }
    assert listed == ROWS
