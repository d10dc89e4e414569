# SPDX-License-Identifier: Apache-2.0
"""Traces as a cache sees them: at which time which blocks are needed, and when the session comes back."""

from __future__ import annotations

import gzip
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SPREAD_S = 3600.0
TRACE_UNIT_TOKENS = {"coding-agent": 64, "mooncake": 512}


@dataclass(frozen=True, eq=False)
class Turn:
    """One request.

    Args:
        arrival_s: from the start of the trace.
        session: number of its session; -1 where the trace does not say.
        blocks: int32, one number per full block of the prompt; equal numbers are equal prefixes.
        return_in_s: until the session's next request arrives; infinite after the last one.
        num_seen: leading blocks that an earlier request of the trace had.
    """

    arrival_s: float
    session: int
    blocks: NDArray[np.int32]
    num_prompt_tokens: int
    num_output_tokens: int
    return_in_s: float
    num_seen: int


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    block_tokens: int
    num_blocks: int
    turns: list[Turn]

    @property
    def has_sessions(self) -> bool:
        """Whether it says which requests belong together."""
        return self.turns[0].session >= 0


class PrefixNumbers:
    """Gives every distinct prefix of content a number, from 0 on."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, space: int, units: list[int], units_per_block: int) -> list[int]:
        """Numbers of the full blocks of a prompt.

        Args:
            space: prompts of different spaces share nothing.
            units: ids of its content, in units of the trace.
            units_per_block: units in a block.
        """
        blocks = []
        parent = -1 - space
        for end in range(units_per_block, len(units) + 1, units_per_block):
            key = (parent, *units[end - units_per_block : end])
            parent = self._numbers.setdefault(key, len(self._numbers))
            blocks.append(parent)
        return blocks


def coding_agent(folder: Path, block_tokens: int, seed: int) -> Trace:
    """80 coding-agent sessions; their starts are spread evenly at random over an hour.

    Raises:
        ValueError: blocks of that size cannot be made of the trace's 64-token units.
    """
    unit = TRACE_UNIT_TOKENS["coding-agent"]
    if block_tokens % unit:
        msg = f"block_tokens is {block_tokens}; the coding-agent traces allow multiples of {unit}"
        raise ValueError(msg)
    starts = random.Random(seed)
    numbers = PrefixNumbers()
    rows = []
    for session, path in enumerate(sorted((folder / "coding-agent").glob("*.json.gz"))):
        start_s = starts.uniform(0, SPREAD_S)
        requests = sorted(json.loads(gzip.decompress(path.read_bytes()))["requests"], key=lambda row: row["t"])
        rows += [
            (start_s + row["t"], session, *_content(row, session, numbers, block_tokens // unit)) for row in requests
        ]
    return _trace("coding-agent", block_tokens, numbers, rows)


def _content(
    row: dict[str, Any], session: int, numbers: PrefixNumbers, units_per_block: int
) -> tuple[list[int], int, int]:
    units = row["hash_ids"][: row["in"] // TRACE_UNIT_TOKENS["coding-agent"]]
    return numbers.number(session, units, units_per_block), row["in"], row["out"]


def mooncake(folder: Path, kind: str) -> Trace:
    """Mooncake's chat requests (`conversation`) or its `synthetic` ones; blocks of 512 tokens."""
    unit = TRACE_UNIT_TOKENS["mooncake"]
    numbers = PrefixNumbers()
    rows = []
    with gzip.open(folder / f"mooncake_{kind}_trace.jsonl.gz", "rt") as lines:
        for line in lines:
            row = json.loads(line)
            blocks = numbers.number(0, row["hash_ids"][: row["input_length"] // unit], 1)
            rows.append((row["timestamp"] / 1000.0, -1, blocks, row["input_length"], row["output_length"]))
    return _trace(f"mooncake-{kind}", unit, numbers, rows)


def _trace(
    name: str, block_tokens: int, numbers: PrefixNumbers, rows: list[tuple[float, int, list[int], int, int]]
) -> Trace:
    rows.sort(key=lambda row: row[0])
    next_arrival_s: dict[int, float] = {}
    returns = []
    for arrival_s, session, *_ in reversed(rows):
        known = session >= 0
        returns.append(next_arrival_s.get(session, math.inf) - arrival_s if known else math.inf)
        next_arrival_s[session] = arrival_s
    returns.reverse()
    seen = np.zeros(len(numbers), dtype=bool)
    turns = []
    for (arrival_s, session, ids, num_prompt_tokens, num_output_tokens), return_in_s in zip(rows, returns, strict=True):
        blocks = np.array(ids, dtype=np.int32)
        num_seen = int(seen[blocks].sum())
        seen[blocks] = True
        turns.append(Turn(arrival_s, session, blocks, num_prompt_tokens, num_output_tokens, return_in_s, num_seen))
    return Trace(name, block_tokens, len(numbers), turns)
