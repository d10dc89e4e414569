# SPDX-License-Identifier: Apache-2.0
"""The products, and where their operands lie in shared memory. All of it is known when a kernel is compiled.

Layouts count elements; a swizzle moves 16-byte units within each 8 rows of 128 bytes, as the bulk copies and the tensor
cores both apply it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import BFloat16, Float8E4M3FN, Float32, cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from tokenspeed_plugin.kernels.mla.geometry import LATENT_DIMS, ROPE_DIMS, TILE_TOKENS, RowTiles
from tokenspeed_plugin.kernels.mla.sm100.layout import SLOT_DIMS, SWIZZLE_ROW_BYTES, DecodeLayout

ELEMENT_TYPES = {"bfloat16": BFloat16, "float8_e4m3fn": Float8E4M3FN}
STEP_BYTES = 32
"""Bytes of an operand along the summed dimension that one instruction takes."""
_SWIZZLES = {16: "INTER", 32: "SW32", 64: "SW64", 128: "SW128"}


@dataclass(frozen=True)
class DecodeVariant:
    """What a decode kernel is compiled for.

    Attributes:
        num_heads: query heads on this GPU.
        max_query_tokens: query tokens of a request, at most.
        box_tokens: tokens of a page that one bulk copy moves: the page's, at most 64.
        tiles: how the query rows fold.
        layout: shared and tensor memory.
    """

    num_heads: int
    max_query_tokens: int
    box_tokens: int
    tiles: RowTiles
    layout: DecodeLayout

    @property
    def element(self) -> Any:
        """The cache's type for the compiler."""
        return ELEMENT_TYPES[self.layout.element]

    @property
    def rope_row_bytes(self) -> int:
        """Bytes of the rope dims of one token: one swizzled row."""
        return ROPE_DIMS * self.layout.element_bytes

    @property
    def scores_mma(self) -> Any:
        """K Q^T, a new one each time: to set its fields changes it, and must not reach other branches."""
        return self._mma(TILE_TOKENS, OperandMajorMode.K)

    @property
    def values_mma(self) -> Any:
        """V^T P^T, likewise."""
        return self._mma(SLOT_DIMS, OperandMajorMode.MN)

    def _mma(self, m: int, major: Any) -> Any:
        shape, one = (m, self.layout.rows, STEP_BYTES // self.layout.element_bytes), tcgen05.CtaGroup.ONE
        element, shared = self.element, tcgen05.OperandSource.SMEM
        if self.layout.element == "bfloat16":
            operation = tcgen05.MmaF16BF16Op(element, Float32, shape, one, shared, major, major)
        else:
            operation = tcgen05.MmaF8F6F4Op(element, element, Float32, shape, one, shared, major, major)
        return cute.make_tiled_mma(operation)

    def _operand(self, row_bytes: int, major: str, shape: Any, stages: int, order: Any = None) -> Any:
        kind = tcgen05.SmemLayoutAtomKind[f"{major}_{_SWIZZLES[row_bytes]}"]
        atom = tcgen05.make_smem_layout_atom(kind, self.element)
        return tcgen05.tile_to_mma_shape(atom, cute.append(shape, stages), order=order)

    def latent_keys(self) -> Any:
        """A of the scores: latent slots [64 tokens x 128 dims]."""
        shape = self.scores_mma.partition_shape_A((TILE_TOKENS, SLOT_DIMS))
        return self._operand(SWIZZLE_ROW_BYTES, "K", shape, self.layout.latent_slots)

    def rope_keys(self) -> Any:
        """A of the scores: rope slots [64 tokens x 64 dims]."""
        shape = self.scores_mma.partition_shape_A((TILE_TOKENS, ROPE_DIMS))
        return self._operand(self.rope_row_bytes, "K", shape, self.layout.rope_slots)

    def latent_queries(self) -> Any:
        """B of the scores: [rows x 512 latent dims]."""
        shape = self.scores_mma.partition_shape_B((self.layout.rows, LATENT_DIMS))
        return self._operand(SWIZZLE_ROW_BYTES, "K", shape, 1)

    def rope_queries(self) -> Any:
        """B of the scores: [rows x 64 rope dims]."""
        shape = self.scores_mma.partition_shape_B((self.layout.rows, ROPE_DIMS))
        return self._operand(self.rope_row_bytes, "K", shape, 1)

    def values(self) -> Any:
        """A of the output: the latent slots again, [128 dims x 64 tokens]."""
        shape = self.values_mma.partition_shape_A((SLOT_DIMS, TILE_TOKENS))
        # Tokens before blocks of dims: as the bulk copies lay them.
        return self._operand(SWIZZLE_ROW_BYTES, "MN", shape, self.layout.latent_slots, order=(1, 0, 2))

    def probabilities(self) -> Any:
        """B of the output: [rows x 64 tokens]."""
        shape = self.values_mma.partition_shape_B((self.layout.rows, TILE_TOKENS))
        return self._operand(self.layout.rows * self.layout.element_bytes, "MN", shape, 1)

    def box(self, dims: int) -> Any:
        """One bulk copy's box: [tokens][dims], rows of at most 128 bytes."""
        kind = tcgen05.SmemLayoutAtomKind[f"K_{_SWIZZLES[dims * self.layout.element_bytes]}"]
        atom = tcgen05.make_smem_layout_atom(kind, self.element)
        return cute.tile_to_shape(atom, (self.box_tokens, dims), (0, 1))

    def boxes(self, dims: int, slot_dims: int, slots: int) -> Any:
        """All boxes of a ring: ((token, dim), box of the tile, block of dims, slot)."""
        return cute.make_layout(
            ((self.box_tokens, dims), TILE_TOKENS // self.box_tokens, slot_dims // dims, slots),
            stride=((dims, 1), self.box_tokens * dims, TILE_TOKENS * dims, TILE_TOKENS * slot_dims),
        )
