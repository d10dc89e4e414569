# SPDX-License-Identifier: Apache-2.0
"""Where the Blackwell decode kernel keeps what: shared-memory bytes and tensor-memory columns, from the tile sizes.

No tool reports either, and a kernel that asks for too much compiles. So the kernel takes every offset from here, and
nothing is compiled from a layout that does not fit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import accumulate

from tokenspeed_plugin.kernels.mla.geometry import HEAD_DIMS, LATENT_DIMS, ROPE_DIMS, TILE_TOKENS

SHARED_LIMIT_BYTES = 232_448
"""Dynamic shared memory of one block on sm_100: 227 KiB."""
TENSOR_COLUMNS = 512
"""Columns of tensor memory of one multiprocessor, 128 lanes of 32 bits each."""
MIN_TENSOR_COLUMNS = 32
SLOT_DIMS = 128
"""Latent dims of a ring slot: the M side of one product of the values."""
LATENT_SLOTS_OF_TILE = LATENT_DIMS // SLOT_DIMS
SWIZZLE_ROW_BYTES = 128
ROW_COUNTS = (16, 32, 64)
"""Row tiles for which the kernel is compiled."""
ELEMENT_BYTES = {"bfloat16": 2, "float8_e4m3fn": 1}
SOFTMAX_WARPS = 4
BARRIER_BYTES = 8
ALIGNMENT_BYTES = 1024
"""A 128-byte swizzle repeats every 1024 bytes."""


class LayoutError(ValueError):
    """A layout that does not fit the chip; the message names what is over, by how much, and its parts."""


class BlockLayout(ABC):
    """A block's shared memory: parts one behind the other, the barriers among them in their own order."""

    @property
    @abstractmethod
    def barrier_counts(self) -> dict[str, int]:
        """Barriers by what they announce, in the order in which they lie."""

    @abstractmethod
    def parts(self) -> dict[str, int]:
        """Bytes of shared memory by what they hold, in the order in which they lie."""

    def offset(self, part: str) -> int:
        """Byte at which a part begins."""
        parts = self.parts()
        return dict(zip(parts, accumulate(parts.values(), initial=0), strict=False))[part]

    def barrier_offset(self, name: str) -> int:
        """Byte at which the barriers of a name begin."""
        names = list(self.barrier_counts)
        before = sum(self.barrier_counts[other] for other in names[: names.index(name)])
        return self.offset("barriers") + before * BARRIER_BYTES


