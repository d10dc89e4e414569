# SPDX-License-Identifier: Apache-2.0
"""vLLM's KVCacheManager over the flat KV manager."""

import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokenspeed_plugin.host.log import logger
from tokenspeed_plugin.host.names import KVCacheBlockCopy, KVCacheBlocks, RequestStatus
from tokenspeed_plugin.kv_flat.groups import groups_from
from tokenspeed_plugin.kv_flat.pool_facade import allocated_blocks
from tokenspeed_plugin.scheduler_fsm import config_map
from tokenspeed_plugin.scheduler_fsm._core import HostedKv, SessionHints
from tokenspeed_plugin.scheduler_fsm.capacity_report import log_capacity
from tokenspeed_plugin.scheduler_fsm.hosted.blocks import FlatBlocks, FlatCoordinator, GroupManager, HostedPool
from tokenspeed_plugin.scheduler_fsm.hosted.reports import ManagerReports
from tokenspeed_plugin.scheduler_fsm.kv_map_source import KvMapSource
from tokenspeed_plugin.scheduler_fsm.session_hints import SessionNames, session_hints

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import (
        KVCacheBlock,
        KVCacheConfig,
        KVCacheMetricsCollector,
        Request,
        VllmConfig,
    )
    from tokenspeed_plugin.scheduler_fsm.request_import import PromptImporter

_ADMITTED = frozenset({RequestStatus.WAITING, RequestStatus.PREEMPTED})


