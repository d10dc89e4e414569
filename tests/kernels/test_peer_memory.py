# SPDX-License-Identifier: Apache-2.0
"""How ranks agree on peer memory: threads for ranks, a library that keeps memory in a dictionary."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tokenspeed_plugin.kernels.comm import peer_memory
from tokenspeed_plugin.kernels.comm.abi import CommError, Params
from tokenspeed_plugin.kernels.comm.peer_memory import NotConnectedError, PeerMemory, share

RANKS = 3
BYTES = 1024


class Host:
    """What all ranks share: memory by address, and the exchange of objects between threads."""

    def __init__(self) -> None:
        self.words: dict[tuple[int, int], int] = {}
        self.allocated: set[int] = set()
        self.opened: list[tuple[int, int]] = []
        self.barrier = threading.Barrier(RANKS, timeout=20)
        self.board: list[object] = [None] * RANKS

    def all_gather_object(self, into: list[object], value: object, group: SimpleNamespace) -> None:
        self.board[group.rank()] = value
        self.barrier.wait()
        into[:] = list(self.board)
        self.barrier.wait()


class Library:
    """One rank's view; `faults` names calls that fail on it."""

    def __init__(self, host: Host, rank: int, faults: set[str]) -> None:
        self.host, self.rank, self.faults = host, rank, faults

    def _check(self, call: str) -> None:
        if call in self.faults:
            raise CommError(f"{call}: broken")

    def allocate(self, device: int, num_bytes: int) -> tuple[int, bytes]:
        self._check("allocate")
        address = 1000 * (self.rank + 1)
        self.host.allocated.add(address)
        return address, str(address).encode()

    def free(self, device: int, address: int) -> None:
        assert not [pair for pair in self.host.opened if pair[1] == address], "freed while a peer has it mapped"
        self.host.allocated.remove(address)

    def open(self, device: int, handle: bytes) -> int:
        self._check("open")
        self.host.opened.append((self.rank, int(handle)))
        return int(handle)

    def close(self, device: int, address: int) -> None:
        self.host.opened.remove((self.rank, address))

    def clear(self, device: int, address: int, num_bytes: int) -> None:
        self.host.words = {k: v for k, v in self.host.words.items() if k[0] != address}

    def probe(self, device: int, params: Params, base: int) -> None:
        if "lost writes" in self.faults:
            return
        for peer in range(params.num_ranks):
            if peer != params.rank:
                value = base + params.rank
                self.host.words[params.staging[peer], 2 * params.rank] = value
                self.host.words[params.staging[peer], 2 * params.rank + 1] = value ^ 0xFFFF_FFFF_FFFF_FFFF

    def read_probe(self, device: int, params: Params) -> tuple[int, ...]:
        own = params.staging[params.rank]
        return tuple(self.host.words.get((own, i), 0) for i in range(2 * params.num_ranks))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    found = Host()
    stub = SimpleNamespace(all_gather_object=found.all_gather_object, barrier=lambda _: found.barrier.wait())
    monkeypatch.setattr(peer_memory, "distributed", stub)
    monkeypatch.delenv(peer_memory.NO_MULTICAST, raising=False)
    yield found
    found.barrier.abort()


def on_all_ranks(host: Host, faults: dict[int, set[str]]) -> list[PeerMemory | str]:
    def one(rank: int) -> PeerMemory | str:
        group = SimpleNamespace(rank=lambda: rank, size=lambda: RANKS, group_name="ranks")
        try:
            return share(group, Library(host, rank, faults.get(rank, set())), rank, BYTES)  # type: ignore[arg-type]
        except NotConnectedError as error:
            return str(error)

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS)))


def in_parallel(calls: list[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(lambda call: call(), calls))


def test_all_ranks_get_the_same_addresses_and_clean_memory(host: Host) -> None:
    found = on_all_ranks(host, {})
    assert [memory.addresses for memory in found if isinstance(memory, PeerMemory)] == [(1000, 2000, 3000)] * RANKS
    assert {memory.way for memory in found if isinstance(memory, PeerMemory)} == {"CUDA IPC"}
    assert host.words == {}
    in_parallel([memory.close for memory in found if isinstance(memory, PeerMemory)])
    assert host.allocated == set()
    assert host.opened == []


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({1: {"allocate"}}, "rank 1: allocate: broken"),
        ({2: {"open"}}, "rank 2: the memory of rank 0: open: broken"),
        ({1: {"lost writes"}}, "rank 0: what rank 1 wrote did not arrive"),
    ],
)
def test_what_fails_on_one_rank_is_said_on_all_and_leaves_nothing(
    faults: dict[int, set[str]], reason: str, host: Host
) -> None:
    switch = "it would set up NVLink multicast unless TORCH_SYMM_MEM_DISABLE_MULTICAST=1"
    expected = f"CUDA IPC: {reason}; symmetric memory: rank 0: {switch}"
    assert on_all_ranks(host, faults) == [expected] * RANKS
    assert host.allocated == set()
    assert host.opened == []


def test_symmetric_memory_takes_over_where_its_multicast_is_off(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peer_memory.NO_MULTICAST, "1")
    monkeypatch.setattr(peer_memory, "_symmetric_buffer", lambda num_bytes, device: f"buffer {device}")
    handle = SimpleNamespace(buffer_ptrs=[7000, 8000, 9000])
    monkeypatch.setattr(peer_memory, "_rendezvous", lambda buffer, group: handle)
    found = on_all_ranks(host, {0: {"open"}})
    assert [(m.way, m.addresses) for m in found if isinstance(m, PeerMemory)] == [
        ("symmetric memory", (7000, 8000, 9000))
    ] * RANKS


def test_a_rank_whose_symmetric_memory_fails_leaves_nobody_in_the_rendezvous(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(peer_memory.NO_MULTICAST, "1")

    def buffer(num_bytes: int, device: int) -> str:
        if device == 1:
            raise RuntimeError("no file handles\nand a long trace")
        return "buffer"

    monkeypatch.setattr(peer_memory, "_symmetric_buffer", buffer)
    monkeypatch.setattr(peer_memory, "_rendezvous", lambda *_: pytest.fail("nobody gets that far"))
    found = on_all_ranks(host, {0: {"allocate"}})
    assert found == ["CUDA IPC: rank 0: allocate: broken; symmetric memory: rank 1: no file handles"] * RANKS
