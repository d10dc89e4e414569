# SPDX-License-Identifier: Apache-2.0
"""What the warps of a prefill block share while the kernel is traced: operands, memory, and the tile of the block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import cutlass
from cutlass import BFloat16, Float32, cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from tokenspeed_plugin.kernels.mla.sm100.layout import ALIGNMENT_BYTES
from tokenspeed_plugin.kernels.mla.sm100.memory import BlockMemory
from tokenspeed_plugin.kernels.mla.sm100.prefill.arithmetic import tiles_upto, visible_tokens
from tokenspeed_plugin.kernels.mla.sm100.prefill.layout import (
    BLOCK_DIMS,
    KEY_DIMS,
    KV_TILE,
    QUERY_TILE,
    VALUE_DIMS,
    PrefillLayout,
)


@dataclass(frozen=True)
class PrefillVariant:
    """What a prefill kernel is compiled for.

    Attributes:
        causal: a query token sees what comes before it in its request; else all of it.
        layout: shared and tensor memory.
    """

    causal: bool = True
    layout: PrefillLayout = field(default_factory=PrefillLayout)

    def _mma(self, n: int, b_major: Any) -> Any:
        return cute.make_tiled_mma(
            tcgen05.MmaF16BF16Op(
                BFloat16,
                Float32,
                (QUERY_TILE, n, 16),
                tcgen05.CtaGroup.ONE,
                tcgen05.OperandSource.SMEM,
                OperandMajorMode.K,
                b_major,
            )
        )

    @property
    def scores_mma(self) -> Any:
        """Q K^T, a new one each time: to set its fields changes it."""
        return self._mma(KV_TILE, OperandMajorMode.K)

    @property
    def values_mma(self) -> Any:
        """P V, likewise."""
        return self._mma(VALUE_DIMS, OperandMajorMode.MN)

    @staticmethod
    def _operand(major: str, shape: Any, stages: int, order: Any = None) -> Any:
        atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind[f"{major}_SW128"], BFloat16)
        return tcgen05.tile_to_mma_shape(atom, cute.append(shape, stages), order=order)

    def queries(self) -> Any:
        """A of the scores: [128 rows x 192 dims]."""
        return self._operand("K", self.scores_mma.partition_shape_A((QUERY_TILE, KEY_DIMS)), 1)

    def keys(self) -> Any:
        """B of the scores: slots [128 tokens x 64 dims]."""
        return self._operand("K", self.scores_mma.partition_shape_B((KV_TILE, BLOCK_DIMS)), self.layout.key_slots)

    def probabilities(self) -> Any:
        """A of the output: [128 rows x 128 tokens]."""
        return self._operand("K", self.values_mma.partition_shape_A((QUERY_TILE, KV_TILE)), 1)

    def values(self) -> Any:
        """B of the output: slots [128 dims x 128 tokens], tokens before blocks of dims, as the bulk copies lay them."""
        shape = self.values_mma.partition_shape_B((VALUE_DIMS, KV_TILE))
        return self._operand("MN", shape, self.layout.value_slots, order=(1, 0, 2))

    @staticmethod
    def box() -> Any:
        """One bulk copy's box: [128 tokens][64 dims]."""
        atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, BFloat16)
        return cute.tile_to_shape(atom, (KV_TILE, BLOCK_DIMS), (0, 1))

    @staticmethod
    def boxes(count: int) -> Any:
        """Boxes behind each other: ((token, dim), box)."""
        return cute.make_layout(((KV_TILE, BLOCK_DIMS), count), stride=((BLOCK_DIMS, 1), KV_TILE * BLOCK_DIMS))


@dataclass(frozen=True)
class PrefillArguments:
    """Tensors and numbers of a launch; see `PrefillKernel`."""

    q: Any
    q_map: Any
    k: Any
    k_map: Any
    v: Any
    v_map: Any
    out: Any
    lse: Any
    query_starts: Any
    kv_starts: Any
    scale_log2: Any


@dataclass(frozen=True)
class PrefillBlock(BlockMemory):
    """The running block: one tile of query tokens of one head of one request."""

    variant: PrefillVariant
    arguments: PrefillArguments
    base: Any
    head: Any
    query_start: Any
    query_tokens: Any
    first_row: Any
    kv_start: Any
    kv_tokens: Any
    tiles: Any

    @classmethod
    def running(cls, variant: PrefillVariant, arguments: PrefillArguments) -> PrefillBlock:
        """The block that the kernel's code is traced for; late rows have the longest spans, so they come first."""
        column, head, request = cute.arch.block_idx()
        columns, _, _ = cute.arch.grid_dim()
        first_row = (columns - 1 - column) * QUERY_TILE
        query_start, kv_start = arguments.query_starts[request], arguments.kv_starts[request]
        query_tokens = arguments.query_starts[request + 1] - query_start
        kv_tokens = arguments.kv_starts[request + 1] - kv_start
        last_row = cutlass.min(first_row + QUERY_TILE, query_tokens) - 1
        seen = cutlass.max(visible_tokens(last_row, query_tokens, kv_tokens, variant.causal), 0)
        tiles = cutlass.select_(first_row < query_tokens, tiles_upto(seen), cutlass.Int32(0))
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=ALIGNMENT_BYTES)
        return cls(variant, arguments, base, head, query_start, query_tokens, first_row, kv_start, kv_tokens, tiles)

    @property
    def layout(self) -> PrefillLayout:
        """Shared and tensor memory."""
        return self.variant.layout

    @property
    def element(self) -> Any:
        """The type of the operands."""
        return BFloat16

    def scores(self, first: Any, buffer: Any) -> Any:
        """A score buffer: [128 rows x 128 tokens]."""
        mma = self.variant.scores_mma
        fragment = mma.make_fragment_C(mma.partition_shape_C((QUERY_TILE, KV_TILE)))
        return cute.make_tensor(first + cute.assume(buffer * KV_TILE, divby=KV_TILE), fragment.layout)

    def output(self, first: Any) -> Any:
        """The output: [128 rows x 128 dims]."""
        mma = self.variant.values_mma
        fragment = mma.make_fragment_C(mma.partition_shape_C((QUERY_TILE, VALUE_DIMS)))
        return cute.make_tensor(first + self.layout.output_column, fragment.layout)
