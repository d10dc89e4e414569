# SPDX-License-Identifier: Apache-2.0
"""`--kernels` at start-up: which backend the configuration gets, what is refused, and what is left to vLLM with its reason."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plugin_fixtures import changed

from tokenspeed_plugin.host import kernel_gate, linear_gate, mla_backend
from tokenspeed_plugin.host.check import HostError, check_kernels
from tokenspeed_plugin.kernels.engine import start
from tokenspeed_plugin.kernels.nvcc import LibraryUnavailableError
from tokenspeed_plugin.kernels.registry import Registry, default_registry
from tokenspeed_plugin.settings import SettingsError, resolve

pytestmark = pytest.mark.host_matrix

H200 = ("cuda", (9, 0), "NVIDIA H200")


def _nothing() -> None:
    return None


def _fails() -> None:
    raise LibraryUnavailableError("nvcc failed with status 1")


def registry_with(**changes: Any) -> Registry:
    """The registry of this process, whose Hopper kernel is there already, or is what `changes` say."""
    changes = {"unavailable": _nothing, "prepare": _nothing, **changes}
    return Registry(dataclasses.replace(spec, **changes) if spec.serves_engine else spec for spec in default_registry())


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine with an H200 on which everything is there."""
    monkeypatch.setattr(kernel_gate, "_platform", lambda: H200)
    monkeypatch.setattr(linear_gate, "reasons", lambda _: ["not here"])  # else auto builds its library
    monkeypatch.setattr(kernel_gate, "_missing_base", lambda _: [])
    monkeypatch.setenv("TOKENSPEED_KERNEL_TUNING", str(tmp_path / "tuning.json"))
    use(monkeypatch, registry_with())
    yield
    mla_backend.remove()


def use(monkeypatch: pytest.MonkeyPatch, registry: Registry) -> None:
    monkeypatch.setattr(start, "default_registry", lambda: registry)
    monkeypatch.setattr("tokenspeed_plugin.kernels.select.default_registry", lambda: registry)


def config_with(heads: int = 16, **changes: Any) -> SimpleNamespace:
    """A configuration of vLLM's for an MLA model, as far as it is read, with settings below it changed."""
    from vllm.config import AttentionConfig

    model = SimpleNamespace(
        use_mla=True,
        dtype=torch.bfloat16,
        max_model_len=65536,
        hf_text_config=SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64),
        get_num_attention_heads=lambda _: heads,
    )
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16, user_specified_block_size=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        attention_config=AttentionConfig(),
        speculative_config=None,
        additional_config={"other": 1},
    )
    return changed(config, changes)


def gate(text: str, config: Any) -> Any:
    return kernel_gate.create_engine_config(lambda: config, resolve({"kernels": text}, {}, None))


def chosen(config: Any) -> str | None:
    backend = config.attention_config.backend_per_kind.get("mla_attention")
    return backend.name if backend else None


def test_the_installed_vllm_has_what_our_backend_relies_on() -> None:
    assert check_kernels().missing == ()


def test_auto_gives_mla_layers_our_backend_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    config = config_with()
    with caplog.at_level(logging.INFO, logger="vllm"):
        assert gate("auto", config) is config
    assert (chosen(config), config.attention_config.backend) == ("CUSTOM", None)
    assert config.additional_config == {"other": 1}
    assert mla_backend.occupant() == mla_backend.PATH
    assert os.environ[mla_backend.VARIABLE] == mla_backend.PATH


def test_the_choice_survives_the_way_to_the_workers() -> None:
    config = config_with()
    gate("auto", config)
    copied = pickle.loads(pickle.dumps(config.attention_config))
    assert copied.backend_per_kind["mla_attention"].name == "CUSTOM"
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    AttentionBackendEnum.CUSTOM.clear_override()
    mla_backend.install_inherited()
    assert mla_backend.occupant() == mla_backend.PATH


