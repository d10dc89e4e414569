# SPDX-License-Identifier: Apache-2.0
"""Memory of one GPU that the other GPUs of a group can write: two ways to get it, and a test that writes arrive.

NVLink multicast is never set up. CUDA IPC knows nothing of it; PyTorch's symmetric memory is used only where its own switch
against multicast is set.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import distributed

from tokenspeed_plugin.kernels.comm.abi import Params

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

    from tokenspeed_plugin.kernels.comm.abi import CommLibrary

NO_MULTICAST: Final = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_PROBE_BASE: Final = 0x7053_6565_6B00_0000


class NotConnectedError(RuntimeError):
    """The ranks of a group cannot reach each other's memory; raised on all of them, with the reason of each way."""


@dataclass(frozen=True)
class PeerMemory:
    """Zeroed memory of every rank, as this rank's device sees it.

    Attributes:
        way: how it was got, for the log.
        addresses: by rank.
        close: gives it back; every rank has to, after the last launch that uses it.
        keep: what must live as long as the memory is used.
    """

    way: str
    addresses: tuple[int, ...]
    close: Callable[[], None]
    keep: object = None


def settle(group: ProcessGroup, problem: str | None) -> str | None:
    """The first problem that any rank has, with its rank: the same on all of them; None when there is none."""
    problems: list[str | None] = [None] * group.size()
    distributed.all_gather_object(problems, problem, group=group)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None), None)


def share(group: ProcessGroup, library: CommLibrary, device: int, num_bytes: int) -> PeerMemory:
    """Memory of `num_bytes` on every rank of a group of the CPU kind; each rank has to call this.

    Raises:
        NotConnectedError: no way works; the message says why for each.
    """
    reasons = []
    for name, way in WAYS.items():
        found = way(group, library, device, num_bytes)
        if isinstance(found, PeerMemory):
            problem = _test(group, library, device, found.addresses, num_bytes)
            if problem is None:
                return found
            found.close()
            found = problem
        reasons.append(f"{name}: {found}")
    raise NotConnectedError("; ".join(reasons))


def _by_ipc(group: ProcessGroup, library: CommLibrary, device: int, num_bytes: int) -> PeerMemory | str:
    own, handle, problem = 0, b"", None
    try:
        own, handle = library.allocate(device, num_bytes)
    except RuntimeError as error:
        problem = str(error)
    opened: list[int] = []

    def close() -> None:
        for address in opened:
            library.close(device, address)
        distributed.barrier(group)  # nobody frees what another one has mapped
        if own:
            library.free(device, own)

    if (failed := settle(group, problem)) is not None:
        close()
        return failed
    handles: list[bytes] = [b""] * group.size()
    distributed.all_gather_object(handles, handle, group=group)
    addresses = []
    for rank, other in enumerate(handles):
        if rank == group.rank():
            addresses.append(own)
            continue
        try:
            opened.append(library.open(device, other))
        except RuntimeError as error:
            problem = f"the memory of rank {rank}: {error}"
            break
        addresses.append(opened[-1])
    if (failed := settle(group, problem)) is not None:
        close()
        return failed
    return PeerMemory("CUDA IPC", tuple(addresses), close)


def _by_symmetric_memory(group: ProcessGroup, _: CommLibrary, device: int, num_bytes: int) -> PeerMemory | str:
    problem, buffer, handle = None, None, None
    if os.environ.get(NO_MULTICAST) != "1":
        problem = f"it would set up NVLink multicast unless {NO_MULTICAST}=1"
    if (failed := settle(group, problem)) is not None:
        return failed
    # One step at a time: a rank that fails must not leave the others waiting in the next one.
    steps: tuple[Callable[[Any], Any], ...] = (
        lambda _: _symmetric_buffer(num_bytes, device),
        lambda made: (made, _rendezvous(made, group)),
    )
    made: Any = None
    for step in steps:
        try:
            made = step(made)
        except (RuntimeError, ImportError, AttributeError) as error:
            problem = str(error).splitlines()[0] if str(error) else repr(error)
        if (failed := settle(group, problem)) is not None:
            return failed
    buffer, handle = made
    return PeerMemory("symmetric memory", tuple(handle.buffer_ptrs), lambda: None, (buffer, handle))


def _symmetric_buffer(num_bytes: int, device: int) -> torch.Tensor:
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=torch.device("cuda", device))


def _rendezvous(buffer: torch.Tensor, group: ProcessGroup) -> Any:
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.rendezvous(buffer, group.group_name)


WAYS: Final[dict[str, Callable[[ProcessGroup, CommLibrary, int, int], PeerMemory | str]]] = {
    "CUDA IPC": _by_ipc,
    "symmetric memory": _by_symmetric_memory,
}


def _test(
    group: ProcessGroup, library: CommLibrary, device: int, addresses: Sequence[int], num_bytes: int
) -> str | None:
    """Whether what each rank writes into each other's memory arrives there; leaves the memory blank."""
    params = Params(rank=group.rank(), num_ranks=group.size())
    for rank, address in enumerate(addresses):
        params.staging[rank] = address

    def tried(step: Callable[[], str | None]) -> str | None:
        try:
            problem = step()
        except RuntimeError as error:
            problem = str(error)
        return settle(group, problem)

    own = addresses[group.rank()]
    return (
        tried(lambda: library.clear(device, own, num_bytes))
        or tried(lambda: library.probe(device, params, _PROBE_BASE))
        or tried(lambda: _arrived(library.read_probe(device, params), group.rank()))
        or tried(lambda: library.clear(device, own, num_bytes))
    )


def _arrived(words: Sequence[int], rank: int) -> str | None:
    for source in range(len(words) // 2):
        value = _PROBE_BASE + source
        if source != rank and tuple(words[2 * source : 2 * source + 2]) != (value, value ^ 0xFFFF_FFFF_FFFF_FFFF):
            return f"what rank {source} wrote did not arrive"
    return None
