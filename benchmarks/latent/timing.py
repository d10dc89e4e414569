# SPDX-License-Identifier: Apache-2.0
"""Inputs that rotate over more KV than the L2 cache holds, and the sweep that only reads it."""

from __future__ import annotations

import ctypes
import math
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.latent.cells import Cell
from tokenspeed_plugin.kernels.graph_timing import GRAPH_CALLS, time_us
from tokenspeed_plugin.kernels.mla.geometry import HEAD_DIMS
from tokenspeed_plugin.kernels.nvcc import LibraryUnavailableError, find_nvcc

L2_MULTIPLE = 4


class Inputs:
    """Random inputs of a cell: enough KV that `rotations` calls read at least L2_MULTIPLE times the L2 cache.

    Queries have the type of `pool`, from which the KV cache is taken.
    """

    def __init__(self, cell: Cell, page_tokens: int, pool: torch.Tensor) -> None:
        device = pool.device
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        elements = cell.requests * cell.context_tokens * HEAD_DIMS
        self.kv_bytes = elements * pool.element_size()
        fitting = pool.numel() // elements
        wanted = math.ceil(L2_MULTIPLE * l2_bytes / self.kv_bytes) + 1
        if fitting < 2:
            raise ValueError(f"{cell}: the pool of {pool.nbytes} bytes holds {fitting} copies, at least 2 are needed")
        self.cell, self.page_tokens = cell, page_tokens
        self.rotations = max(2, min(wanted, fitting, GRAPH_CALLS))
        pages = cell.context_tokens // page_tokens
        total = cell.requests * pages
        self.kv_cache = pool[: self.rotations * total * page_tokens * HEAD_DIMS].view(-1, page_tokens, HEAD_DIMS)
        self.block_tables = [
            (torch.randperm(total, device=device, dtype=torch.int32) + i * total).view(cell.requests, pages)
            for i in range(self.rotations)
        ]
        tokens = cell.requests * cell.query_tokens
        self.q = torch.randn(tokens, cell.heads, HEAD_DIMS, device=device).to(pool.dtype)
        self.seq_lens = torch.full((cell.requests,), cell.context_tokens, device=device, dtype=torch.int32)
        self.query_starts = torch.arange(cell.requests + 1, device=device, dtype=torch.int32) * cell.query_tokens
        self.scale = HEAD_DIMS**-0.5

    def part(self, call: int) -> int:
        """Which part of the KV cache the call reads."""
        return call % self.rotations


def copy_bytes_per_s(pool: torch.Tensor) -> float:
    """Device-to-device copy within `pool`, bytes read plus bytes written per second, the median of ten."""
    half = pool.numel() // 2
    samples = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.add(pool[half : 2 * half], 0, out=pool[:half])
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 1e-3)
    return 2 * half * pool.element_size() / statistics.median(samples)


class Sweep:
    """Reads bytes and keeps nothing: the bandwidth that a kernel can hope for.

    Raises:
        LibraryUnavailableError: there is no nvcc.
    """

    def __init__(self) -> None:
        nvcc = find_nvcc()
        if nvcc is None:
            raise LibraryUnavailableError("the read-only sweep needs nvcc")
        self._folder = tempfile.TemporaryDirectory()
        target = Path(self._folder.name) / "sweep.so"
        source = Path(__file__).with_name("sweep.cu")
        flags = ("-O3", "-gencode=arch=compute_90a,code=sm_90a", "-Xcompiler=-fPIC", "-shared")
        subprocess.run([nvcc, *flags, "-o", str(target), str(source)], check=True)
        self._library = ctypes.CDLL(str(target))
        self._library.read_sweep.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_void_p,
        ]

    def time_us(self, inputs: Inputs, replays: int, settle_us: float) -> float:
        """The best over three grid sizes, over the same bytes by the same rotation."""
        num_bytes = inputs.kv_bytes
        base = inputs.kv_cache.data_ptr()
        sink = torch.zeros(1, dtype=torch.int32, device=inputs.kv_cache.device)
        readers = (self._reader(inputs, base, num_bytes, sink, blocks) for blocks in (132, 264, 528))
        return min(time_us(reader, replays, settle_us) for reader in readers)

    def _reader(
        self, inputs: Inputs, base: int, num_bytes: int, sink: torch.Tensor, blocks: int
    ) -> Callable[[int], None]:
        def read(call: int) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            address = base + inputs.part(call) * num_bytes
            status = self._library.read_sweep(address, num_bytes // 16, sink.data_ptr(), blocks, stream)
            if status != 0:
                raise RuntimeError(f"read-only sweep: CUDA error {status}")

        return read