class FlatKvCacheManager(ManagerReports):
    """The members that vLLM's scheduler, EngineCore and KV connectors use. Nothing of a block is kept in Python."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        prompts: "PromptImporter",
        kv_cache_config: "KVCacheConfig",
        *,
        max_model_len: int,
        hash_block_size: int,
        enable_caching: bool = True,
        use_eagle: bool = False,
        num_hash_lookahead_tokens: int = 0,
        log_stats: bool = False,
        metrics_collector: "KVCacheMetricsCollector | None" = None,
        watermark: float = 0.0,
        enable_kv_cache_events: bool = False,
        **_: Any,
    ) -> None:
        """Take vLLM's arguments, and what is behind them.

        Args:
            vllm_config: vLLM's configuration; the eviction policy, the length of steps in flight and the ranks come from it.
            prompts: hashes prompts; the engine's block hasher.
            kv_cache_config: groups and number of blocks.
            max_model_len: tokens of the longest sequence.
            hash_block_size: tokens behind one of vLLM's block hashes.
            enable_caching: prefix caching.
            use_eagle: the last block of a match is computed again, for the drafter.
            num_hash_lookahead_tokens: tokens behind a block that its key names as well; makes `use_eagle` unnecessary.
            log_stats: hit rates are wanted.
            metrics_collector: takes the lives of blocks.
            watermark: share of the blocks that admission leaves free.
            enable_kv_cache_events: events are wanted.
        """
        key_tokens = config_map.key_tokens(kv_cache_config, hash_block_size)
        has_connector = vllm_config.kv_transfer_config is not None
        config = config_map.kv_config(vllm_config, kv_cache_config, key_tokens)
        drops_last = use_eagle and not num_hash_lookahead_tokens
        log_capacity(config, kv_cache_config, max_model_len, drops_last=drops_last)
        kv = HostedKv(
            config=config,
            drop_last_match_block=drops_last,
            whole_blocks_only=has_connector,
            zeroes_blocks=bool(kv_cache_config.needs_kv_cache_zeroing),
        )
        super().__init__(
            kv,
            [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups],
            enable_caching=enable_caching,
            log_stats=log_stats,
            metrics_collector=metrics_collector,
            enable_kv_cache_events=enable_kv_cache_events,
        )
        self._prompts = prompts
        self.session_names: SessionNames | None = None
        self.kv_map = KvMapSource(kv, self, kv_cache_config, key_tokens)
        # Only connectors look at vLLM's hashes of blocks.
        self._requests: dict[str, Request] | None = {} if has_connector else None
        # Prompts of sessions with streaming input, which grow: tokens that were taken in.
        self._session_tokens: dict[str, int] = {}
        self.max_model_len = max_model_len
        self.kv_cache_config = kv_cache_config
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.mamba_shared_prefix_checkpoint = False
        self.block_pool = HostedPool(kv, kv_cache_config.num_blocks, hash_block_size)
        groups = kv_cache_config.kv_cache_groups
        self.num_kv_cache_groups = len(groups)
        num_ranks = vllm_config.parallel_config.decode_context_parallel_size
        self._block_tokens = [group.block_tokens for group in groups_from(groups, num_ranks)]
        specs = [group.kv_cache_spec for group in groups]
        managers = [GroupManager(*pair) for pair in zip(self._block_tokens, specs, strict=True)]
        self.coordinator = FlatCoordinator(kv, managers, self.block_pool)
        self.empty_kv_cache_blocks = KVCacheBlocks(tuple(() for _ in groups))
        self._fresh_blocks = functools.partial(self._as_blocks, num_cached_tokens=0, hashes=())

    # -- a step ----------------------------------------------------------------------------------------------------------------

    def new_step_starts(self) -> None:
        """A step is about to be planned."""
        self._kv.begin_step(time.monotonic())

    def get_computed_blocks(
        self, request: "Request", max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int]:
        """Look a request up.

        Returns:
            What was found as a token of it for `allocate_slots`, its length in tokens, and 0: no group keeps states.
        """
        kv, request_id = self._kv, request.request_id
        if not kv.knows(request_id):
            self._take_in(request)
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        if max_cache_hit_length is None:
            max_cache_hit_length = request.num_tokens - 1
        num_tokens = kv.probe(request_id, max_cache_hit_length, min(request.num_tokens, self.max_model_len))
        if num_tokens and self.enable_kv_cache_events and getattr(request, "kv_cache_report_mode", "") == "full":
            kv.record_match(request_id)
        return self.empty_kv_cache_blocks, num_tokens, 0

    def get_computed_blocks_for_connector(
        self, request: "Request", max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        """The same, and False: all groups agree on the length."""
        return *self.get_computed_blocks(request, max_cache_hit_length), False

    def truncate_computed_blocks(self, blocks: KVCacheBlocks, num_computed_tokens: int) -> KVCacheBlocks:
        """A shorter match is taken by its length alone."""
        del num_computed_tokens
        return blocks

    def allocate_slots(
        self,
        request: "Request",
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: Sequence[int] = (),
    ) -> KVCacheBlocks | None:
        """Blocks for more tokens; the arguments are those of vLLM.

        Returns:
            The new blocks, None when there are too few.
        """
        del new_computed_blocks, num_encoder_tokens
        most_tokens = self.max_model_len
        num_computed = request.num_computed_tokens + num_new_computed_tokens + num_external_computed_tokens
        if num_new_tokens == 0 and not (num_new_computed_tokens or num_external_computed_tokens):
            msg = f"allocate_slots: request {request.request_id} asks for 0 tokens and adopts none"
            raise ValueError(msg)
        if request.resumable and self._session_tokens.get(request.request_id) != request.num_prompt_tokens:
            self._take_in(request)
        num_tokens = request.num_tokens
        num_covered = min(num_computed, most_tokens) + num_new_tokens
        num_watermark = self.watermark_blocks
        if num_watermark and not (has_scheduled_reqs and request.status in _ADMITTED):
            num_watermark = 0
        num_settled = num_computed
        if not num_external_computed_tokens:
            num_settled = max(0, num_computed - request.num_in_flight_tokens)
        ids = self._kv.grow(
            request.request_id,
            request._all_token_ids,
            num_new_computed_tokens,
            num_external_computed_tokens,
            num_settled,
            min(num_covered + num_lookahead_tokens, most_tokens),
            0 if delay_cache_blocks else min(num_covered, num_tokens),
            min(num_tokens, most_tokens) if full_sequence_must_fit else 0,
            reserved_blocks + num_watermark,
            num_watermark,
            skip_zeroing_group_ids,
        )
        if ids is None:
            return None
        return FlatBlocks(ids, self._fresh_blocks) if ids else self.empty_kv_cache_blocks

    def take_kv_cache_block_copies(self) -> "tuple[list[KVCacheBlockCopy], list[KVCacheBlock]]":
        """Copies that run before the step, and both ends of them, to be freed when it is done."""
        pairs = self._kv.take_copies()
        copies = [KVCacheBlockCopy(src_block_id=source, dst_block_id=target) for source, target in pairs]
        return copies, self.block_pool.pinned_blocks(block for pair in pairs for block in pair)

    def take_new_block_ids(self) -> list[int]:
        """Blocks to zero before the step. vLLM asks last, once the step is planned."""
        self._kv.end_step()
        return self._kv.take_blocks_to_zero()

    def record_blocks_for_zeroing(self, request_id: str, start_token: int) -> None:
        """Have a request's blocks zeroed again from `start_token` on, which a failed load left unwritten."""
        self._kv.zero_from(request_id, start_token)

    # -- what is computed ------------------------------------------------------------------------------------------------------

    def cache_blocks(self, request: "Request", num_computed_tokens: int) -> None:
        """Make the first `num_computed_tokens` of a request hittable."""
        if self.enable_caching:
            self._kv.publish(request.request_id, request._all_token_ids, num_computed_tokens)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Give back what no token at or after `processed_computed_tokens` reads."""
        del num_prompt_tokens
        self._kv.retire(request_id, processed_computed_tokens)

    def estimate_cached_tokens(self, request: "Request") -> int:
        """Tokens of a request that others can hit."""
        return self._kv.num_published_tokens(request.request_id)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Make these blocks unhittable."""
        self.block_pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content. False, and no change, while blocks are in use."""
        done = self._kv.reset()
        if done and self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return done

    # -- ends ------------------------------------------------------------------------------------------------------------------

    def free(self, request: "Request") -> None:
        """Give back the blocks of a request that ended or is preempted."""
        self._kv.release(request.request_id, *_turn(request))
        self._forget_ended(request)

    def pop_blocks_for_free(self, request: "Request") -> "list[KVCacheBlock]":
        """The same, put off until `block_pool.free_blocks` gets them in reverse."""
        request_id = request.request_id
        departure = self._kv.departure(request_id, *_turn(request))
        blocks = self.block_pool.leaving_blocks(self._kv.release_into_pins(request_id), departure)
        self._forget_ended(request)
        return blocks

    # -- looks -----------------------------------------------------------------------------------------------------------------

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """A request's blocks by group."""
        return self._kv.block_ids(request_id)

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The same; as objects, those of its match carry vLLM's hash."""
        request = None if self._requests is None else self._requests.get(request_id)
        make = self._fresh_blocks
        if request is not None:
            num_cached = self._kv.num_hit_tokens(request_id)
            make = functools.partial(self._as_blocks, num_cached_tokens=num_cached, hashes=request.block_hashes)
        return FlatBlocks(self._kv.block_ids(request_id), make)

    def get_block_ids_for_computed_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[list[int], ...]:
        """Blocks of a request's first tokens, by group."""
        table = zip(self._kv.block_ids(request_id), self._block_tokens, strict=True)
        return tuple(ids[: -(-num_computed_tokens // block_tokens)] for ids, block_tokens in table)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """None: no runner of the supported versions makes use of common prefixes."""
        del running_request_id
        return [0] * self.num_kv_cache_groups

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """None: no group keeps states."""
        return {}

    def finalize_partial_tail_offloads(self, request: "Request") -> list[tuple[int, int, int]]:
        """None: no group keeps states."""
        del request
        return []

    def _take_in(self, request: "Request") -> None:
        hints = _hints(request)
        self._kv.open(request.request_id, self._prompts.take(request), hints)
        if self.session_names is not None and request.session_id:
            self.session_names.note(hints.session, request.session_id)
        if request.resumable:
            self._session_tokens[request.request_id] = request.num_prompt_tokens
        if self._requests is not None:
            self._requests[request.request_id] = request

    def _forget_ended(self, request: "Request") -> None:
        if request.is_finished():
            self._kv.close(request.request_id)
            self._session_tokens.pop(request.request_id, None)
            if self._requests is not None:
                self._requests.pop(request.request_id, None)

    def _as_blocks(
        self, ids: tuple[list[int], ...], *, num_cached_tokens: int, hashes: Sequence[bytes]
    ) -> KVCacheBlocks:
        hash_tokens = self.block_pool.hash_block_size
        return allocated_blocks(ids, num_cached_tokens, self._block_tokens, hashes, hash_tokens)


def _turn(request: "Request") -> tuple[int, int]:
    """Tokens of prompt and output, for the eviction policy; 0 for one that is preempted, since it is back as soon as there is room."""
    return (request.num_prompt_tokens, request.num_output_tokens) if request.is_finished() else (0, 0)


def _hints(request: "Request") -> SessionHints:
    """What its client says about its session. Here no request can be refused any more, so bad hints count as none."""
    try:
        return session_hints(request)
    except ValueError as error:
        logger(__name__).warning("request %s: %s; its hints are ignored.", request.request_id, error)
        return SessionHints()
