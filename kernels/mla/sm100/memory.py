# SPDX-License-Identifier: Apache-2.0
"""What all Blackwell kernels of this folder do with a block's shared and tensor memory, and the device's mathematics."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass._mlir.dialects import nvvm

from tokenspeed_plugin.kernels.mla.sm100.layout import ALIGNMENT_BYTES, BARRIER_BYTES


class BlockMemory:
    """Shared memory by the offsets of a layout plan, and tensor memory by its columns.

    A subclass has `layout` (`offset`, `barrier_offset`, `tensor_columns`), `base` (where shared memory begins) and `element`.
    """

    layout: Any
    base: Any
    element: Any

    def pointer(self, dtype: Any, offset: Any, align: int) -> Any:
        """A pointer to a byte of shared memory, as a pointer to `dtype`."""
        return cute.make_ptr(dtype, (self.base + offset).toint(), cute.AddressSpace.smem, assumed_align=align)

    def barrier(self, name: str, index: Any = 0) -> Any:
        """One of the barriers of a name."""
        return self.pointer(Int64, self.layout.barrier_offset(name) + index * BARRIER_BYTES, BARRIER_BYTES)

    def operand(self, offset: int, layout: Any) -> Any:
        """Shared memory as a matrix operand."""
        pointer = cute.recast_ptr(self.pointer(self.element, offset, ALIGNMENT_BYTES), layout.inner, self.element)
        return cute.make_tensor(pointer, layout.outer)

    @property
    def _columns_address(self) -> Any:
        return self.pointer(Int32, self.layout.offset("tensor-memory address"), 16)

    def allocate_columns(self) -> None:
        """By the product warp; the address appears in shared memory."""
        cute.arch.alloc_tmem(self.layout.tensor_columns, self._columns_address)
        cute.arch.relinquish_tmem_alloc_permit()

    def columns(self) -> Any:
        """The first allocated column."""
        return cute.arch.retrieve_tmem_ptr(Float32, 16, self._columns_address)

    def free_columns(self, first: Any) -> None:
        """By the product warp, when nobody reads them any more."""
        cute.arch.dealloc_tmem(first, self.layout.tensor_columns)


class DeviceMath:
    """The mathematics of formulas.py on the device."""

    number = Float32
    maximum = staticmethod(cute.arch.fmax)
    select = staticmethod(cutlass.select_)

    @staticmethod
    def exp2(x: Any) -> Any:
        """Two to a power, by the special-function unit; two to -inf is 0."""
        return cute.math.exp2(x, fastmath=True)

    @staticmethod
    def log2(x: Any) -> Any:
        """Logarithm, by the special-function unit."""
        return cute.math.log2(x, fastmath=True)


def fence_before_barrier() -> None:
    """Orders this thread's tensor-memory accesses before what it announces next."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)


def fence_after_barrier() -> None:
    """Orders this thread's tensor-memory accesses behind what it has waited for."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)