@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize("text", ["auto", "mla=cuda_sm90_fp8"])
def test_an_e4m3_cache_has_a_backend_of_its_own(text: str, cache_dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    config = config_with(**{"cache_config.cache_dtype": cache_dtype})
    with caplog.at_level(logging.INFO, logger="vllm"):
        gate(text, config)
    assert chosen(config) == "CUSTOM"
    assert mla_backend.occupant() == os.environ[mla_backend.VARIABLE] == mla_backend.E4M3_PATH
    scope = "where it is the faster" if text == "auto" else "as far as it can"
    assert f"MLA decodes with cuda_sm90_fp8 {scope}, else with vLLM's FLASHMLA" in caplog.text
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    AttentionBackendEnum.CUSTOM.clear_override()
    mla_backend.install_inherited()
    assert mla_backend.occupant() == mla_backend.E4M3_PATH
    gate("auto", config_with())
    assert mla_backend.occupant() == os.environ[mla_backend.VARIABLE] == mla_backend.PATH


@pytest.mark.parametrize(
    ("text", "cache_dtype", "reason"),
    [
        ("mla=cuda_sm90", "fp8", "does not fit mla.decode (kv=float8_e4m3fn/tensor, q=float8_e4m3fn/tensor"),
        ("mla=cuda_sm90_fp8", "auto", "does not fit mla.decode (kv=bfloat16, q=bfloat16"),
    ],
)
def test_a_kernel_for_the_other_cache_stops_the_start(text: str, cache_dtype: str, reason: str) -> None:
    with pytest.raises(SettingsError) as error:
        gate(text, config_with(**{"cache_config.cache_dtype": cache_dtype}))
    assert f"--kernels {text} cannot be honoured" in str(error.value)
    assert reason in str(error.value)
    assert mla_backend.occupant() is None


def test_without_flashmla_an_e4m3_cache_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.v1.attention.ops.flashmla as flashmla

    monkeypatch.undo()
    monkeypatch.setattr(kernel_gate, "_platform", lambda: H200)
    monkeypatch.setattr(flashmla, "is_flashmla_dense_supported", lambda: (False, "no such library"))
    assert kernel_gate._missing_base("fp8") == ["vLLM's FlashMLA does not run here: no such library"]
    monkeypatch.delattr("vllm.v1.attention.backends.mla.flashmla.FlashMLAImpl.forward_mqa")
    monkeypatch.delattr("vllm.v1.attention.backend.AttentionLayer._q_scale", raising=False)
    monkeypatch.delitem(sys.modules["vllm.v1.attention.backend"].AttentionLayer.__annotations__, "_q_scale")
    (found,) = kernel_gate._missing_base("fp8")
    assert found.startswith("vLLM lacks ")
    assert "vllm.v1.attention.backend:AttentionLayer._q_scale" in found


def test_off_empties_the_slot_again() -> None:
    gate("auto", config_with())
    config = config_with()
    gate("off", config)
    assert (chosen(config), mla_backend.occupant(), mla_backend.VARIABLE in os.environ) == (None, None, False)


@pytest.mark.parametrize(
    ("text", "backend"),
    [("mla=cuda_sm90", "CUSTOM"), ("mla=flashmla", "FLASHMLA"), ("mla=flashattn3", "FLASH_ATTN_MLA")],
)
def test_a_solution_can_be_named(text: str, backend: str) -> None:
    config = config_with()
    gate(text, config)
    assert chosen(config) == backend


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mla=best", "mla='best', allowed solutions: cuda_sm90"),
        (
            "mla=reference",
            "'reference' cannot serve vLLM's decode, allowed: cuda_sm90, cuda_sm90_fp8, flashattn3, flashmla",
        ),
    ],
)
def test_a_name_that_cannot_serve_is_refused_before_vllm_does_anything(text: str, message: str) -> None:
    def never() -> None:
        raise AssertionError

    with pytest.raises(SettingsError, match="--kernels") as error:
        kernel_gate.create_engine_config(never, resolve({"kernels": text}, {}, None))
    assert message in str(error.value)


