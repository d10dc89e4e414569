# SPDX-License-Identifier: Apache-2.0
"""What the registry takes, refuses and tells."""

import pytest
from kernel_fixtures import BF16, make_spec

from tokenspeed_plugin.hooks import hookimpl
from tokenspeed_plugin.hooks.plugin_manager import plugin_manager
from tokenspeed_plugin.kernels import registry as registry_module
from tokenspeed_plugin.kernels.registry import (
    Capability,
    DuplicateKernelError,
    OperandFormat,
    Platform,
    Registry,
    ShapeTrait,
    default_registry,
    signature_text,
)


def test_a_name_is_given_once() -> None:
    registry = Registry([make_spec("fast")])
    with pytest.raises(DuplicateKernelError, match=r"kernel mla\.decode/fast is registered already"):
        registry.register(make_spec("fast"))
    assert len(registry) == 1


@pytest.mark.parametrize("field", ["capabilities", "signatures"])
def test_a_kernel_that_nothing_could_select_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"mla.decode/fast: {field} is empty"):
        Registry([make_spec("fast", **{field: ()})])


@pytest.mark.parametrize(
    ("platform", "admitted"),
    [
        (Platform("cuda", (9, 0)), True),
        (Platform("cuda", (8, 9)), False),
        (Platform("cuda", (9, 1)), False),
        (Platform("rocm", (9, 0)), False),
    ],
)
def test_capability_is_a_half_open_range_of_one_kind(platform: Platform, admitted: bool) -> None:
    assert Capability("cuda", (9, 0), (9, 1)).admits(platform) is admitted


@pytest.mark.parametrize(
    ("trait", "value", "refusal"),
    [
        (ShapeTrait("heads", 8, 128), 8, None),
        (ShapeTrait("heads", 8, 128), 129, "heads=129, allowed: 8 to 128"),
        (ShapeTrait("page_tokens", 1, power_of_two=True), 48, "page_tokens=48, allowed: at least 1, a power of two"),
        (ShapeTrait("page_tokens", allowed=frozenset({64, 32})), 128, "page_tokens=128, allowed: 32, 64"),
    ],
)
def test_a_shape_trait_names_value_and_allowed_values(trait: ShapeTrait, value: int, refusal: str | None) -> None:
    assert trait.refusal({trait.name: value}) == refusal


def test_a_shape_number_that_is_not_given_does_not_fit() -> None:
    assert ShapeTrait("heads", 8).refusal({}) == "heads is not given, allowed: at least 8"


def test_signatures_read_well() -> None:
    assert signature_text(BF16) == "kv=bfloat16, q=bfloat16"
    assert str(OperandFormat("float8_e4m3fn", "tensor")) == "float8_e4m3fn/tensor"


def test_a_plugin_adds_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plugin:
        @hookimpl
        def tokenspeed_kernels(self) -> list[object]:
            return [make_spec("theirs")]

    plugin = Plugin()
    monkeypatch.setattr(registry_module, "_registry", Registry())
    monkeypatch.setattr(registry_module, "_loaded", False)
    plugin_manager().register(plugin)
    try:
        assert {"theirs", "cuda_sm90", "reference"} <= default_registry().solutions("mla")
    finally:
        plugin_manager().unregister(plugin)


def test_our_own_solutions_have_names_of_their_own_and_load_or_say_who_serves() -> None:
    for spec in default_registry().candidates("mla", "decode"):
        if spec.host_backend is None:
            assert callable(spec.load())
            assert spec.source()
        else:
            with pytest.raises(RuntimeError, match=spec.host_backend):
                spec.load()
