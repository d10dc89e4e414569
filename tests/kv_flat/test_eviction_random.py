# SPDX-License-Identifier: Apache-2.0
"""Whatever comes, goes, is pinned or hinted at: what somebody owns stays, what is pinned stays, and the pool balances."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_plugin.scheduler_fsm import _core

POOL_BLOCKS = 64
PIN_S = 20.0
MAX_HELD = 3
MAX_PINNED = 2


def pool(eviction: _core.EvictionSpec) -> _core.KvReplay:
    config = _core.KvConfig()
    config.num_blocks = POOL_BLOCKS + 1
    config.key_tokens = 1
    config.eviction = eviction
    config.groups = [_core.GroupSpec(name="full", block_tokens=1, retention=_core.Retention.FULL)]
    return _core.KvReplay(config=config)


@dataclass(frozen=True)
class Visit:
    """One sequence: a shared head, a tail of its own, and what its client says."""

    head: int
    tail: int
    num_head: int
    num_tail: int
    wait_s: float
    hold: bool
    hints: tuple[tuple[str, object], ...]

    @property
    def tokens(self) -> list[int]:
        head = [1000 * self.head + position for position in range(self.num_head)]
        return head + [100_000 + 1000 * self.tail + position for position in range(self.num_tail)]


hints = st.fixed_dictionaries(
    {},
    optional={
        "session": st.sampled_from(["a", "b", "c"]),
        "ends": st.booleans(),
        "return_in_s": st.sampled_from([-1.0, 0.0, 1.0, 50.0]),
        "pin_s": st.sampled_from([0.0, PIN_S]),
    },
).map(lambda said: tuple(said.items()))
visits = st.builds(
    Visit,
    head=st.integers(0, 2),
    tail=st.integers(0, 5),
    num_head=st.integers(0, 3),
    num_tail=st.integers(1, 4),
    wait_s=st.sampled_from([0.0, 1.0, 15.0]),
    hold=st.booleans(),
    hints=hints,
)


@dataclass
class Expectation:
    """What must still be cached."""

    held: dict[int, _core.PreparedPrompt] = field(default_factory=dict)
    pinned: list[tuple[float, _core.PreparedPrompt]] = field(default_factory=list)

    def check(self, replay: _core.KvReplay, now_s: float) -> None:
        replay.check_integrity()
        for prompt in self.held.values():
            assert replay.probe(prompt) == prompt.num_tokens, "an owned block was evicted"
        self.pinned = [(until_s, prompt) for until_s, prompt in self.pinned if until_s > now_s]
        for _, prompt in self.pinned:
            assert replay.probe(prompt) == prompt.num_tokens, "a pinned block was evicted while others were free"


@given(st.lists(visits, max_size=60), st.sampled_from(["session", "lru"]))
@settings(max_examples=150, deadline=None)
def test_owned_and_pinned_blocks_stay(traffic: list[Visit], policy: str) -> None:
    replay = pool(_core.EvictionSpec(name=policy))
    expected = Expectation()
    now_s = 0.0
    for visit in traffic:
        now_s += visit.wait_s
        replay.set_time(now_s)
        said = dict(visit.hints)
        pins = said.get("pin_s", 0.0) == PIN_S and not visit.hold and len(expected.pinned) < MAX_PINNED
        said["pin_s"] = PIN_S if pins else 0.0
        prompt = _core.prepare_prompt(tokens=visit.tokens, key_tokens=1)
        departure = _core.Departure(num_prompt_tokens=900, num_output_tokens=9, hints=_core.SessionHints(**said))
        if visit.hold:
            if len(expected.held) == MAX_HELD:
                oldest = min(expected.held)
                replay.let_go(oldest)
                del expected.held[oldest]
            expected.held[replay.hold(prompt, departure)] = prompt
        else:
            num_hit = replay.serve(prompt, departure)
            assert num_hit <= prompt.num_tokens
            if pins and policy == "session":
                expected.pinned.append((now_s + PIN_S, prompt))
        expected.check(replay, now_s)
    for held in list(expected.held):
        replay.let_go(held)
    expected.held.clear()
    expected.check(replay, now_s)
    assert len(set(replay.free_order())) == POOL_BLOCKS
