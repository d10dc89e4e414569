# SPDX-License-Identifier: Apache-2.0
"""What MLA should take on a B200, by arithmetic: nothing here was measured.

A block's time is the longest of what it waits for; see `Estimate`. Launches, the plan, and the way of the first
byte are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenspeed_plugin.kernels.mla.geometry import HEAD_DIMS, LATENT_DIMS, TILE_TOKENS, RowTiles
from tokenspeed_plugin.kernels.mla.sm100.layout import ELEMENT_BYTES, ROW_COUNTS
from tokenspeed_plugin.kernels.mla.sm100.prefill.arithmetic import tiles_upto, visible_tokens
from tokenspeed_plugin.kernels.mla.sm100.prefill.layout import KEY_DIMS, KV_TILE, QUERY_TILE, VALUE_DIMS
from tokenspeed_plugin.kernels.mla.split import SplitPlan


@dataclass(frozen=True)
class Chip:
    """A GPU by its data sheet.

    Attributes:
        multiprocessors: of the GPU.
        memory_bytes_per_us: bandwidth of its memory.
        clock_per_us: clock of the tensor cores.
        bf16_flops_per_clock: dense, fp32 sums, of one multiprocessor; FP8 does twice as many.
        exponentials_per_clock: of one multiprocessor.
        shared_bytes_per_clock: what the tensor cores read from shared memory, per multiprocessor.
    """

    multiprocessors: int
    memory_bytes_per_us: float
    clock_per_us: float
    bf16_flops_per_clock: int
    exponentials_per_clock: int
    shared_bytes_per_clock: int


B200 = Chip(
    # Multiprocessors and memory (7680 bits x 3996 MHz x 2): as the device itself reports them, pytorch/ao pull request 4002.
    multiprocessors=148,
    memory_bytes_per_us=7.672e6,
    # 2.25 PFLOP/s dense bf16 (NVIDIA, HGX B200) over 148 multiprocessors at 8192 FLOP per clock.
    clock_per_us=1856.0,
    bf16_flops_per_clock=8192,
    # CUDA programming guide, arithmetic throughput of compute capability 10.0: special functions per clock.
    exponentials_per_clock=16,
    # Assumed as on Hopper: one 128-byte line of shared memory per clock.
    shared_bytes_per_clock=128,
)


@dataclass(frozen=True)
class Estimate:
    """Microseconds that the busiest block, or the memory of the whole GPU, needs for each kind of work."""

    memory_us: float
    tensor_cores_us: float
    exponentials_us: float

    @property
    def expected_us(self) -> float:
        """The longest of them: they overlap."""
        return max(self.memory_us, self.tensor_cores_us, self.exponentials_us)

    @property
    def bound(self) -> str:
        """What takes longest."""
        times = {
            "memory": self.memory_us,
            "tensor cores": self.tensor_cores_us,
            "exponentials": self.exponentials_us,
        }
        return max(times, key=times.__getitem__)


def estimate_decode(shape: Mapping[str, int], element: str = "bfloat16", chip: Chip = B200) -> Estimate:
    """The model of one call.

    Args:
        shape: `heads`, `query_tokens`, `requests`, `context_tokens`, as in `decode_shape`.
        element: type of the cache.
        chip: the GPU.
    """
    tiles = RowTiles.fold(shape["heads"], shape["query_tokens"], ROW_COUNTS)
    plan = SplitPlan.of([shape["context_tokens"]] * shape["requests"], tiles.groups(chip.multiprocessors))
    # More row tiles than multiprocessors run one after the other.
    rounds = -(-tiles.row_tiles * len(plan.spans) // chip.multiprocessors)
    busiest = rounds * max(span.tiles for span in plan.spans)
    return Estimate(
        memory_us=memory_bytes(shape, element, tiles, plan) / chip.memory_bytes_per_us,
        tensor_cores_us=busiest * tensor_clocks(tiles.rows, element, chip) / chip.clock_per_us,
        exponentials_us=busiest * tiles.rows * TILE_TOKENS / chip.exponentials_per_clock / chip.clock_per_us,
    )


def memory_bytes(shape: Mapping[str, int], element: str, tiles: RowTiles, plan: SplitPlan) -> int:
    """Bytes of a call: KV once (other row tiles find it in the L2), queries, output, and parts written and read."""
    size, rows = ELEMENT_BYTES[element], shape["requests"] * shape["query_tokens"] * shape["heads"]
    kv = shape["requests"] * shape["context_tokens"] * HEAD_DIMS * size
    parts = sum(last - first + 1 for first, last in zip(plan.first_group, plan.last_group, strict=True) if last > first)
    part_bytes = tiles.row_tiles * tiles.rows * (LATENT_DIMS * (2 if tiles.rows == ROW_COUNTS[-1] else 4) + 4)
    return kv + rows * (HEAD_DIMS * size + LATENT_DIMS * 2 + 4) + 2 * parts * part_bytes


def tensor_clocks(rows: int, element: str, chip: Chip) -> float:
    """Clocks of the products of one tile: arithmetic, or reading both operands from shared memory, what takes longer.

    The scores have 64 tokens on the M side and run at half the rate of 128.
    """
    size = ELEMENT_BYTES[element]
    rate = chip.bf16_flops_per_clock * 2 // size
    scores = (
        2 * TILE_TOKENS * HEAD_DIMS * rows / (rate / 2),
        (TILE_TOKENS + rows) * HEAD_DIMS * size / chip.shared_bytes_per_clock,
    )
    values = (
        2 * TILE_TOKENS * LATENT_DIMS * rows / rate,
        (LATENT_DIMS + LATENT_DIMS // 128 * rows) * TILE_TOKENS * size / chip.shared_bytes_per_clock,
    )
    return max(scores) + max(values)


def estimate_prefill(
    lengths: Sequence[tuple[int, int]], heads: int, causal: bool = True, chip: Chip = B200
) -> Estimate:
    """The model of one call of the prefill kernel in bf16.

    Args:
        lengths: query and KV tokens of each request.
        heads: of queries, keys and values.
        causal: whether a query token sees only what comes before it.
        chip: the GPU.
    """
    spans = [
        tiles_upto(max(visible_tokens(min(first + QUERY_TILE, rows) - 1, rows, tokens, causal), 0))
        for rows, tokens in lengths
        for first in range(0, rows, QUERY_TILE)
    ]
    # Blocks are handed out longest first: the busiest multiprocessor has its share, or the longest block.
    busiest = max(sum(spans) * heads / chip.multiprocessors, *spans)
    tile = QUERY_TILE * KV_TILE
    products = max(
        2 * tile * (KEY_DIMS + VALUE_DIMS) / chip.bf16_flops_per_clock,
        (QUERY_TILE + KV_TILE) * (KEY_DIMS + VALUE_DIMS) * 2 / chip.shared_bytes_per_clock,
    )
    rows, tokens = (sum(column) for column in zip(*lengths, strict=True))
    moved = (rows + tokens) * heads * (KEY_DIMS + VALUE_DIMS) * 2
    return Estimate(
        memory_us=moved / chip.memory_bytes_per_us,
        tensor_cores_us=busiest * products / chip.clock_per_us,
        exponentials_us=busiest * tile / chip.exponentials_per_clock / chip.clock_per_us,
    )
