# SPDX-License-Identifier: Apache-2.0
"""The layout plan of the Blackwell kernel: it fits, and whatever does not is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tokenspeed_plugin.kernels.mla.sm100.layout import (
    ELEMENT_BYTES,
    ROW_COUNTS,
    SHARED_LIMIT_BYTES,
    DecodeLayout,
    LayoutError,
)

ALL = [(rows, element) for rows in ROW_COUNTS for element in ELEMENT_BYTES]


@pytest.mark.parametrize(("rows", "element"), ALL)
def test_every_layout_fits_and_one_slot_more_does_not(rows: int, element: str) -> None:
    layout = DecodeLayout.fitted(rows, element)
    assert layout.checked() is layout
    assert layout.used_bytes == layout.shared_bytes <= SHARED_LIMIT_BYTES
    deeper = replace(layout, latent_slots=layout.latent_slots + 1)
    with pytest.raises(LayoutError, match=rf"shared memory: \d+ bytes used, {layout.shared_bytes} asked for"):
        deeper.checked()
    with pytest.raises(LayoutError, match=rf"shared memory: \d+ bytes, at most {SHARED_LIMIT_BYTES}"):
        replace(deeper, rope_slots=layout.rope_slots + 1, shared_bytes=2 * SHARED_LIMIT_BYTES).checked()


@pytest.mark.parametrize(("rows", "element"), ALL)
def test_half_an_allocation_is_refused(rows: int, element: str) -> None:
    layout = DecodeLayout.fitted(rows, element)
    with pytest.raises(LayoutError, match=r"shared memory: .* bytes used, .* asked for \(query \d+, latent ring"):
        replace(layout, shared_bytes=layout.shared_bytes // 2).checked()
    with pytest.raises(LayoutError, match=r"tensor memory: .* columns used, .* allocated \(scores \d+, output \d+\)"):
        replace(layout, tensor_columns=layout.tensor_columns // 2).checked()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score_buffers": 5, "latent_slots": 7}, "tensor memory: 576 columns used, 512 allocated"),
        ({"tensor_columns": 1024}, "tensor memory: 1024 columns, allowed: a power of two from 32 to 512"),
        ({"tensor_columns": 400}, "tensor memory: 400 columns, allowed: a power of two"),
        ({"latent_slots": 7}, "rings: 7 latent and 2 rope slots, at least 8 and 2"),
        ({"rope_slots": 1}, "rings: 8 latent and 1 rope slots, at least 8 and 2"),
    ],
)
def test_what_is_over_is_named(change: dict[str, int], message: str) -> None:
    layout = replace(DecodeLayout.fitted(64, "bfloat16"), **change)
    with pytest.raises(LayoutError, match=message):
        replace(layout, shared_bytes=max(layout.shared_bytes, layout.used_bytes)).checked()


@pytest.mark.parametrize(("rows", "element"), [(48, "bfloat16"), (128, "bfloat16"), (64, "float16")])
def test_what_the_kernel_does_not_have_is_refused(rows: int, element: str) -> None:
    with pytest.raises(LayoutError, match=f"rows={rows}, element={element}, allowed: rows"):
        DecodeLayout.fitted(rows, element)


@pytest.mark.parametrize(("rows", "element"), ALL)
def test_parts_and_barriers_do_not_overlap(rows: int, element: str) -> None:
    layout = DecodeLayout.fitted(rows, element)
    ends = [layout.offset(part) + size for part, size in layout.parts().items()]
    assert [layout.offset(part) for part in layout.parts()] == [0, *ends[:-1]]
    for part in ("query", "latent ring", "rope ring", "probabilities"):
        assert layout.offset(part) % 1024 == 0
    taken = [
        layout.barrier_offset(name) + 8 * index
        for name, count in layout.barrier_counts.items()
        for index in range(count)
    ]
    assert taken == list(range(layout.offset("barriers"), taken[-1] + 8, 8))
    assert taken[-1] + 8 <= layout.offset("tensor-memory address")


def test_tensor_memory_by_the_map_of_the_documentation() -> None:
    """64 rows: two score buffers of 64 columns, then four slots of 128 dims x 64 rows."""
    layout = DecodeLayout.fitted(64, "bfloat16")
    assert (layout.output_column, layout.used_columns, layout.tensor_columns) == (128, 384, 512)
