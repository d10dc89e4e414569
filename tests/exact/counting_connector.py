# SPDX-License-Identifier: Apache-2.0
"""A KV connector that never has anything and counts how often it is asked."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

PATH = f"{__name__}.CountingConnector"


class CountingConnector(KVConnectorBase_V1):
    """Scheduler side only.

    Attributes:
        lookups: questions per (request id, computed tokens).
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.lookups: Counter[tuple[str, int]] = Counter()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Counts the question; nothing matches."""
        self.lookups[request.request_id, num_computed_tokens] += 1
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing to load."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing to tell the workers."""
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **keywords: Any) -> None:
        """Worker side: unused."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Worker side: unused."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **keywords: Any) -> None:
        """Worker side: unused."""

    def wait_for_save(self) -> None:
        """Worker side: unused."""
