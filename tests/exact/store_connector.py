# SPDX-License-Identifier: Apache-2.0
"""A KV connector whose store holds the context values of blocks, so that a wrong load or save changes tokens.

Its scheduler side follows vLLM's connector interface and checks what it is told; its worker side is `exact.transfers`.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

PATH = "exact.store_connector.StoreConnector"


@dataclass(frozen=True)
class Options:
    """What the connector is like; `kv_connector_extra_config`.

    Attributes:
        is_async: loads run beside the steps, for `load_steps` of them.
        undecided_share: of the lookups, answered "ask again".
        whole_prompt: offers the last token too, as a transfer from another engine does.
        send_steps: steps for which an ended request's blocks are sent; 0 for never.
        save_steps: steps after which a block is copied out; it is pinned meanwhile.
        fail_share: of the loads, in which some block does not come.
        fails_by_request: a failed asynchronous load is reported by request, not by block.
        seed: of the random draws.
    """

    is_async: bool = False
    load_steps: int = 2
    undecided_share: float = 0.0
    whole_prompt: bool = False
    send_steps: int = 0
    save_steps: int = 0
    fail_share: float = 0.0
    fails_by_request: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Piece:
    """One block to load or save: where it lies, and under which key it is stored."""

    group: int
    block: int
    key: bytes


@dataclass
class Job(KVConnectorMetadata):
    """Work of one request for the workers."""

    request_id: str
    pieces: list[Piece]
    steps: int = 0
    tokens: list[int] = field(default_factory=list)


@dataclass
class StepJobs(KVConnectorMetadata):
    """What one step carries to the workers."""

    loads: list[Job]
    saves: list[Job]
    sends: list[Job]
    ended: set[str]


class StoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Scheduler side.

    Attributes:
        store: (group, key) -> context values of a block's slots.
        lookups: by (request id, computed tokens).
        calls: what happened to each request, in order.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.options = Options(**vllm_config.kv_transfer_config.kv_connector_extra_config)
        self.groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.block_tokens = self.groups[0].block_size
        self.store: dict[tuple[int, bytes], list[int]] = {}
        self.lookups: Counter[tuple[str, int]] = Counter()
        self.calls: dict[str, list[str]] = {}
        self.dice = random.Random(self.options.seed)
        self._known: dict[str, Any] = {}
        self._offered: dict[str, int] = {}
        self._begins: dict[str, int] = {}
        self._num_saved: dict[str, int] = {}
        self._loads: list[Job] = []
        self._sends: list[Job] = []
        self._pool: Any = None
        self._num_pinned = 0
        self.was_reset = False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError

    @property
    def requires_kv_delivery(self) -> bool:
        return self.options.send_steps > 0

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool

    def on_new_request(self, request: Any) -> None:
        self._known[request.request_id] = request
        self.calls.setdefault(request.request_id, []).append("new")

    # -- loads -------------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert request.request_id in self._known, "looked up before it was announced"
        self.lookups[request.request_id, num_computed_tokens] += 1
        if self.dice.random() < self.options.undecided_share:
            return None, False
        num_tokens = max(0, self._num_stored(request) - num_computed_tokens)
        self._offered[request.request_id] = num_tokens
        self._begins[request.request_id] = num_computed_tokens
        return num_tokens, self.options.is_async and num_tokens > 0

    def _num_stored(self, request: Any) -> int:
        """The longest stored prefix, in tokens; of a window only what the next token reads."""
        spare = 0 if self.options.whole_prompt else 1
        for num_blocks in range((request.num_tokens - spare) // self.block_tokens, 0, -1):
            if all(self._has(request, group, num_blocks) for group in range(len(self.groups))):
                return int(num_blocks * self.block_tokens)
        return 0

    def _has(self, request: Any, group: int, num_blocks: int) -> bool:
        window = getattr(self.groups[group], "sliding_window", None)
        first = 0 if window is None else max(0, num_blocks * self.block_tokens - window) // self.block_tokens
        return all((group, request.block_hashes[index]) in self.store for index in range(first, num_blocks))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        request_id = request.request_id
        self.calls[request_id].append(f"alloc {num_external_tokens}")
        offered = self._offered.pop(request_id, 0)
        assert num_external_tokens in (0, offered), "loads something else than was offered"
        if num_external_tokens == 0:
            return
        pieces = []
        begin = self._begins.pop(request_id) // self.block_tokens
        end = begin + num_external_tokens // self.block_tokens
        for group, table in enumerate(blocks.blocks):
            # vLLM's scheduler shows blocks of the step's own tokens as well.
            shown = [index for index, block in enumerate(table) if not block.is_null and block.block_hash is None]
            fresh = [index for index in shown if index < end]
            assert not fresh or fresh == list(range(fresh[0], end)), "blocks to fill are not those of the load"
            for index in fresh:
                assert index >= begin, "more blocks to fill than tokens were offered"
                pieces.append(Piece(group, table[index].block_id, request.block_hashes[index]))
        steps = self.options.load_steps if self.options.is_async else 0
        self._loads.append(Job(request_id, pieces, steps))

    # -- saves and sends ---------------------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> StepJobs:
        state = scheduler_output.kv_connector_block_state
        saves = []
        for request_id in scheduler_output.preempted_req_ids or ():
            self._num_saved.pop(request_id, None)
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._known[request_id]
            end = min(request.num_computed_tokens + num_tokens, request.num_tokens) // self.block_tokens
            first = self._num_saved.get(request_id, 0)
            tables = state.get_block_ids(request_id)
            pieces = [
                Piece(group, table[index], request.block_hashes[index])
                for group, table in enumerate(tables)
                for index in range(first, end)
                if table[index] != 0
            ]
            self._num_saved[request_id] = max(first, end)
            if pieces:
                saves.append(Job(request_id, pieces, self.options.save_steps))
                if self.options.save_steps:
                    self._pool.touch([self._pool.blocks[piece.block] for piece in pieces])
                    self._num_pinned += len(pieces)
        for request_id in scheduler_output.finished_req_ids:
            self._known.pop(request_id, None)
            self._num_saved.pop(request_id, None)
        jobs = StepJobs(self._loads, saves, self._sends, set(scheduler_output.finished_req_ids))
        self._loads, self._sends = [], []
        return jobs

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        raise AssertionError("it knows groups")

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        assert RequestStatus.is_finished(request.status)
        assert "finished" not in self.calls[request_id], "told twice of the end"
        self.calls[request_id].append("finished")
        self._loads = [job for job in self._loads if job.request_id != request_id]
        is_cut_off = request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
        if not self.options.send_steps or is_cut_off or not any(block_ids):
            return False, None
        pieces = [Piece(group, block, b"") for group, table in enumerate(block_ids) for block in table]
        self._sends.append(Job(request_id, pieces, self.options.send_steps, list(request.all_token_ids)))
        return True, {"sent_by": request_id, "num_tokens": request.num_computed_tokens}

    def update_connector_output(self, connector_output: Any) -> None:
        done = connector_output.kv_connector_worker_meta or []
        self._pool.free_blocks([self._pool.blocks[block] for block in done])
        self._num_pinned -= len(done)

    def has_pending_push_work(self) -> bool:
        return self._num_pinned > 0

    def reset_cache(self) -> bool:
        self.store.clear()
        self.was_reset = True
        return True
