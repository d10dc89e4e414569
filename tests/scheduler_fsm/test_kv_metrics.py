# SPDX-License-Identifier: Apache-2.0
"""The KV cache at `/metrics`: what happens in the scheduler stands in the real Prometheus registry, beside vLLM's metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from exact.watched import WatchedTimeline
from exact.workload import words
from scheduler_knobs import Group, Knobs
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from tokenspeed_plugin.entry_points.stats import KvCacheStatLogger
from tokenspeed_plugin.host import patches
from tokenspeed_plugin.scheduler_fsm import kv_cache_report

pytestmark = pytest.mark.host_matrix
REASONS = ("evicted", "granularity", "missing_state", "isolation")


class Watched(WatchedTimeline):
    """Every report goes through the manager that vLLM's engines have."""

    prefix = "vllm:tokenspeed_kv_"

    def __init__(self, knobs: Knobs, scheduler: str = "tokenspeed") -> None:
        super().__init__(scheduler, knobs, [] if scheduler == "vllm" else [KvCacheStatLogger])

    def counters(self) -> dict[str, int]:
        scheduler = self.scheduler
        core = scheduler._core if hasattr(scheduler, "_core") else scheduler.kv_cache_manager._kv
        return core.counters() | core.eviction_counts()

    def lost(self) -> dict[str, float]:
        """Lost tokens by reason, without zeros."""
        values = {reason: self.value("lost_hit_tokens_total", reason=reason) for reason in REASONS}
        assert None not in values.values(), "every reason is shown, also before it happens"
        return {reason: value for reason, value in values.items() if value}

    def serve(self, name: str, prompt: list[int], **fields: Any) -> None:
        self.submit(name, prompt, 1, **fields)
        self.finish()


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    yield
    unregister_vllm_metrics()


@pytest.fixture(params=["tokenspeed", "flat"])
def either(request: pytest.FixtureRequest) -> str:
    """The flat KV manager under our scheduler, and under vLLM's own."""
    return str(request.param)


def test_what_was_evicted_is_named_as_lost(either: str) -> None:
    run = Watched(Knobs(groups=(Group(4),), num_blocks=8), either)
    run.serve("first", words(1, 16))
    assert run.lost() == {}
    run.serve("other", words(2, 32))
    run.serve("again", words(1, 16))
    # Of the four blocks all are gone; the last token is computed in any case.
    assert run.lost() == {"evicted": 12.0}
    assert run.value("evictions_total", kind="idle") == run.counters()["evictions_idle"] > 0


def evict_superseded(run: Watched) -> None:
    """A second answer to the same prompt leaves the first one's tail behind; the tail goes first."""
    for number in range(2):
        run.serve(f"turn{number}", words(1, 16) + words(2 + number, 16), extra={"session_id": "s"})
    run.serve("other", words(9, 72))


def evict_hinted(said: dict[str, Any], num_tokens: int) -> Callable[[Watched], None]:
    def drive(run: Watched) -> None:
        run.serve("hinted", words(1, 16), extra={"extra_args": said})
        run.serve("other", words(9, num_tokens))

    return drive