@dataclass(frozen=True)
class DecodeLayout(BlockLayout):
    """Shared and tensor memory of one block.

    Attributes:
        rows: folded query rows, the N side of both products.
        element: type of the cache, the queries and the probabilities.
        latent_slots: ring slots of 64 tokens x 128 latent dims.
        rope_slots: ring slots of 64 tokens x 64 rope dims.
        shared_bytes: dynamic shared memory that the launch asks for.
        tensor_columns: columns that the kernel allocates.
        score_buffers: score tiles in tensor memory, so that products of one tile run beside the softmax of another.
    """

    rows: int
    element: str
    latent_slots: int
    rope_slots: int
    shared_bytes: int
    tensor_columns: int
    score_buffers: int = 2

    @classmethod
    def fitted(cls, rows: int, element: str) -> DecodeLayout:
        """The layout with the deepest rings that fit.

        Raises:
            LayoutError: a row count or an element type that the kernel does not have.
        """
        if rows not in ROW_COUNTS or element not in ELEMENT_BYTES:
            raise LayoutError(
                f"rows={rows}, element={element}, allowed: rows {ROW_COUNTS}, elements {tuple(ELEMENT_BYTES)}"
            )
        best = None
        for latent_slots in range(2 * LATENT_SLOTS_OF_TILE, 8 * LATENT_SLOTS_OF_TILE):
            # A rope slot is given back before the latents of its tile: whole tiles in flight need one each, and one waits.
            deeper = cls._exact(rows, element, latent_slots, latent_slots // LATENT_SLOTS_OF_TILE)
            if deeper.shared_bytes <= SHARED_LIMIT_BYTES:
                best = deeper
        if best is None:
            raise LayoutError(f"rows={rows}, element={element}: two tiles do not fit")
        return best.checked()

    @classmethod
    def _exact(cls, rows: int, element: str, latent_slots: int, rope_slots: int) -> DecodeLayout:
        draft = cls(rows, element, latent_slots, rope_slots, 0, 0)
        columns = MIN_TENSOR_COLUMNS
        while columns < draft.used_columns:
            columns *= 2
        return cls(rows, element, latent_slots, rope_slots, draft.used_bytes, columns)

    @property
    def element_bytes(self) -> int:
        """Bytes of a cache element."""
        return ELEMENT_BYTES[self.element]

    @property
    def block_dims(self) -> int:
        """Latent dims of one swizzled row of 128 bytes."""
        return SWIZZLE_ROW_BYTES // self.element_bytes

    @property
    def latent_slot_bytes(self) -> int:
        """Bytes of a latent ring slot."""
        return TILE_TOKENS * SLOT_DIMS * self.element_bytes

    @property
    def rope_slot_bytes(self) -> int:
        """Bytes of a rope ring slot."""
        return TILE_TOKENS * ROPE_DIMS * self.element_bytes

    @property
    def barrier_counts(self) -> dict[str, int]:
        """Barriers by what they announce, in the order in which they lie."""
        return {
            "latent full": self.latent_slots,
            "latent empty": self.latent_slots,
            "rope full": self.rope_slots,
            "rope empty": self.rope_slots,
            "query full": 1,
            "query empty": 1,
            "scores full": self.score_buffers,
            "probabilities full": 1,
            "values done": 1,
        }

    def parts(self) -> dict[str, int]:
        """Bytes of shared memory by what they hold, in the order in which they lie."""
        sizes = {
            "query": self.rows * HEAD_DIMS * self.element_bytes,
            "latent ring": self.latent_slots * self.latent_slot_bytes,
            "rope ring": self.rope_slots * self.rope_slot_bytes,
            "probabilities": self.rows * TILE_TOKENS * self.element_bytes,
            "row maxima": self.score_buffers * self.rows * SOFTMAX_WARPS * 4,
            "row factors": self.rows * 4,
            "barriers": sum(self.barrier_counts.values()) * BARRIER_BYTES,
            "tensor-memory address": 16,
        }
        swizzled = ("query", "latent ring", "rope ring", "probabilities")
        return {name: aligned(size, ALIGNMENT_BYTES if name in swizzled else 16) for name, size in sizes.items()}

    @property
    def used_bytes(self) -> int:
        """Bytes of shared memory that the parts take."""
        return sum(self.parts().values())

    @property
    def used_columns(self) -> int:
        """Columns of tensor memory that scores and output take."""
        return self.output_column + LATENT_SLOTS_OF_TILE * self.rows

    @property
    def output_column(self) -> int:
        """First column of the output: [128 dims of a slot][rows], slot after slot; the score buffers lie before it."""
        return self.score_buffers * self.rows

    def checked(self) -> DecodeLayout:
        """This layout, if it fits.

        Raises:
            LayoutError: something is over.
        """
        columns = {"scores": self.output_column, "output": LATENT_SLOTS_OF_TILE * self.rows}
        check_memory(self.parts(), self.shared_bytes, columns, self.tensor_columns)
        if self.latent_slots < 2 * LATENT_SLOTS_OF_TILE or self.rope_slots < 2:
            raise LayoutError(
                f"rings: {self.latent_slots} latent and {self.rope_slots} rope slots, at least "
                f"{2 * LATENT_SLOTS_OF_TILE} and 2: the scores of a tile run before the values of the one before it"
            )
        return self


def check_memory(parts: dict[str, int], shared_bytes: int, columns: dict[str, int], tensor_columns: int) -> None:
    """Hold what a block uses against what it asks for, and that against the chip.

    Args:
        parts: bytes of shared memory by what they hold.
        shared_bytes: what the launch asks for.
        columns: columns of tensor memory by what they hold.
        tensor_columns: what the kernel allocates.

    Raises:
        LayoutError: something is over.
    """
    used, listed = sum(parts.values()), ", ".join(f"{name} {size}" for name, size in parts.items())
    if used > shared_bytes:
        raise LayoutError(f"shared memory: {used} bytes used, {shared_bytes} asked for ({listed})")
    if shared_bytes > SHARED_LIMIT_BYTES:
        raise LayoutError(f"shared memory: {shared_bytes} bytes, at most {SHARED_LIMIT_BYTES} ({listed})")
    used, listed = sum(columns.values()), ", ".join(f"{name} {count}" for name, count in columns.items())
    if used > tensor_columns:
        raise LayoutError(f"tensor memory: {used} columns used, {tensor_columns} allocated ({listed})")
    power_of_two = tensor_columns & (tensor_columns - 1) == 0
    if not MIN_TENSOR_COLUMNS <= tensor_columns <= TENSOR_COLUMNS or not power_of_two:
        raise LayoutError(
            f"tensor memory: {tensor_columns} columns, allowed: a power of two from {MIN_TENSOR_COLUMNS} to "
            f"{TENSOR_COLUMNS} ({listed})"
        )


def aligned(size: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-size // unit) * unit
