# SPDX-License-Identifier: Apache-2.0
"""What clients say about their sessions: it decides what is evicted, and a bad hint fails alone."""

from __future__ import annotations

from typing import Any

import pytest
from exact.timeline import Timeline
from scheduler_harness import Knobs

from tokenspeed_plugin.hooks import HookError, hookimpl, plugin_manager
from tokenspeed_plugin.scheduler_fsm.eviction import eviction_spec
from tokenspeed_plugin.settings import SettingsError

pytestmark = pytest.mark.host_matrix
OURS = "tokenspeed"


def pool_of_ten() -> Timeline:
    """Ten blocks of four tokens."""
    return Timeline(OURS, Knobs(num_blocks=10, budget_tokens=64, max_num_seqs=4, max_model_len=64))


def leave(run: Timeline, name: str, prompt: int, **said: Any) -> None:
    run.submit(name, prompt, 1, **said)
    run.finish()


def evictions(run: Timeline) -> dict[str, int]:
    counts = run.scheduler._core.eviction_counts()
    return {kind: counts[f"evictions_{kind}"] for kind in ("superseded", "ended", "idle", "expected", "pinned")}


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ({"kv_session_ends": 1}, "ended"),
        ({"kv_return_in_s": 3000}, "expected"),
    ],
)
def test_what_will_not_be_needed_soon_goes_first(said: dict[str, Any], kind: str) -> None:
    run = pool_of_ten()
    leave(run, "old", 16)
    leave(run, "hinted", 16, extra={"extra_args": said})
    leave(run, "new", 20)
    assert evictions(run)[kind] > 0
    assert evictions(run)["idle"] == 0


def test_what_is_pinned_goes_last() -> None:
    run = Timeline(OURS, Knobs(num_blocks=20, budget_tokens=64, max_num_seqs=4, max_model_len=128))
    leave(run, "pinned", 16, extra={"extra_args": {"kv_pin_s": 600}})
    for number in range(6):
        leave(run, f"r{number}", 40 + number)
    assert evictions(run)["idle"] > 0
    assert evictions(run)["pinned"] == 0
    assert run.scheduler._core.eviction_counts()["cached_blocks_pinned"] == 4


@pytest.mark.parametrize(
    "said",
    [
        {"kv_session_ends": 2},
        {"kv_session_ends": "yes"},
        {"kv_return_in_s": -1},
        {"kv_return_in_s": float("nan")},
        {"kv_return_in_s": "soon"},
        {"kv_return_in_s": [1]},
        {"kv_pin_s": 1e9},
        {"kv_pin_s": True},
    ],
)
def test_a_malformed_hint_fails_alone_and_is_named(said: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    run = pool_of_ten()
    run.submit("odd", 8, 2, extra={"extra_args": said}, refused=True)
    run.submit("plain", 8, 2)
    run.finish()
    assert (run.outcome("odd"), run.outcome("plain")) == ("error", "length")
    ((key, value),) = said.items()
    assert f"vllm_xargs[{key!r}] is {value!r}; allowed: " in caplog.text


def test_what_others_put_there_is_left_alone() -> None:
    run = pool_of_ten()
    leave(run, "r", 8, extra={"extra_args": {"ngram_size": 3, "other": [1]}})
    assert run.outcome("r") == "length"


class Extra:
    """A distribution that brings policies."""

    def __init__(self, policies: dict[str, dict[str, Any]]) -> None:
        self._policies = policies

    @hookimpl
    def tokenspeed_eviction_policies(self) -> dict[str, dict[str, Any]]:
        return self._policies


@pytest.mark.parametrize(
    ("policies", "problem"),
    [
        ({"lru": {}}, "'lru' is there already"),
        ({"mine": {"no_such_weight": 1.0}}, "no_such_weight"),
        ({"mine": {"idle_scale_s": "long"}}, "'idle_scale_s': 'long'"),
    ],
)
def test_a_policy_that_cannot_be_is_named(policies: dict[str, dict[str, Any]], problem: str) -> None:
    plugin = Extra(policies)
    plugin_manager().register(plugin)
    try:
        with pytest.raises(HookError, match=problem):
            eviction_spec("mine")
    finally:
        plugin_manager().unregister(plugin)


def test_policies_are_found_by_name() -> None:
    plugin = Extra({"mine": {"idle_scale_s": 3.0, "use_hints": False}})
    plugin_manager().register(plugin)
    try:
        assert eviction_spec("mine").name == "session"
        with pytest.raises(SettingsError, match="'yours' is not an eviction policy; allowed: session, lru, mine"):
            eviction_spec("yours")
    finally:
        plugin_manager().unregister(plugin)
    assert eviction_spec("lru").name == "lru"


def test_the_setting_reaches_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_KV_EVICTION", "lru")
    run = pool_of_ten()
    leave(run, "old", 16)
    leave(run, "ended", 16, extra={"extra_args": {"kv_session_ends": 1}})
    leave(run, "new", 20)
    assert evictions(run)["ended"] == 0
    assert evictions(run)["idle"] > 0
