# SPDX-License-Identifier: Apache-2.0
"""Keys and values straight from pages without a GPU: tiles of a batch, what the kernel is handed and refuses, who selects it."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass

import pytest
import torch
from cached_prefill_case import BATCHES, make_case, torch_attend
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_plugin.kernels.mla.cached_prefill.groups import Group, workspace_bytes
from tokenspeed_plugin.kernels.mla.cached_prefill.solutions import MODE, OURS_TMA
from tokenspeed_plugin.kernels.mla.solutions import BF16, decode_shape
from tokenspeed_plugin.kernels.mla.unfold import unfold
from tokenspeed_plugin.kernels.mla.unfold.abi import Params, UnfoldError, UnfoldLibrary
from tokenspeed_plugin.kernels.mla.unfold.tiles import TILE_TOKENS, plan_tiles
from tokenspeed_plugin.kernels.registry import Platform, Priority, default_registry
from tokenspeed_plugin.kernels.select import KernelRequest, KernelSelectionError, select_kernel

CPU = torch.device("cpu")
HOPPER = Platform("cuda", (9, 0), "GPU")


@dataclass
class ModelOfTiles:
    """What the kernel does tile by tile, with its arithmetic of pages and boxes, in torch."""

    table: torch.Tensor
    tiles: torch.Tensor
    page_tokens: int

    def __call__(
        self, kv_cache: torch.Tensor, weights: torch.Tensor, latents: torch.Tensor, unfolded: torch.Tensor, first: bool
    ) -> None:
        del latents
        box = min(self.page_tokens, TILE_TOKENS)
        halves = weights.view(-1, 128, 512).transpose(1, 2)
        for row, request, position, tokens in self.tiles.tolist():
            shared = torch.full((TILE_TOKENS, 576), torch.nan, dtype=torch.bfloat16)
            page, slot = divmod(position, self.page_tokens)
            for i in range(-(-tokens // box)):
                shared[i * box : (i + 1) * box] = kv_cache[self.table[request, page + i], slot : slot + box]
            rows = slice(row, row + tokens)
            unfolded[:, rows, :128] = torch.matmul(shared[:, :512], halves)[:, :tokens]
            if first:
                unfolded[::2, rows, 128:] = shared[:tokens, 512:]


def model(group: Group, table: torch.Tensor, kv_starts: torch.Tensor, page_tokens: int) -> ModelOfTiles:
    assert kv_starts.tolist() == list(group.kv_starts)
    return ModelOfTiles(table, plan_tiles(group.kv_starts), page_tokens)


@given(st.lists(st.integers(0, 700), min_size=1, max_size=12).filter(any))
def test_tiles_are_all_tokens_once_and_none_has_two_requests(lengths: list[int]) -> None:
    starts = [0, *itertools.accumulate(lengths)]
    tiles = plan_tiles(starts)
    assert (tiles.dtype, tiles.is_contiguous(), len(tiles) % 2) == (torch.int32, True, 0)
    covered = []
    for row, request, position, tokens in tiles[tiles[:, 3] > 0].tolist():
        assert row == starts[request] + position
        assert position % TILE_TOKENS == 0
        assert tokens == min(TILE_TOKENS, lengths[request] - position)
        covered += range(row, row + tokens)
    assert covered == list(range(sum(lengths)))
    assert (tiles[:-1, 3] > 0).all()


@pytest.mark.parametrize("page_tokens", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("name", [*BATCHES, "long"])
def test_the_schedule_makes_what_the_definition_does(name: str, page_tokens: int) -> None:
    case = make_case(*(BATCHES | {"long": ([3, 1], [300, 129])})[name], page_tokens=page_tokens)
    out, _ = case.run(torch_attend, plan_making=model)
    case.check(out)


def test_later_heads_find_the_rope_part_in_its_place() -> None:
    case = make_case(*BATCHES["ragged"])
    whole, _ = case.run(torch_attend)
    cut, groups = case.run(torch_attend, workspace_bytes(170, 2), model)
    assert groups == 3
    assert torch.equal(cut, whole)


class Library:
    """Keeps what would be launched."""

    def __init__(self) -> None:
        self.launched: list[Params] = []

    def prepare(self, device: int) -> int:
        del device
        return 66

    def run(self, device: int, params: Params, stream: int) -> None:
        del device, stream
        self.launched.append(Params.from_buffer_copy(params))


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def launches(library: Library, monkeypatch: pytest.MonkeyPatch) -> unfold.Launches:
    class Stream:
        cuda_stream = 7

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    return unfold.Launches(library, CPU)  # type: ignore[arg-type]


def operands(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two heads of 200 tokens in pages of 32."""
    return {
        "kv_cache": torch.zeros(9, 32, 640, dtype=torch.bfloat16)[..., :576],
        "weights": torch.zeros(2, 256, 512, dtype=torch.bfloat16),
        "block_table": torch.zeros(1, 11, dtype=torch.int32)[:, :7],
        "tiles": plan_tiles([0, 200]),
        "rows": torch.zeros(4, 200, 192, dtype=torch.bfloat16),
        **changed,
    }


