# SPDX-License-Identifier: Apache-2.0
"""What the warps of a decode block share while the kernel is traced: its arguments, its memory and its place in the grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, cute

from tokenspeed_plugin.kernels.mla.geometry import LATENT_DIMS, TILE_TOKENS, RowTiles
from tokenspeed_plugin.kernels.mla.sm100.arithmetic import plan_offset
from tokenspeed_plugin.kernels.mla.sm100.layout import ALIGNMENT_BYTES, ROW_COUNTS, SLOT_DIMS, DecodeLayout
from tokenspeed_plugin.kernels.mla.sm100.memory import BlockMemory
from tokenspeed_plugin.kernels.mla.sm100.operands import DecodeVariant

SOFTMAX_THREADS, WARPS = 128, 8
KV_WARP, QUERY_WARP, PRODUCT_WARP = 4, 5, 6
"""Warps 0 to 3 do softmax, rescaling and output; warp 7 only fills the block to two warpgroups."""


@dataclass(frozen=True)
class Arguments:
    """Tensors and numbers of a launch; see `DecodeKernel`."""

    q_nope: Any
    q_rope: Any
    out: Any
    lse: Any
    block_table: Any
    seq_lens: Any
    query_starts: Any
    plan: Any
    partial_out: Any
    partial_lse: Any
    latents: Any
    latents_map: Any
    ropes: Any
    ropes_map: Any
    scale_log2: Any
    output_scale: Any
    num_requests: Any
    num_tokens: Any
    page_shift: Any
    groups: Any

    def planned(self, word: str, index: Any) -> Any:
        """A word of the split plan."""
        return self.plan[plan_offset(word, self.groups, self.num_requests) + index]


@dataclass(frozen=True)
class Block(BlockMemory):
    """Shared memory, barriers and matrix operands of the running block, and which rows it has.

    The compiler takes frozen objects for what they are: the same in all branches.
    """

    variant: DecodeVariant
    arguments: Arguments
    base: Any
    group: Any
    row_tile: Any
    first_head: Any
    first_token: Any

    @classmethod
    def running(cls, variant: DecodeVariant, arguments: Arguments) -> Block:
        """The block that the kernel's code is traced for."""
        tiles = variant.tiles
        group, head_tile, token_tile = cute.arch.block_idx()
        return cls(
            variant,
            arguments,
            cute.arch.get_dyn_smem(cutlass.Uint8, alignment=ALIGNMENT_BYTES),
            group,
            token_tile * tiles.head_tiles + head_tile,
            head_tile * tiles.heads,
            token_tile * tiles.query_tokens,
        )

    @property
    def layout(self) -> DecodeLayout:
        """Shared and tensor memory."""
        return self.variant.layout

    @property
    def element(self) -> Any:
        """The type of the operands."""
        return self.variant.element

    @property
    def tiles(self) -> RowTiles:
        """How the query rows fold."""
        return self.variant.tiles

    def floats(self, part: str) -> Any:
        """A part of shared memory as fp32."""
        size = self.layout.parts()[part] // 4
        pointer = self.pointer(Float32, self.layout.offset(part), 16)
        return cute.make_tensor(pointer, cute.make_layout(size))

    def keys(self) -> tuple[Any, Any]:
        """A operands of the scores: latent and rope slots."""
        variant, mma = self.variant, self.variant.scores_mma
        latents = self.operand(self.layout.offset("latent ring"), variant.latent_keys())
        ropes = self.operand(self.layout.offset("rope ring"), variant.rope_keys())
        return mma.make_fragment_A(latents), mma.make_fragment_A(ropes)

    def queries(self) -> tuple[Any, Any]:
        """B operands of the scores: latent and rope dims."""
        variant, layout, mma = self.variant, self.layout, self.variant.scores_mma
        start = layout.offset("query")
        latents = self.operand(start, variant.latent_queries())
        ropes = self.operand(start + layout.rows * LATENT_DIMS * layout.element_bytes, variant.rope_queries())
        return mma.make_fragment_B(latents), mma.make_fragment_B(ropes)

    def values(self) -> Any:
        """A operand of the output: the latent slots again."""
        latents = self.operand(self.layout.offset("latent ring"), self.variant.values())
        return self.variant.values_mma.make_fragment_A(latents)

    def probabilities(self) -> Any:
        """B operand of the output."""
        operand = self.operand(self.layout.offset("probabilities"), self.variant.probabilities())
        return self.variant.values_mma.make_fragment_B(operand)

    def scores(self, first: Any, buffer: Any) -> Any:
        """A score buffer: [64 tokens x rows]."""
        shape = self.variant.scores_mma.partition_shape_C((TILE_TOKENS, self.layout.rows))
        fragment = self.variant.scores_mma.make_fragment_C(shape)
        return cute.make_tensor(first + self._column(buffer * self.layout.rows), fragment.layout)

    def output(self, first: Any, slot: Any) -> Any:
        """The output of the dims of one latent slot: [128 dims x rows]."""
        fragment = self.variant.values_mma.make_fragment_C(
            self.variant.values_mma.partition_shape_C((SLOT_DIMS, self.layout.rows))
        )
        column = self.layout.output_column + slot * self.layout.rows
        return cute.make_tensor(first + self._column(column), fragment.layout)

    @staticmethod
    def _column(column: Any) -> Any:
        """A multiple of the smallest row count: the loads demand to know that it is even."""
        return column if isinstance(column, int) else cute.assume(column, divby=ROW_COUNTS[0])