WANTED: dict[str, Any] = {
    "model_config.use_mla": False,
    "model_config.dtype": torch.float16,
    "cache_config.cache_dtype": "fp8_e5m2",
    "cache_config.kv_cache_dtype_skip_layers": ["0"],
    "attention_config.use_non_causal": True,
    "speculative_config.enable_adaptive_verification": True,
}
ROWS = {row.setting: row.what for row in kernel_gate.UNSERVED}
OTHERS = {
    "cache_config.block_size": (
        {"cache_config.block_size": 48, "cache_config.user_specified_block_size": True},
        "cache_config.block_size=48: multiples of 64 are served",
    ),
    "heads": ({"heads": 256}, "heads=256, allowed: 1 to 128"),
}


@pytest.mark.parametrize("setting", [*ROWS, *OTHERS])
def test_what_our_kernels_cannot_serve_stays_with_vllm_or_stops_a_named_one(
    setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    changes, reason = OTHERS.get(setting, ({setting: WANTED.get(setting, 2)}, ROWS.get(setting, "")))
    config = config_with(**changes)
    with caplog.at_level(logging.INFO, logger="vllm"):
        gate("auto", config)
    assert (chosen(config), mla_backend.occupant()) == (None, None)
    with pytest.raises(SettingsError) as error:
        gate("mla=cuda_sm90", config_with(**changes))
    assert reason in str(error.value)
    assert "--kernels mla=cuda_sm90 cannot be honoured" in str(error.value)
    assert "Allowed: off, auto, or mla= one of cuda_sm90, cuda_sm90_fp8, flashattn3, flashmla" in str(error.value)
    assert mla_backend.occupant() is None


@pytest.mark.parametrize("setting", ["backend", "backend_per_kind"])
def test_a_backend_of_the_users_own_wins_over_auto_and_excludes_a_name(setting: str) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    own = AttentionBackendEnum.TRITON_MLA
    value = own if setting == "backend" else {"mla_attention": own}
    config = config_with(**{f"attention_config.{setting}": value})
    gate("auto", config)
    assert chosen(config) == (None if setting == "backend" else "TRITON_MLA")
    with pytest.raises(SettingsError, match=r"--kernels mla=flashmla and .*TRITON_MLA both choose the backend"):
        gate("mla=flashmla", config)


def test_a_slot_that_is_taken_stays_as_it_is() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "theirs.Backend")
    try:
        with pytest.raises(SettingsError, match=r"the slot CUSTOM for attention backends holds theirs\.Backend"):
            gate("mla=cuda_sm90", config_with())
        assert mla_backend.occupant() == "theirs.Backend"
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()


def test_a_kernel_that_cannot_be_built_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, registry_with(prepare=_fails))
    config = config_with()
    gate("auto", config)
    assert chosen(config) is None
    with pytest.raises(SettingsError, match="cuda_sm90 cannot be built: nvcc failed with status 1"):
        gate("mla=cuda_sm90", config_with())


def test_batch_invariance_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert kernel_gate.reasons(config_with()) == ["VLLM_BATCH_INVARIANT: results depend on the batch"]


def test_this_machine_without_a_gpu_is_told_what_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert kernel_gate._platform()[0] == "cpu"
    assert kernel_gate._missing_base("auto") == ["this machine has cpu, Hopper (cuda 9.0) is served"]


def test_a_vllm_without_the_slot_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.v1.attention.backends.registry as registry

    monkeypatch.delattr(registry, "register_backend")
    with pytest.raises(HostError, match=r"--kernels auto cannot be honoured: .*registry:register_backend"):
        gate("auto", config_with())


def test_the_page_on_compatibility_lists_what_is_not_served() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "compatibility.md").read_text()
    section = page[page.index("With `--kernels` the chosen backend") : page.index("`append=NAME` is refused")]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    listed = {
        setting.strip("` "): line.split("|")[2].strip() for line in rows for setting in line.split("|")[1].split(",")
    }
    assert listed == {**ROWS, "cache_config.block_size": f"multiples of {kernel_gate.PAGE_TOKENS} are served"}
    assert kernel_gate.PAGE_TOKENS == start.PAGE_TOKENS
