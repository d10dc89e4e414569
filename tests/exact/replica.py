# SPDX-License-Identifier: Apache-2.0
"""A subscriber of KV events."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_knobs import Group

from tokenspeed_plugin.scheduler_fsm import config_map


def record_events(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Have every flat KV manager that is built from now on record events, and take these settings of `KvConfig`."""
    original = config_map.kv_config

    def recording(*args: Any) -> Any:
        config = original(*args)
        for name, value in {"record_events": True, **settings}.items():
            setattr(config, name, value)
        return config

    monkeypatch.setattr(config_map, "kv_config", recording)


class Replica:
    """A subscriber that keeps the set of stored blocks."""

    def __init__(self, groups: tuple[Group, ...]) -> None:
        self.num_groups = len(groups)
        self.stored: dict[tuple[int, bytes], Any] = {}
        self.num_clears = 0

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            kind = type(event).__name__
            if kind == "BlockStored":
                key = (event.group_idx, *event.block_hashes)
                assert key not in self.stored
                # A state stands alone, and the blocks in front of a window may be gone. Where another group cut a match short, a
                # request computes blocks again whose keys lie elsewhere and may be evicted there.
                is_root = event.parent_block_hash is None or self.num_groups > 1
                assert is_root or (event.group_idx, event.parent_block_hash) in self.stored
                self.stored[key] = event
            elif kind == "BlockRemoved":
                for key in event.block_hashes:
                    del self.stored[event.group_idx, key]
            else:
                self.num_clears += 1
                self.stored.clear()