def test_a_launch_gets_addresses_strides_and_sizes(launches: unfold.Launches, library: Library) -> None:
    given_operands = operands()
    for rope in (True, False):
        launches(**given_operands, page_tokens=32, rope=rope)
    for params, write_rope in zip(library.launched, (1, 0), strict=True):
        for name, operand in given_operands.items():
            assert getattr(params, name) == operand.data_ptr()
        assert (params.page_stride, params.token_stride, params.table_stride) == (32 * 640, 640, 11)
        assert (params.row_stride, params.row_token_stride) == (200 * 192, 192)
        assert (params.num_tokens, params.num_heads, params.num_pages, params.num_tiles) == (200, 2, 9, 2)
        assert (params.page_shift, params.clusters, params.write_rope) == (5, 66, write_rope)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"kv_cache": torch.zeros(9, 16, 576, dtype=torch.bfloat16)},
            r"kv_cache: shape \(9, 16, 576\), allowed: \(9, 32,",
        ),
        ({"kv_cache": torch.zeros(9, 32, 577, dtype=torch.bfloat16)[..., :576]}, "kv_cache: address and strides of"),
        (
            {"rows": torch.zeros(2, 200, 192, dtype=torch.bfloat16)},
            r"rows: shape \(2, 200, 192\), allowed: \(4, 200, 192\)",
        ),
        ({"rows": torch.zeros(4, 200, 192)}, "rows: dtype torch.float32, allowed: torch.bfloat16"),
        (
            {"weights": torch.zeros(4, 256, 512, dtype=torch.bfloat16)[::2]},
            r"weights: strides \(262144, 512, 1\), allowed: contiguous",
        ),
        ({"block_table": torch.zeros(1, 7)}, "block_table: dtype torch.float32, allowed: torch.int32"),
        ({"block_table": torch.zeros(7, dtype=torch.int32)}, r"block_table: shape \(7,\), allowed: \(7, 7\)"),
        ({"tiles": torch.zeros(2, 3, dtype=torch.int32)}, r"tiles: shape \(2, 3\), allowed: \(2, 4\)"),
    ],
)
def test_operands_that_do_not_fit_are_refused(
    changed: dict[str, torch.Tensor], message: str, launches: unfold.Launches, library: Library
) -> None:
    with pytest.raises(ValueError, match=message):
        launches(**operands(**changed), page_tokens=32, rope=True)
    assert library.launched == []


@pytest.mark.parametrize("page_tokens", [1, 8, 48])
def test_other_page_sizes_are_refused_by_name_before_anything_is_built(page_tokens: int) -> None:
    case = make_case(*BATCHES["one"])
    group = Group(slice(0, 1), (0, 20), (0, 150), 3)
    with pytest.raises(ValueError, match=f"page_tokens: {page_tokens}, allowed: powers of two from 16 on"):
        unfold.paged_unfold(group, case.table, torch.tensor([0, 150]), page_tokens)


def test_a_refusal_of_the_library_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def __getattr__(self, name: str) -> object:
            results = {"params_bytes": ctypes.sizeof(Params), "error": b"clusters: not one runs"}
            setattr(self, name, lambda *_: results.get(name.removeprefix("tokenspeed_unfold_"), -1))
            return getattr(self, name)

    monkeypatch.setattr("ctypes.CDLL", lambda _: Refusing())
    library = UnfoldLibrary("refusing.so")
    with pytest.raises(UnfoldError, match="clusters: not one runs"):
        library.prepare(0)
    with pytest.raises(UnfoldError, match="clusters: not one runs"):
        library.run(0, Params(), 0)


def request(page_tokens: int = 64) -> KernelRequest:
    """256 new tokens on 64K."""
    return KernelRequest("mla", MODE, BF16, decode_shape(16, 256, page_tokens, 1, 65536), HOPPER)


def test_nothing_selects_it_but_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    (spec,) = (s for s in default_registry().candidates("mla", MODE) if s.solution == OURS_TMA)
    assert spec.priority is Priority.UNTRIED
    monkeypatch.setattr("tokenspeed_plugin.kernels.nvcc.find_nvcc", lambda: "nvcc")
    assert select_kernel(request(), solution=OURS_TMA).spec is spec
    assert select_kernel(request()).spec.solution != OURS_TMA
    with pytest.raises(KernelSelectionError, match="page_tokens=48, allowed: at least 16, a power of two"):
        select_kernel(request(48), solution=OURS_TMA)


def test_it_is_refused_where_it_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_KERNEL_CACHE", "/nonexistent")
    monkeypatch.setattr("tokenspeed_plugin.kernels.nvcc.find_nvcc", lambda: None)
    with pytest.raises(KernelSelectionError, match="nvcc was found neither under"):
        select_kernel(request(), solution=OURS_TMA)
