# SPDX-License-Identifier: Apache-2.0
"""Snapshots of the block pool, for `tokenspeed-plugin kv-map`; in development mode only."""

from typing import TYPE_CHECKING, Any

from tokenspeed_plugin.host import patches
from tokenspeed_plugin.host.dev_mode import is_dev_mode
from tokenspeed_plugin.kv_flat.groups import groups_from
from tokenspeed_plugin.scheduler_fsm.session_hints import SessionNames

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import KVCacheConfig
    from tokenspeed_plugin.scheduler_fsm._core import Core, HostedKv
    from tokenspeed_plugin.scheduler_fsm.hosted.manager import FlatKvCacheManager
    from tokenspeed_plugin.scheduler_fsm.request_desk import RequestDesk


class KvMapSource:
    """What the core says of its blocks, with what clients call their sessions."""

    def __init__(
        self,
        core: "Core | HostedKv",
        desk: "RequestDesk | FlatKvCacheManager",
        kv_cache_config: "KVCacheConfig",
        key_tokens: int,
    ) -> None:
        self._core = core
        self._desk = desk
        self._block_tokens = [group.block_tokens for group in groups_from(kv_cache_config.kv_cache_groups)]
        self._key_tokens = key_tokens
        if is_dev_mode():
            patches.install_kv_map()
            desk.session_names = SessionNames()

    def take(self) -> dict[str, Any]:
        """The whole pool at this moment: bytes by column (`kv_flat/kv_map.py`), and what explains them."""
        names = self._desk.session_names
        return self._core.kv_map() | {
            "block_tokens": self._block_tokens,
            "key_tokens": self._key_tokens,
            "session_names": {} if names is None else names.names,
        }
