# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies: a configuration and the traffic it must survive."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st
from scheduler_knobs import Group, Knobs

from exact.random_workload import pool_for
from exact.workload import BEFORE_SCHEDULE, BEFORE_UPDATE, Arrival, Chunk, Reset, Workload, words


@dataclass(frozen=True)
class Scenario:
    """What one hypothesis example runs."""

    knobs: Knobs
    workload: Workload
    draft_right: float


@st.composite
def shapes(draw: st.DrawFn, max_depth: int) -> Knobs:
    """Everything but the pool, which depends on the traffic."""
    block_tokens = draw(st.sampled_from([1, 2, 4, 8, 12]))
    window_tokens = draw(st.none() | st.integers(1, 20))
    groups = [Group(block_tokens)]
    if window_tokens is not None:
        groups.append(Group(block_tokens, window_tokens))
    match_tokens = draw(st.sampled_from([128, 1, 2, 4]))
    runner = draw(st.sampled_from(["v1", "v2"]))
    return Knobs(
        groups=tuple(groups),
        budget_tokens=draw(st.integers(4, 32)),
        max_num_seqs=draw(st.integers(1, 8)),
        max_model_len=draw(st.sampled_from([48, 512])),
        runner=runner,
        pipeline_depth=draw(st.integers(1, max_depth if runner == "v2" else min(2, max_depth))),
        prefix_caching=draw(st.booleans()),
        match_tokens=match_tokens,
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        num_spec_tokens=draw(st.sampled_from([0, 0, 1, 3])),
        num_lora_adapters=draw(st.sampled_from([0, 0, 1, 2])),
    )


@st.composite
def session_hints(draw: st.DrawFn, session: int) -> dict[str, Any]:
    """What a client may say about its session; none of it may change an answer."""
    extra: dict[str, Any] = {"session_id": f"session{session}"} if draw(st.booleans()) else {}
    advice = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "kv_session_ends": st.integers(0, 1),
                "kv_return_in_s": st.sampled_from([0, 0.01, 30]),
                "kv_pin_s": st.sampled_from([0, 0.01, 30]),
            },
        )
    )
    return extra | ({"extra_args": advice} if advice else {})


@st.composite
def turns(draw: st.DrawFn, session: int, knobs: Knobs) -> list[Arrival]:
    """One session: each turn re-sends the history."""
    prompt = words(draw(st.integers(0, 2)), draw(st.integers(0, 20)))
    salt = draw(st.sampled_from([None, None, "a"]))
    lora_id = draw(st.integers(0, 3)) if knobs.num_lora_adapters else 0
    arrivals: list[Arrival] = []
    for turn in range(draw(st.integers(1, 3))):
        prompt = prompt + words(100 * session + turn + 10, draw(st.integers(1, 16)))
        if len(prompt) >= knobs.max_model_len - 1:
            break
        arrival = Arrival(
            tick=draw(st.integers(0, 12)),
            request_id=f"s{session}.{turn}",
            prompt=prompt,
            max_tokens=draw(st.integers(1, 16)),
            priority=draw(st.integers(0, 2)) if knobs.policy == "priority" else 0,
            cache_salt=salt,
            lora_id=lora_id,
            after=arrivals[-1].request_id if arrivals else None,
            abort_tick=draw(st.none() | st.none() | st.integers(0, 20)),
            abort_phase=draw(st.sampled_from([BEFORE_SCHEDULE, BEFORE_UPDATE])),
            extra=draw(session_hints(session)),
        )
        tokens = arrival.answer(knobs.max_model_len).tokens
        stop = draw(st.none() | st.integers(0, len(tokens) - 1))
        if stop is not None:
            if draw(st.booleans()):
                arrival.eos_token_id = tokens[stop]
            else:
                arrival.stop_token_ids = (tokens[stop],)
            arrival.min_tokens = draw(st.integers(0, arrival.max_tokens))
        arrivals.append(arrival)
        prompt = prompt + list(arrival.answer(knobs.max_model_len).tokens)
    return arrivals


@st.composite
def streams(draw: st.DrawFn, index: int, knobs: Knobs) -> Arrival:
    """A session with streaming input: chunks that come early, in time or late, and an end."""
    prompt = words(draw(st.integers(0, 2)), draw(st.integers(0, 12))) + words(index + 500, draw(st.integers(1, 8)))
    room = knobs.max_model_len - len(prompt) - 10
    chunks: list[Chunk] = []
    tick = 0
    for number in range(draw(st.integers(0, 4))):
        tick += draw(st.sampled_from([0, 1, 2, 5, 20]))
        chunk = Chunk(
            tick, tuple(words(100 * index + number + 1_000, draw(st.integers(1, 12)))), draw(st.integers(1, 8))
        )
        room -= len(chunk.prompt) + chunk.max_tokens
        if room < 1:
            break
        chunks.append(chunk)
    chunks.append(Chunk(tick + draw(st.integers(0, 30))))
    arrival = Arrival(
        tick=draw(st.integers(0, 12)),
        request_id=f"stream{index}",
        prompt=prompt,
        max_tokens=draw(st.integers(1, 8)),
        priority=draw(st.integers(0, 2)) if knobs.policy == "priority" else 0,
        lora_id=draw(st.integers(0, 3)) if knobs.num_lora_adapters else 0,
        abort_tick=draw(st.none() | st.none() | st.integers(0, 40)),
        abort_phase=draw(st.sampled_from([BEFORE_SCHEDULE, BEFORE_UPDATE])),
        chunks=tuple(chunks),
        extra={"resumable": True},
    )
    if draw(st.booleans()):
        arrival.stop_token_ids = (draw(st.sampled_from(arrival.answer(knobs.max_model_len).tokens)),)
    return arrival


@st.composite
def scenarios(draw: st.DrawFn, max_depth: int = 2, resets: bool = True, max_streams: int = 0) -> Scenario:
    """A configuration, its traffic, and a pool that barely or amply fits the largest request."""
    knobs = draw(shapes(max_depth))
    sessions = [draw(turns(session, knobs)) for session in range(draw(st.integers(1, 6)))]
    arrivals = [arrival for session in sessions for arrival in session]
    if max_streams:
        arrivals += [draw(streams(index, knobs)) for index in range(draw(st.integers(1, max_streams)))]
    events = st.builds(Reset, st.integers(0, 40), st.booleans())
    workload = Workload(arrivals, draw(st.lists(events, max_size=2)) if resets else [], seed=draw(st.integers(0, 99)))
    spare = draw(st.sampled_from([0, 1, 4, 30]))
    knobs = replace(knobs, num_blocks=pool_for(knobs, workload) + spare)
    return Scenario(knobs, workload, draw(st.sampled_from([0.0, 0.6, 1.0])))


@st.composite
def connectors(draw: st.DrawFn, fail_share: float) -> dict[str, object]:
    """What the connector is like."""
    return {
        "is_async": draw(st.booleans()),
        "load_steps": draw(st.integers(0, 4)),
        "undecided_share": draw(st.sampled_from([0.0, 0.5])),
        "whole_prompt": draw(st.booleans()),
        "send_steps": draw(st.sampled_from([0, 1, 3])),
        "save_steps": draw(st.sampled_from([0, 0, 1, 3])),
        "fail_share": fail_share,
        "fails_by_request": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }
