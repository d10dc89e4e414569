# SPDX-License-Identifier: Apache-2.0
"""Linear layers of few rows without a GPU: what the kernel is handed, what it refuses, and what the operation does instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed_plugin.kernels.comm.linear_operation import Linear
from tokenspeed_plugin.kernels.linear import few_rows, operation
from tokenspeed_plugin.kernels.linear.abi import DEPENDENT_LAUNCH, LinearError, LinearLibrary, Params
from tokenspeed_plugin.kernels.linear.few_rows import FewRows
from tokenspeed_plugin.kernels.linear.reference import few_rows_reference

CPU = torch.device("cpu")


class Library:
    """Keeps what would be launched."""

    def __init__(self) -> None:
        self.launched: list[Params] = []

    def prepare(self, device: int) -> None:
        del device

    def few_rows(self, device: int, params: Params, stream: int) -> None:
        del device, stream
        self.launched.append(Params.from_buffer_copy(params))


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def kernel(library: Library, monkeypatch: pytest.MonkeyPatch) -> FewRows:
    class Stream:
        cuda_stream = 7

    class Properties:
        multi_processor_count = 132

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    return FewRows(library, CPU)  # type: ignore[arg-type]


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def test_a_launch_gets_addresses_strides_and_sizes(kernel: FewRows, library: Library) -> None:
    rows, weight, bias = bf16(5, 192)[:, :128], bf16(48, 256)[:, :128], bf16(48)
    out = kernel(rows, weight, bias)
    (params,) = library.launched
    assert out.shape == (5, 48)
    assert (params.rows_in, params.weight, params.bias) == (rows.data_ptr(), weight.data_ptr(), bias.data_ptr())
    assert params.rows_out == out.data_ptr()
    assert (params.row_stride, params.weight_stride) == (192, 256)
    assert (params.num_rows, params.in_values, params.out_values) == (5, 128, 48)
    assert params.launch_flags == DEPENDENT_LAUNCH
    kernel(rows, weight)
    assert library.launched[-1].bias is None


@pytest.mark.parametrize(
    ("rows", "weight", "bias", "what"),
    [
        (bf16(0, 64), bf16(16, 64), None, "rows: shape .*, allowed: 1 to 16 rows"),
        (bf16(17, 64), bf16(16, 64), None, "rows: shape .*, allowed: 1 to 16 rows"),
        (bf16(2, 3, 64), bf16(16, 64), None, "rows: shape .*, allowed: 1 to 16 rows"),
        (bf16(2, 64), bf16(16, 128), None, r"weight: shape .*, allowed: \(any, 64\)"),
        (bf16(2, 64), bf16(24, 64), None, "weight: out=24, allowed: multiples of 16"),
        (bf16(2, 96), bf16(16, 96), None, "weight: in=96, allowed: multiples of 64"),
        (bf16(2, 64), bf16(16, 64).float(), None, "weight: dtype float32, allowed: bfloat16"),
        (bf16(2, 64).float(), bf16(16, 64), None, "rows: torch.float32 on cpu, allowed: bfloat16"),
        (bf16(2, 64), bf16(16, 64), bf16(8), r"bias: shape \(8,\), allowed: \(16,\), contiguous"),
        (bf16(64, 2).t(), bf16(16, 64), None, "rows: strides .*, allowed: a dense last dimension"),
        (bf16(2, 68)[:, :64], bf16(16, 64), None, "rows: strides .*, allowed: .* multiples of 16 bytes"),
        (bf16(2, 64), bf16(16, 72)[:, 4:68], None, "weight: strides .*, allowed: .* multiples of 16 bytes"),
    ],
)
def test_what_does_not_fit_is_named_and_not_launched(
    kernel: FewRows, library: Library, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, what: str
) -> None:
    assert not kernel.takes(rows, weight, bias)
    with pytest.raises(ValueError, match=what):
        kernel(rows, weight, bias)
    assert library.launched == []


def test_the_operation_is_torchs_product_where_there_is_no_kernel() -> None:
    draw = torch.Generator().manual_seed(1)
    rows, weight, bias = (torch.randn(shape, generator=draw) for shape in ((3, 64), (32, 64), (32,)))
    for own_bias in (None, bias):
        expected = torch.nn.functional.linear(rows, weight, own_bias)
        assert torch.equal(operation.few_rows_linear(rows, weight, own_bias), expected)
        torch.testing.assert_close(expected, few_rows_reference(rows, weight, own_bias))
    assert operation.few_rows_linear(rows[None], weight).shape == (1, 3, 32)


def test_graphs_know_the_shape_of_the_result() -> None:
    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def model(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return operation.few_rows_linear(rows, weight) + 1

    for count in (2, 40):
        assert model(torch.ones(count, 64), torch.ones(16, 64)).eq(65).all()


@pytest.mark.parametrize(("asked", "gains"), [(True, True), (True, False), (False, True)])
def test_compiled_products_are_the_operation_where_an_engine_asked_and_the_layer_gains(
    asked: bool, gains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever number of rows the graph was made with: the same graph serves all."""
    graphs: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=kept, fullgraph=True, dynamic=True)
    def model(rows: torch.Tensor, linear: Linear) -> torch.Tensor:
        return linear(rows)

    monkeypatch.setattr(operation, "takes_layer", lambda _: gains)
    operation.take_products(on=asked)
    try:
        for count in (40, 2):
            assert model(torch.ones(count, 64), Linear(torch.ones(16, 64), None)).eq(64).all()
    finally:
        operation.take_products(on=False)
        torch.compiler.reset()
    assert len(graphs) == 1
    called = {node.target for node in graphs[0].graph.nodes}
    assert (torch.ops.tokenspeed.few_rows_linear in called) == (asked and gains)


