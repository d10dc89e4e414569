# SPDX-License-Identifier: Apache-2.0
"""The Hopper libraries: they compile on any machine with nvcc, without spills or serialized products; else they say why not."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenspeed_plugin.kernels.comm import library as comm
from tokenspeed_plugin.kernels.comm.abi import CommLibrary, Params
from tokenspeed_plugin.kernels.linear import abi as linear_abi
from tokenspeed_plugin.kernels.linear import library as linear
from tokenspeed_plugin.kernels.mla.sm90 import library as mla
from tokenspeed_plugin.kernels.mla.sm90.abi import DecodeParams, MlaLibrary
from tokenspeed_plugin.kernels.mla.unfold import abi as unfold_abi
from tokenspeed_plugin.kernels.mla.unfold import library as unfold
from tokenspeed_plugin.kernels.nvcc import CudaSources, LibraryUnavailableError, find_nvcc


@pytest.mark.parametrize(
    ("sources", "kernel", "load"),
    [
        (mla.SOURCES, "decode_kernel", MlaLibrary),
        (mla.FP8_SOURCES, "decode_kernel", MlaLibrary),
        (comm.SOURCES, "add_norm_kernel", CommLibrary),
        (linear.SOURCES, "few_rows_kernel", linear_abi.LinearLibrary),
        (unfold.SOURCES, "unfold_kernel", unfold_abi.UnfoldLibrary),
    ],
)
def test_it_compiles_clean_or_names_what_is_missing(
    sources: CudaSources, kernel: str, load: Callable[[str], object], tmp_path: Path
) -> None:
    target = tmp_path / "library.so"
    if find_nvcc() is None:
        with pytest.raises(LibraryUnavailableError, match="nvcc was found neither under"):
            sources.build(target)
        return
    report = sources.build(target, ("-Xptxas=-v",))
    assert report.count(kernel) >= 2
    assert "C75" not in report  # ptxas would have serialized the products
    spills = [line for line in report.splitlines() if "spill stores" in line]
    assert spills
    assert all("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in line for line in spills)
    load(str(target))  # the parameter block has the same size on both sides


@pytest.mark.parametrize(
    ("library", "prefix", "block", "name"),
    [
        (MlaLibrary, "tokenspeed_mla_", DecodeParams, "DecodeParams"),
        (CommLibrary, "tokenspeed_comm_", Params, "Params"),
        (linear_abi.LinearLibrary, "tokenspeed_linear_", linear_abi.Params, "Params"),
        (unfold_abi.UnfoldLibrary, "tokenspeed_unfold_", unfold_abi.Params, "Params"),
    ],
)
def test_the_parameter_block_is_checked_before_use(
    library: type, prefix: str, block: type[ctypes.Structure], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Foreign:
        def __init__(self, _: str) -> None:
            setattr(self, f"{prefix}params_bytes", lambda: ctypes.sizeof(block) + 8)

        def __getattr__(self, function: str) -> object:
            if not function.startswith(prefix):
                raise AttributeError(function)
            setattr(self, function, lambda: None)
            return getattr(self, function)

    monkeypatch.setattr(ctypes, "CDLL", Foreign)
    with pytest.raises(RuntimeError, match=rf"{name} has .* bytes there and .* here; rebuild the library"):
        library("foreign.so")


def test_a_borrowed_file_is_a_source(tmp_path: Path) -> None:
    own, borrowed = tmp_path / "own", tmp_path / "ptx.cuh"
    own.mkdir()
    (own / "api.cu").write_text('#include "../ptx.cuh"')
    borrowed.write_text("// one")
    sources = CudaSources("name", own, borrowed=(borrowed,))
    before = sources.source_hash()
    borrowed.write_text("// two")
    assert sources.source_hash() != before


def test_a_missing_compiler_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    reason = mla.SOURCES.unavailable_reason()
    assert reason is not None
    assert reason.endswith("nvcc was found neither under $CUDA_HOME nor on PATH")
    mla.SOURCES.library_path().touch()
    assert mla.SOURCES.unavailable_reason() is None


def test_a_failing_compiler_is_quoted_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho no such architecture >&2\nexit 3\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(LibraryUnavailableError, match="status 3:\nno such architecture"):
        mla.SOURCES.build(tmp_path / "out" / "library.so")
    assert list((tmp_path / "out").iterdir()) == []
