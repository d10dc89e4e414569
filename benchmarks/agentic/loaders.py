# SPDX-License-Identifier: Apache-2.0
"""Reads traces: coding-agent sessions, Mooncake's and Azure's request logs.

Formats: coding-agent sessions are JSON files (``block_size``, ``requests: [{t, in, out, hash_ids, api_time}]``; ids
are comparable inside a file only); Mooncake is JSON lines (``timestamp`` in ms, ``input_length``, ``output_length``,
``hash_ids`` of 512 tokens, comparable in the whole file); Azure is CSV (``TIMESTAMP,ContextTokens,GeneratedTokens``).
Every file may be compressed with gzip (``.gz``).
"""

from __future__ import annotations

import csv
import gzip
import os
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import numpy as np

from benchmarks.agentic.trace import Prompt, Session, Trace, Turn

FOLDER_VARIABLE = "TOKENSPEED_TRACES"
MOONCAKE_BLOCK_TOKENS = 512

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Row = TypeVar("_Row")


class TraceError(ValueError):
    """A trace that cannot be read; the message names file, line, what stands there and what is allowed."""


class _CodingRequest(msgspec.Struct):
    t: _Seconds
    num_in: Annotated[int, msgspec.Meta(ge=1)] = msgspec.field(name="in")
    num_out: Annotated[int, msgspec.Meta(ge=0)] = msgspec.field(name="out")
    hash_ids: list[_Id]
    api_time: float | None = None


class _CodingSession(msgspec.Struct):
    block_size: _Count
    requests: Annotated[list[_CodingRequest], msgspec.Meta(min_length=1)]


class _MooncakeRequest(msgspec.Struct):
    timestamp: _Seconds
    input_length: _Count
    output_length: _Count
    hash_ids: list[_Id]


def load(path: str) -> Trace:
    """Return the trace at `path`; a name that is no path is looked for in the folder $TOKENSPEED_TRACES.

    Raises:
        TraceError: nothing there, an unknown format, or a malformed line.
    """
    found = _find(path)
    if found.is_dir():
        return _coding_folder(found)
    readers: dict[str, Callable[[Path], Trace]] = {".json": _coding_file, ".jsonl": _mooncake, ".csv": _azure}
    suffix = "".join(found.suffixes).removesuffix(".gz")
    for known, reader in readers.items():
        if suffix.endswith(known):
            return reader(found)
    raise TraceError(
        f"{found}: unknown format {suffix or 'without a suffix'!r}; allowed: a folder of coding-agent sessions, "
        ".json (a coding-agent session), .jsonl (Mooncake), .csv (Azure), each also with .gz"
    )


def _find(path: str) -> Path:
    candidates = [Path(path)]
    if folder := os.environ.get(FOLDER_VARIABLE):
        candidates.append(Path(folder) / path)
    for candidate in candidates:
        if candidate.exists():
            return candidate
    raise TraceError(
        f"no trace at {' or '.join(map(str, candidates))}; allowed: a file, a folder of sessions, a name in the folder "
        f"that {FOLDER_VARIABLE} names, or synthetic"
    )


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error


def _decoded(path: Path, number: int, line: bytes, kind: type[_Row]) -> _Row:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        fields = ", ".join(field.encode_name for field in msgspec.structs.fields(kind) if field.required)
        raise TraceError(f"{path}, line {number}: {error}: {_culprit(line, str(error))}; needed: {fields}") from error


def _culprit(line: bytes, message: str) -> str:
    """Return the value that the decoder complains about, or the beginning of a line that is no JSON."""
    try:
        value = msgspec.json.decode(line)
        for index, name in re.findall(r"\[(\d+)\]|\.(\w+)", message.partition("`$")[2]):
            value = value[int(index)] if index else value[name]
        return repr(value)[:100]
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        return repr(line.strip()[:100].decode(errors="replace"))


def _coding_folder(folder: Path) -> Trace:
    files = sorted(p for p in folder.iterdir() if p.name.endswith((".json", ".json.gz")))
    if not files:
        raise TraceError(f"{folder}: no session in it; allowed: .json or .json.gz files, one a session")
    return Trace(folder.name, tuple(_coding_session(file, number) for number, file in enumerate(files)))


def _coding_file(path: Path) -> Trace:
    return Trace(path.name.partition(".")[0], (_coding_session(path, 0),))


def _coding_session(path: Path, number: int) -> Session:
    content = b"".join(line for _, line in _lines(path))
    decoded = _decoded(path, 1, content, _CodingSession)
    turns: list[Turn] = []
    free_s = 0.0
    for index, request in enumerate(decoded.requests):
        if len(request.hash_ids) * decoded.block_size > request.num_in + decoded.block_size:
            raise TraceError(
                f"{path}, requests[{index}]: {len(request.hash_ids)} hash_ids of {decoded.block_size} tokens; allowed: "
                f"as many as the {request.num_in} tokens of `in` fill"
            )
        prompt = Prompt(
            number,
            np.array(request.hash_ids, dtype=np.uint32),
            decoded.block_size,
            request.num_in,
            index,
        )
        if request.num_out > 0:  # 0: nobody got an answer
            turns.append(Turn(max(0.0, request.t - free_s) if turns else 0.0, prompt, request.num_out))
        free_s = request.t + (request.api_time or 0.0)
    return Session(path.name.partition(".")[0], decoded.requests[0].t, tuple(turns))


def _mooncake(path: Path) -> Trace:
    sessions = []
    for number, line in _lines(path):
        row = _decoded(path, number, line, _MooncakeRequest)
        ids = np.array(row.hash_ids, dtype=np.uint32)
        prompt = Prompt(0, ids, MOONCAKE_BLOCK_TOKENS, row.input_length, number)
        sessions.append(Session(f"line{number}", row.timestamp / 1e3, (Turn(0.0, prompt, row.output_length),)))
    return _of_requests(path, sessions)


def _azure(path: Path) -> Trace:
    sessions: list[Session] = []
    columns = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
    first: datetime | None = None
    for number, line in _lines(path):
        cells = next(csv.reader([line.decode(errors="replace").strip()]))
        if number == 1:
            if cells != columns:
                raise TraceError(f"{path}, line 1: columns {cells}; needed: {columns}")
            continue
        at, num_in, num_out = _azure_row(path, number, cells)
        first = first or at
        prompt = Prompt(0, np.empty(0, dtype=np.uint32), 1, num_in, number)
        sessions.append(Session(f"line{number}", (at - first).total_seconds(), (Turn(0.0, prompt, num_out),)))
    return _of_requests(path, sessions)


def _azure_row(path: Path, number: int, cells: list[str]) -> tuple[datetime, int, int]:
    try:
        text, num_in, num_out = cells
        at = datetime.fromisoformat(text[:26])  # seven digits of a second, one more than Python reads
        if int(num_in) < 1 or int(num_out) < 1:
            raise ValueError("token counts below 1")
    except ValueError as error:
        raise TraceError(
            f"{path}, line {number}: {error}; it says {','.join(cells)!r}; needed: a time such as "
            "2023-11-16 18:17:03.979960, then two token counts of at least 1"
        ) from error
    return at, int(num_in), int(num_out)


def _of_requests(path: Path, sessions: list[Session]) -> Trace:
    if not sessions:
        raise TraceError(f"{path}: no request in it; needed: at least one")
    sessions.sort(key=lambda session: session.start_s)
    return Trace(path.name.partition(".")[0], tuple(sessions))