def test_more_than_eight_rows_in_two_rounds_of_blocks_stay_with_cublas(kernel: FewRows) -> None:
    fine = [(8, 6144), (9, 3072), (16, 4096), (16, 12288), (16, 4224)]
    assert [kernel.takes(bf16(rows, 64), bf16(out, 64), None) for rows, out in fine] == [True] * len(fine)
    assert not any(
        kernel.takes(bf16(rows, 64), bf16(out, 64), None) for rows, out in ((9, 6144), (16, 8192), (16, 4240))
    )
    kernel(bf16(16, 64), bf16(6144, 64))  # asked for by itself it is what was asked for


def test_small_weights_and_those_of_another_kind_stay_with_torch() -> None:
    def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
        class Weight:
            is_cuda = True

            def __init__(self) -> None:
                self.shape, self.dtype = torch.Size(shape), dtype

            def dim(self) -> int:
                return len(shape)

            def numel(self) -> int:
                return self.shape.numel()

            def element_size(self) -> int:
                return dtype.itemsize

        return Weight()

    assert operation.takes_layer(on_gpu(1024, 2048))
    assert operation.takes_layer(on_gpu(16384, 4096))
    assert not operation.takes_layer(on_gpu(16400, 4096))
    assert not operation.takes_layer(on_gpu(1008, 2048))
    assert not operation.takes_layer(on_gpu(8200, 4096))
    assert not operation.takes_layer(on_gpu(8192, 4128))
    assert not operation.takes_layer(on_gpu(8192, 4096, dtype=torch.float16))
    assert not operation.takes_layer(on_gpu(8, 4096, 4096))
    assert not operation.takes_layer(torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta"))


def test_what_cuda_refuses_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        @staticmethod
        def tokenspeed_linear_params_bytes() -> int:
            import ctypes

            return ctypes.sizeof(Params)

        def __getattr__(self, name: str) -> Any:
            setattr(self, name, (lambda: b"few_rows: out of memory") if name.endswith("error") else (lambda *_: -1))
            return getattr(self, name)

    monkeypatch.setattr("ctypes.CDLL", lambda _: Refusing())
    with pytest.raises(LinearError, match="few_rows: out of memory"):
        LinearLibrary("refusing.so").few_rows(0, Params(), 0)


def test_a_device_has_one_set_of_launches(monkeypatch: pytest.MonkeyPatch, library: Library, kernel: FewRows) -> None:
    monkeypatch.setattr(few_rows.linear, "load", lambda: library)
    few_rows.of_device.cache_clear()
    assert few_rows.of_device(CPU) is few_rows.of_device(CPU) is not kernel
    few_rows.of_device.cache_clear()
