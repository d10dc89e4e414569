# SPDX-License-Identifier: Apache-2.0
"""The Hopper library: it compiles on any machine with nvcc, without spills or serialized products; else it says why not."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from tokenspeed_plugin.kernels.mla.sm90 import library
from tokenspeed_plugin.kernels.mla.sm90.abi import DecodeParams, MlaLibrary


def test_it_compiles_clean_or_names_what_is_missing(tmp_path: Path) -> None:
    target = tmp_path / "library.so"
    if library.find_nvcc() is None:
        with pytest.raises(library.LibraryUnavailableError, match="nvcc was found neither under"):
            library.build(target)
        return
    report = library.build(target, ("-Xptxas=-v",))
    assert report.count("decode_kernel") >= 2
    assert "C75" not in report  # ptxas would have serialized the products
    spills = [line for line in report.splitlines() if "spill stores" in line]
    assert spills
    assert all("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in line for line in spills)
    assert target.exists()


def test_the_parameter_block_is_checked_before_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Foreign:
        def __init__(self, _: str) -> None:
            for name in ("tokenspeed_mla_error", "tokenspeed_mla_plan", "tokenspeed_mla_decode"):
                setattr(self, name, lambda: None)
            self.tokenspeed_mla_params_bytes = lambda: ctypes.sizeof(DecodeParams) + 8

    monkeypatch.setattr(ctypes, "CDLL", Foreign)
    with pytest.raises(RuntimeError, match=r"DecodeParams has .* bytes there and .* here; rebuild the library"):
        MlaLibrary("foreign.so")


def test_a_missing_compiler_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    reason = library.unavailable_reason()
    assert reason is not None
    assert reason.endswith("nvcc was found neither under $CUDA_HOME nor on PATH")
    library.library_path().touch()
    assert library.unavailable_reason() is None


def test_a_failing_compiler_is_quoted_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho no such architecture >&2\nexit 3\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(library.LibraryUnavailableError, match="status 3:\nno such architecture"):
        library.build(tmp_path / "out" / "library.so")
    assert list((tmp_path / "out").iterdir()) == []
