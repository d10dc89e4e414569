# SPDX-License-Identifier: Apache-2.0
"""Snapshots of the block pool: what each block holds and for whom, and the file that a run is recorded in."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT = "tokenspeed-kv-map/1"
STATES = ("free", "cached", "pinned", "in_use")
# Column -> type of its values, one for each block; the first is vLLM's null block.
COLUMNS = {
    "state": "u1",  # index into STATES
    "kind": "u1",  # cached blocks: as what they would be evicted; 255 otherwise
    "group": "u1",  # KV cache group of blocks in use; 255 otherwise
    "owners": "<u2",
    "keys": "<u2",  # logical blocks that can be hit
    "key": "<u4",  # beginning of the first of their keys; 0: none
    "run": "<u4",  # blocks in use: number of the request; cached ones: of the sequence that left them
    "depth": "<u4",  # position within it
    "session": "<u8",  # 0: not known
}


class KvMapError(ValueError):
    """A recorded run that cannot be read; the message names what is wrong."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The pool at one moment.

    Attributes:
        time_s: Unix time.
        engine: rank of the engine.
        block_tokens: tokens in a block, by KV cache group.
        key_tokens: tokens in a logical block.
        requests: (id, number in column `run`, session, computed tokens) of everybody who holds blocks.
        session_names: what clients called their sessions, by number; only of late ones.
        columns: see COLUMNS; without the null block.
    """

    time_s: float
    engine: int
    block_tokens: tuple[int, ...]
    key_tokens: int
    requests: tuple[tuple[str, int, int, int], ...]
    session_names: Mapping[int, str]
    columns: Mapping[str, NDArray[Any]]

    @property
    def num_blocks(self) -> int:
        """Blocks that can be owned."""
        return len(self.columns["state"])

    def num_by_state(self) -> dict[str, int]:
        """Blocks by state."""
        counts = np.bincount(self.columns["state"], minlength=len(STATES))
        return {state: int(count) for state, count in zip(STATES, counts, strict=True)}


def encoded(raw: Mapping[str, Any], time_s: float, engine: int) -> dict[str, Any]:
    """What a scheduler's `kv_map()` says, as one entry of a record: numbers and text only."""
    columns = {name: base64.b64encode(zlib.compress(raw[name], 1)).decode() for name in COLUMNS}
    return {
        "time_s": time_s,
        "engine": engine,
        "block_tokens": list(raw["block_tokens"]),
        "key_tokens": raw["key_tokens"],
        "requests": [list(request) for request in raw["requests"]],
        "session_names": {str(number): name for number, name in raw["session_names"].items()},
        "columns": columns,
    }


def record(snapshots: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A record of encoded snapshots."""
    return {"format": FORMAT, "snapshots": list(snapshots)}


def snapshots_from(text: str) -> list[Snapshot]:
    """The snapshots of a record.

    Raises:
        KvMapError: it is no record, or one of another format.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        msg = f"not JSON: {error}"
        raise KvMapError(msg) from error
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        msg = f"format is {found!r}; allowed: {FORMAT!r}"
        raise KvMapError(msg)
    try:
        return [_decoded(entry) for entry in document["snapshots"]]
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        msg = f"broken snapshot: {type(error).__name__}: {error}"
        raise KvMapError(msg) from error


def _decoded(entry: Mapping[str, Any]) -> Snapshot:
    columns = {
        name: np.frombuffer(zlib.decompress(base64.b64decode(entry["columns"][name])), dtype=kind)[1:]
        for name, kind in COLUMNS.items()
    }
    if len({len(column) for column in columns.values()}) != 1:
        msg = "columns of different lengths"
        raise ValueError(msg)
    return Snapshot(
        time_s=float(entry["time_s"]),
        engine=int(entry["engine"]),
        block_tokens=tuple(entry["block_tokens"]),
        key_tokens=int(entry["key_tokens"]),
        requests=tuple((str(label), int(run), int(session), int(n)) for label, run, session, n in entry["requests"]),
        session_names={int(number): str(name) for number, name in entry["session_names"].items()},
        columns=columns,
    )
