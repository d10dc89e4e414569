# SPDX-License-Identifier: Apache-2.0
"""KV memory of the exact worker: one value per slot, one pool of blocks for all groups."""

from __future__ import annotations

from collections.abc import Sequence

from exact.reference import EMPTY

NULL_BLOCK = 0


class ExactError(AssertionError):
    """Something a scheduler did that would give a real model a wrong token.

    Attributes:
        kind: short name of the fault (`wrong_read`, `shared_block`, ...).
        request_id, position, block, group: where, as far as known.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        request_id: str | None = None,
        position: int | None = None,
        block: int | None = None,
        group: int | None = None,
    ) -> None:
        place = {"request": request_id, "position": position, "block": block, "group": group}
        where = ", ".join(f"{key}={value}" for key, value in place.items() if value is not None)
        super().__init__(f"{kind}: {message} [{where}]")
        self.kind = kind
        self.request_id = request_id
        self.position = position
        self.block = block
        self.group = group


class KvMemory:
    """Slots of all blocks. Groups alias the same bytes: writing through one group makes a block garbage for others.

    Args:
        num_blocks: blocks including the null block 0.
        block_tokens: tokens in a block, per group.
    """

    def __init__(self, num_blocks: int, block_tokens: Sequence[int]) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = tuple(block_tokens)
        self._slots: list[list[int]] = [[] for _ in range(num_blocks)]
        self._group_of: list[int] = [-1] * num_blocks

    def slots(self, group: int, block: int) -> list[int]:
        """The slots of a block as `group` sees them; empty when another group wrote them last."""
        return self._slots[block] if self._group_of[block] == group else []

    def write(self, group: int, block: int, offset: int, values: Sequence[int]) -> None:
        """Stores values in consecutive slots of one block."""
        if self._group_of[block] != group:
            self._group_of[block] = group
            self._slots[block] = [EMPTY] * self.block_tokens[group]
        self._slots[block][offset : offset + len(values)] = values

    def write_state(self, group: int, block: int, value: int) -> None:
        """A state takes the whole block."""
        self._group_of[block] = group
        self._slots[block] = [value]

    def zero(self, block: int) -> None:
        """Clears a block."""
        self._group_of[block] = -1
        self._slots[block] = []

    def copy(self, source: int, target: int) -> None:
        """Copies a whole block."""
        self._group_of[target] = self._group_of[source]
        self._slots[target] = list(self._slots[source])
