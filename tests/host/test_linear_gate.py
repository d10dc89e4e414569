# SPDX-License-Identifier: Apache-2.0
"""`--kernels` and linear layers at start-up: who takes few tokens, what says so, and what is refused by name."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plugin_fixtures import changed

from tokenspeed_plugin.host import few_rows, kernel_gate, linear_gate, mla_append, mla_backend, patches, registration
from tokenspeed_plugin.host.check import check_linear
from tokenspeed_plugin.kernels.linear import operation
from tokenspeed_plugin.kernels.linear.solutions import SOLUTIONS
from tokenspeed_plugin.settings import SettingsError, resolve

pytestmark = pytest.mark.host_matrix

H200 = ("cuda", (9, 0), "NVIDIA H200")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200 on which the library is built."""
    (ours,) = (spec for spec in SOLUTIONS if spec.serves_engine)
    monkeypatch.setattr(kernel_gate, "_platform", lambda: H200)
    for name in ("prepare", "unavailable"):
        monkeypatch.setitem(ours.__dict__, name, lambda: None)
    yield
    few_rows.remove()
    mla_append.remove()
    mla_backend.remove()


def config_with(**changes: Any) -> SimpleNamespace:
    """A configuration of vLLM's for a dense model, as far as it is read, with settings below it changed."""
    model = SimpleNamespace(use_mla=False, dtype=torch.bfloat16, max_model_len=65536, hf_text_config=SimpleNamespace())
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16, user_specified_block_size=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        attention_config=SimpleNamespace(backend=None, backend_per_kind={}),
        speculative_config=None,
        additional_config={},
        kernel_config=SimpleNamespace(linear_backend="auto"),
    )
    return changed(config, changes)


def gate(text: str, config: Any) -> Any:
    return kernel_gate.create_engine_config(lambda: config, resolve({"kernels": text}, {}, None))


def layer_product() -> Any:
    import vllm.model_executor.layers.linear as linear

    return linear.dispatch_unquantized_gemm()


def test_the_installed_vllm_has_what_the_product_relies_on() -> None:
    assert check_linear().missing == ()


@pytest.mark.parametrize("text", ["auto", "linear=cuda_sm90", "mla=flashattn3"])
def test_layers_take_the_kernel_where_their_weight_is_worth_it(
    text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = layer_product()
    with caplog.at_level(logging.INFO, logger="vllm"):
        gate(text, config_with())
    assert patches.UNQUANTIZED_PRODUCT.is_installed
    assert (
        f"--kernels {text}: linear layers with 4 to 128 MiB of weights take up to 16 tokens by cuda_sm90."
        in caplog.text
    )
    rows, weight = torch.ones(2, 64), torch.ones(16, 64)
    taken: list[Any] = []
    monkeypatch.setattr(operation, "few_rows_linear", lambda *operands: taken.append(operands))
    layer = SimpleNamespace(cpu_linear=torch.nn.functional.linear, weight=weight)
    for worth_it in (False, True):
        monkeypatch.setattr(operation, "takes_layer", lambda _, worth_it=worth_it: worth_it)
        assert not taken
        layer_product()(layer, rows, weight, None)
    assert taken == [(rows, weight, None)]
    few_rows.remove()
    assert layer_product() is before


def test_it_can_be_taken_back_where_the_environment_has_forgotten_it() -> None:
    before = layer_product()
    gate("auto", config_with())
    del os.environ[few_rows.VARIABLE]
    few_rows.remove()
    assert layer_product() is before


def test_processes_of_the_engine_do_the_same() -> None:
    gate("auto", config_with())
    patches.unwrap(patches.UNQUANTIZED_PRODUCT)
    registration.few_rows.install_inherited()
    assert patches.UNQUANTIZED_PRODUCT.is_installed
    gate("off", config_with())
    assert few_rows.VARIABLE not in os.environ
    registration.few_rows.install_inherited()
    assert not patches.UNQUANTIZED_PRODUCT.is_installed


@pytest.mark.parametrize(
    ("changes", "platform", "why"),
    [
        (
            {"kernel_config.linear_backend": "cutlass"},
            H200,
            "kernel_config.linear_backend='cutlass': it chooses the products",
        ),
        ({"model_config.dtype": torch.float16}, H200, "float16"),
        ({}, ("cuda", (8, 0), "NVIDIA H200"), "cuda 8.0"),
        ({}, ("cpu", (0, 0), ""), "platform cpu, allowed: cuda 9.0 to below 9.1"),
    ],
)
def test_auto_leaves_what_cannot_be_had_to_vllm_and_a_name_stops_the_start(
    changes: dict[str, Any],
    platform: tuple[str, tuple[int, int], str],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(kernel_gate, "_platform", lambda: platform)
    with caplog.at_level(logging.INFO, logger="vllm"):
        gate("auto", config_with(**changes))
    (line,) = (record.message for record in caplog.records if "linear layers" in record.message)
    assert "stay with vLLM's own products" in line
    assert why in line
    assert not patches.UNQUANTIZED_PRODUCT.is_installed
    with pytest.raises(
        SettingsError, match=r"linear=cuda_sm90 cannot be honoured: .*Allowed: off, auto, or linear= one of"
    ):
        gate("linear=cuda_sm90", config_with(**changes))


def test_a_gpu_that_was_not_measured_is_left_to_vllm_unless_the_kernel_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_gate, "_platform", lambda: ("cuda", (9, 0), "NVIDIA H100"))
    with caplog.at_level(logging.INFO, logger="vllm"):
        gate("auto", config_with())
        assert "NVIDIA H100 was not measured; linear=cuda_sm90 takes it all the same" in caplog.text
        assert not patches.UNQUANTIZED_PRODUCT.is_installed
        gate("linear=cuda_sm90", config_with())
    assert patches.UNQUANTIZED_PRODUCT.is_installed
    gate("linear=vllm", config_with())
    assert not patches.UNQUANTIZED_PRODUCT.is_installed


def test_batch_invariance_keeps_vllms_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert linear_gate.reasons(config_with()) == ["VLLM_BATCH_INVARIANT: results depend on the batch"]


def test_what_cannot_stand_under_layers_is_named() -> None:
    with pytest.raises(SettingsError, match="'reference' cannot serve vLLM's layers, allowed: cuda_sm90, vllm"):
        gate("linear=reference", config_with())
    with pytest.raises(SettingsError, match="linear='cublas', allowed solutions: cuda_sm90, reference, vllm"):
        gate("linear=cublas", config_with())
