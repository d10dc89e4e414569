# SPDX-License-Identifier: Apache-2.0
"""Shared memory and tensor memory of the prefill kernel; see `sm100.layout` for why this is computed here."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_plugin.kernels.mla.sm100.layout import (
    ALIGNMENT_BYTES,
    BARRIER_BYTES,
    BlockLayout,
    LayoutError,
    aligned,
    check_memory,
)

QUERY_TILE, KV_TILE = 128, 128
"""Tokens of a tile: the M side and the N side of the scores."""
KEY_DIMS, VALUE_DIMS = 192, 128
"""Dims of a head: 128 without position and 64 rope dims; of its values."""
BLOCK_DIMS = 64
"""Dims of one swizzled row of 128 bytes in bf16."""
KEY_SLOTS_OF_TILE = KEY_DIMS // BLOCK_DIMS
ELEMENT_BYTES = 2


@dataclass(frozen=True)
class PrefillLayout(BlockLayout):
    """Shared and tensor memory of one block.

    Attributes:
        key_slots: ring slots of 128 tokens x 64 key dims.
        value_slots: ring slots of 128 tokens x 128 value dims.
        shared_bytes: dynamic shared memory that the launch asks for.
        tensor_columns: columns that the kernel allocates.
        score_buffers: score tiles in tensor memory.
    """

    key_slots: int = 5
    value_slots: int = 2
    shared_bytes: int = 229_552
    tensor_columns: int = 512
    score_buffers: int = 2

    @property
    def barrier_counts(self) -> dict[str, int]:
        """Barriers by what they announce, in the order in which they lie."""
        return {
            "key full": self.key_slots,
            "key empty": self.key_slots,
            "value full": self.value_slots,
            "value empty": self.value_slots,
            "query full": 1,
            "scores full": self.score_buffers,
            "probabilities full": 1,
            "values done": 1,
        }

    def parts(self) -> dict[str, int]:
        """Bytes of shared memory by what they hold, in the order in which they lie."""
        swizzled = {
            "query": QUERY_TILE * KEY_DIMS * ELEMENT_BYTES,
            "key ring": self.key_slots * KV_TILE * BLOCK_DIMS * ELEMENT_BYTES,
            "value ring": self.value_slots * KV_TILE * VALUE_DIMS * ELEMENT_BYTES,
            "probabilities": QUERY_TILE * KV_TILE * ELEMENT_BYTES,
        }
        return {
            **{name: aligned(size, ALIGNMENT_BYTES) for name, size in swizzled.items()},
            "barriers": aligned(sum(self.barrier_counts.values()) * BARRIER_BYTES, 16),
            "tensor-memory address": 16,
        }

    @property
    def output_column(self) -> int:
        """First column of the output [128 rows][128 dims]; the score buffers [128 rows][128 tokens] lie before it."""
        return self.score_buffers * KV_TILE

    def checked(self) -> PrefillLayout:
        """This layout, if it fits.

        Raises:
            LayoutError: something is over.
        """
        columns = {"scores": self.output_column, "output": VALUE_DIMS}
        check_memory(self.parts(), self.shared_bytes, columns, self.tensor_columns)
        if self.key_slots < KEY_SLOTS_OF_TILE or self.value_slots < 2:
            raise LayoutError(
                f"rings: {self.key_slots} key and {self.value_slots} value slots, at least {KEY_SLOTS_OF_TILE} and 2"
            )
        return self