KINDS: dict[str, Callable[[Watched], None]] = {
    "superseded": evict_superseded,
    "ended": evict_hinted({"kv_session_ends": 1}, 72),
    "expected": evict_hinted({"kv_return_in_s": 3000}, 72),
    "pinned": evict_hinted({"kv_pin_s": 600}, 72),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_eviction_is_counted_by_its_name(kind: str) -> None:
    run = Watched(Knobs(groups=(Group(4),), num_blocks=20, budget_tokens=64, max_model_len=128))
    assert run.value("evictions_total", kind=kind) == 0
    KINDS[kind](run)
    assert run.value("evictions_total", kind=kind) == run.counters()[f"evictions_{kind}"] > 0


def test_what_a_match_had_to_leave_is_named_as_granularity(either: str) -> None:
    run = Watched(Knobs(groups=(Group(8),), num_blocks=20, match_tokens=2), either)
    # A block that is written in the same step cannot be copied from.
    run.submit("first", words(1, 14), 1)
    run.submit("twin", words(1, 14), 1)
    run.finish()
    assert run.lost() == {"granularity": 4.0}
    assert run.value("block_copies_total") == 0
    run.serve("later", words(1, 13) + words(9, 4))
    assert run.value("block_copies_total") == run.counters()["block_copies"] == 1


def test_what_a_window_no_longer_holds_is_named_as_missing_state(either: str) -> None:
    run = Watched(Knobs(groups=(Group(4), Group(4, 4)), num_blocks=24, max_num_seqs=2), either)
    run.submit("long", words(1, 40), 20)
    run.ticks(4)
    for number in range(4):
        run.submit(f"other{number}", words(5 + number, 20), 1)
        run.ticks(3)
    run.submit("again", words(1, 16) + words(9, 4), 1)
    run.finish()
    assert run.lost()["missing_state"] == 16.0


def test_what_a_salt_hides_is_named_as_isolation(either: str) -> None:
    run = Watched(Knobs(groups=(Group(4),), num_blocks=40), either)
    run.serve("mine", words(1, 16), cache_salt="a")
    run.serve("theirs", words(1, 12) + words(2, 8), cache_salt="b")
    assert run.lost() == {"isolation": 12.0}
    run.serve("mine again", words(1, 16), cache_salt="a")
    assert run.lost() == {"isolation": 12.0}, "what is cached under the own salt is no loss"
    run.serve("new", words(3, 16))
    assert run.lost() == {"isolation": 12.0}


def test_where_two_prompts_part_the_second_lacks_the_states() -> None:
    run = Watched(Knobs((Group(16, keeps_state=True), Group(16)), num_blocks=60, max_model_len=256))
    for number in range(3):
        run.serve(f"r{number}", words(1, 48) + words(10 + number, 20))
    lost = run.counters()["stateless_tokens"]
    assert run.lost() == {"missing_state": lost}
    assert lost == 48 - run.cached["r1"] > 0
    assert run.cached["r2"] == 48


def test_a_state_that_finds_no_block_is_counted() -> None:
    """Each of the two prompts needs all blocks; nobody but the metric would notice the states that were not kept."""
    groups = (Group(16, keeps_state=True), Group(16))
    run = Watched(Knobs(groups, num_blocks=5, budget_tokens=96, match_tokens=4, max_model_len=128))
    for number in range(2):
        run.submit(f"r{number}", words(number, 44), 4)
        run.finish()
    assert run.value("skipped_states_total") == run.counters()["lost_checkpoints"] > 0


def test_blocks_and_fragmentation_follow_the_pool(monkeypatch: pytest.MonkeyPatch, either: str) -> None:
    monkeypatch.setattr(kv_cache_report, "PERIOD_S", 0.0)
    run = Watched(Knobs(groups=(Group(16),), num_blocks=10), either)

    def blocks() -> dict[str, float | None]:
        return {state: run.value("blocks", state=state) for state in ("free", "cached", "pinned", "in_use")}

    run.submit("running", words(1, 18), 4)
    run.ticks(2)
    assert blocks() == {"free": 8, "cached": 0, "pinned": 0, "in_use": 2}
    assert run.value("fragmentation_perc") == pytest.approx((32 - 18) / 32, abs=0.07)
    run.finish()
    run.serve("pinned", words(2, 32), extra={"extra_args": {"kv_pin_s": 600}})
    assert blocks() == {"free": 7, "cached": 1, "pinned": 2, "in_use": 0}
    assert run.value("fragmentation_perc") == 0


def test_nothing_of_it_reaches_the_loggers_of_vllm() -> None:
    run = Watched(Knobs(groups=(Group(4),), num_blocks=40))
    run.serve("one", words(1, 16))
    assert run.left_over
    assert all(not left for left in run.left_over)
    run.manager.log()


def test_a_second_engine_in_the_process_starts_anew() -> None:
    for _ in range(2):
        run = Watched(Knobs(groups=(Group(4),), num_blocks=8))
        run.serve("first", words(1, 16))
        run.serve("other", words(2, 32))
        run.serve("again", words(1, 16))
        assert run.lost() == {"evicted": 12.0}


def test_a_step_in_between_costs_one_look_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_report, "PERIOD_S", 3600.0)
    run = Watched(Knobs(groups=(Group(4),), num_blocks=40))
    report = run.scheduler._statistics._kv_cache
    run.submit("one", words(1, 16), 20)
    run.ticks(3)
    report._core = None  # any question would fail
    run.ticks(10)


def test_only_engines_with_the_scheduler_get_the_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    monkeypatch.setattr(StatLoggerManager, "__init__", lambda self, *args, **kwargs: built.append((args, kwargs)))
    patches.install_stat_loggers(lambda config: [KvCacheStatLogger] if config == "ours" else [])
    patches.install_stat_loggers(lambda config: [])
    assert patches.STAT_LOGGERS.is_installed
    StatLoggerManager("ours", custom_stat_loggers=["theirs"], client_count=2)
    StatLoggerManager(vllm_config="stock", engine_idxs=[0], custom_stat_loggers=None)
    assert [args[2] for args, _ in built] == [[KvCacheStatLogger, "theirs"], None]
    assert built[0][1] == {"client_count": 2}
