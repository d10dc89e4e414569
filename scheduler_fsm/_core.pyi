# SPDX-License-Identifier: Apache-2.0
"""Types of the compiled core. Sizes are counts of tokens or blocks; handles are opaque integers."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

core_version: str
key_format: str

class Retention(Enum):
    FULL = ...
    SLIDING_WINDOW = ...
    STATE = ...

class KvEventKind(Enum):
    STORED = ...
    REMOVED = ...
    CLEARED = ...

class QueuePolicy(Enum):
    FCFS = ...
    PRIORITY = ...

class PauseLevel(Enum):
    NONE = ...
    NEW = ...
    ALL = ...

class FinishReason(Enum):
    STOP = ...
    LENGTH = ...
    ABORT = ...
    TIMEOUT = ...
    ERROR = ...
    REPETITION = ...

class RefusedRequest(ValueError): ...  # noqa: N818

class GroupSpec:
    name: str
    block_tokens: int
    retention: Retention
    window_tokens: int
    def __init__(self, *, name: str, block_tokens: int, retention: Retention, window_tokens: int = 0) -> None: ...
    def max_held_blocks(self, num_tokens: int, in_flight_tokens: int) -> int: ...

class EvictionSpec:
    name: str
    def __init__(
        self,
        *,
        name: str = "session",
        idle_scale_s: float = 18.0,
        output_exponent: float = 0.5,
        prompt_exponent: float = 0.4,
        superseded_first: bool = True,
        use_hints: bool = True,
    ) -> None: ...

class SessionHints:
    @property
    def session(self) -> int: ...
    def __init__(
        self, *, session: str = "", ends: bool = False, return_in_s: float = -1.0, pin_s: float = 0.0
    ) -> None: ...

class Departure:
    def __init__(
        self, *, num_prompt_tokens: int = 0, num_output_tokens: int = 0, hints: SessionHints = ...
    ) -> None: ...

class KvConfig:
    num_blocks: int
    key_tokens: int
    in_flight_tokens: int
    prefix_caching: bool
    record_events: bool
    residency_sample_rate: float
    eviction: EvictionSpec
    groups: list[GroupSpec]
    def __init__(self) -> None: ...

class EncoderLimits:
    step_embeds: int
    cache_embeds: int
    split_inputs: bool
    def __init__(self, *, step_embeds: int, cache_embeds: int, split_inputs: bool) -> None: ...

class SchedulerConfig:
    kv: KvConfig
    policy: QueuePolicy
    max_num_seqs: int
    max_num_active_seqs: int
    max_scheduled_tokens: int
    max_model_tokens: int
    long_prefill_tokens: int
    long_prefill_adaptive: bool
    prefill_interval_steps: int
    chunked_prefill: bool
    reserve_full_sequence: bool
    watermark: float
    async_scheduling: bool
    decode_stagger_steps: int
    num_sampled_tokens: int
    num_draft_tokens: int
    draft_tokens_by_batch: list[int]
    lookahead_tokens: int
    drafter_slots: int
    drop_last_match_block: bool
    max_adapters: int
    encoder: EncoderLimits
    target_tps: float

class RunnerProtocol:
    def __init__(
        self, *, resumed_as_new: bool, sends_history: bool, sends_new_tokens: bool, zeroes_blocks: bool
    ) -> None: ...

class PreparedPrompt:
    @property
    def num_tokens(self) -> int: ...
    @property
    def keys(self) -> list[bytes]: ...

def prepare_prompt(
    *,
    tokens: list[int],
    key_tokens: int,
    salt: str = "",
    adapter: str = "",
    content_spans: Sequence[tuple[int, int, str]] = (),
    lookahead_tokens: int = 0,
    encoder_inputs: Sequence[tuple[str, int, int, Sequence[tuple[int, int]]]] = (),
    marks_content: bool = False,
) -> PreparedPrompt: ...

class StopRules:
    def __init__(
        self,
        *,
        eos_token: int | None,
        stop_tokens: Sequence[int],
        min_tokens: int,
        max_tokens: int,
        repetition: tuple[int, int, int] = (0, 0, 0),
    ) -> None: ...

class PlanColumns:
    step: int
    num_tokens: int
    num_scheduled_tokens: dict[str, int]
    new_rows: list[tuple[Any, tuple[list[int], ...], int, list[int] | None]]
    admitted: list[tuple[Any, int, int]]
    prefetching: list[Any]
    has_sync_loads: bool
    req_ids: list[str]
    resumed_req_ids: set[str]
    new_token_ids: list[list[int]]
    all_token_ids: dict[str, list[int]]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]
    spec_tokens: dict[str, list[int]]
    retracted: list[Any]
    ended: list[Any]
    blocks_to_zero: list[int] | None
    block_copies: list[tuple[int, int]] | None
    encoder_inputs: dict[str, list[int]] | None
    evicted_encoder_outputs: list[str] | None
    consumed_inputs: list[tuple[Any, int]] | None
    num_run_embeds: int
    grammar_req_ids: list[str]
    num_next_drafts: int
    drafts_are_unused: bool
    waits_for_grammar_tokens: bool

SpecialRow = tuple[Any, int, int, list[int], int, int | None, int, int]
DraftTally = tuple[int, int, int, list[int], list[int]]

class Core:
    def __init__(self, *, config: SchedulerConfig, protocol: RunnerProtocol, output_class: type) -> None: ...
    def submit(
        self,
        *,
        req_id: str,
        request: Any,
        prompt: PreparedPrompt,
        stop: StopRules,
        client_index: int,
        priority: int,
        arrival_time_s: float,
        adapter: int,
        may_read_cache: bool,
        ready: bool,
        is_plain: bool,
        has_grammar: bool,
        is_session: bool,
        hints: SessionHints = ...,
    ) -> int: ...
    def feed(
        self,
        handle: int,
        *,
        chunk: PreparedPrompt,
        stop: StopRules,
        arrival_time_s: float,
        is_plain: bool,
        has_grammar: bool,
    ) -> list[int]: ...
    def open_gate(self, handle: int) -> None: ...
    def plan(self, pause: PauseLevel, throttle_prefills: bool, now_s: float = 0.0) -> PlanColumns: ...
    def advance(
        self,
        step: int,
        sampled: list[list[int]],
        req_ids: list[str],
        positions: dict[str, int],
        all_special: bool,
        now_s: float = 0.0,
    ) -> tuple[dict[int, list[Any]], list[SpecialRow], DraftTally | None] | None: ...
    def finish(self, handle: int, why: FinishReason) -> bool: ...
    def release(self, handle: int) -> None: ...
    def set_drafts(self, handle: int, drafts: list[int]) -> None: ...
    def retract_all(self) -> list[Any]: ...
    def reset_prefix_cache(self) -> bool: ...
    def reset_encoder_cache(self) -> None: ...
    @property
    def encoder_limits(self) -> EncoderLimits: ...
    def drain_kv_events(self) -> list[tuple[KvEventKind, int, int, bytes, bytes | None, list[int]]]: ...
    def drain_block_lives(self) -> list[tuple[float, float, tuple[float, ...]]]: ...
    def counters(self) -> dict[str, int]: ...
    def eviction_counts(self) -> dict[str, int]: ...
    def kv_gauges(self) -> dict[str, float]: ...
    def kv_map(self) -> dict[str, Any]: ...
    def pace(self) -> dict[str, float]: ...
    def set_chunk_budget(self, budget: Callable[[Any], int]) -> None: ...
    def check_integrity(self) -> None: ...
    def attach_connector(
        self,
        *,
        offer: Callable[[Any, int], tuple[int | None, bool]],
        accept: Callable[[Any, tuple[list[int], ...], int, int], None],
        needs_delivery: bool,
    ) -> None: ...
    def let_go(self, handle: int, awaits_send: bool) -> None: ...
    def load_done(self, handle: int) -> bool: ...
    def send_done(self, handle: int) -> bool: ...
    def fail_load(self, handle: int) -> None: ...
    def is_draining(self, handle: int) -> bool: ...
    def has_failed_load(self, handle: int) -> bool: ...
    def invalidate(self, blocks: list[int]) -> list[Any]: ...
    def recompute(self, handle: int) -> None: ...
    def block_ids(self, handle: int) -> tuple[list[int], ...]: ...
    def computed(self, handle: int) -> tuple[int, tuple[list[int], ...]]: ...
    def pin(self, blocks: list[int]) -> None: ...
    def unpin(self, blocks: list[int]) -> None: ...
    def num_owners(self, block: int) -> int: ...
    @property
    def num_draining(self) -> int: ...
    @property
    def num_holding_waiting(self) -> int: ...
    @property
    def num_unknown_reports(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_skipped(self) -> int: ...
    @property
    def num_awaiting_input(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...

class KvReplay:
    def __init__(self, *, config: KvConfig) -> None: ...
    def set_time(self, now_s: float) -> None: ...
    def serve(self, prompt: PreparedPrompt, departure: Departure) -> int: ...
    def probe(self, prompt: PreparedPrompt) -> int: ...
    def hold(self, prompt: PreparedPrompt, departure: Departure) -> int: ...
    def let_go(self, held: int) -> None: ...
    def cycle(self, num_tokens: int) -> None: ...
    def check_integrity(self) -> None: ...
    def free_order(self) -> list[int]: ...
    def eviction_counts(self) -> dict[str, int]: ...
    @property
    def bytes_per_block(self) -> float: ...
