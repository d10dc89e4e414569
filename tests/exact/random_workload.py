# SPDX-License-Identifier: Apache-2.0
"""Random agentic traffic: sessions that share prefixes, re-send their history each turn, and hang up at any time."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from scheduler_knobs import Group, Knobs

from exact.workload import BEFORE_SCHEDULE, BEFORE_UPDATE, Arrival, Reset, Workload, words


@dataclass(frozen=True)
class Traffic:
    """Bounds of the random draws; lengths in tokens, times in ticks."""

    num_sessions: int = 12
    max_turns: int = 3
    max_shared: int = 20
    max_new: int = 20
    max_output: int = 24
    max_gap: int = 3
    abort_share: float = 0.15
    stop_share: float = 0.3
    num_resets: int = 0
    num_salts: int = 1
    num_priorities: int = 1


def random_workload(seed: int, traffic: Traffic, max_model_len: int) -> Workload:
    """A workload that depends on its seed only."""
    draw = random.Random(seed)
    arrivals: list[Arrival] = []
    tick = 0
    for session in range(traffic.num_sessions):
        tick += draw.randint(0, traffic.max_gap)
        arrivals.extend(_session(draw, traffic, max_model_len, session, tick))
    resets = [Reset(draw.randint(0, tick + 20), draw.random() < 0.5) for _ in range(traffic.num_resets)]
    return Workload(arrivals, resets, seed)


def _session(draw: random.Random, traffic: Traffic, max_model_len: int, session: int, tick: int) -> list[Arrival]:
    stream = draw.randrange(3)
    prompt = words(stream, draw.randint(0, traffic.max_shared))
    salt = draw.choice([None, "a", "b", "c"][: traffic.num_salts])
    priority = draw.randrange(traffic.num_priorities)
    turns: list[Arrival] = []
    for turn in range(draw.randint(1, traffic.max_turns)):
        prompt = prompt + words(1000 * session + turn + 10, draw.randint(1, traffic.max_new))
        if len(prompt) >= max_model_len - 1:
            break
        arrival = Arrival(
            tick=draw.randint(0, traffic.max_gap) if turns else tick,
            request_id=f"s{session}.{turn}",
            prompt=prompt,
            max_tokens=draw.randint(1, traffic.max_output),
            priority=priority,
            cache_salt=salt,
            after=turns[-1].request_id if turns else None,
        )
        _add_stop(draw, traffic, arrival, max_model_len)
        if draw.random() < traffic.abort_share:
            arrival.abort_tick = draw.randint(0, 3 * traffic.max_output)
            arrival.abort_phase = draw.choice([BEFORE_SCHEDULE, BEFORE_UPDATE])
        turns.append(arrival)
        prompt = prompt + list(arrival.answer(max_model_len).tokens)
    return turns


def _add_stop(draw: random.Random, traffic: Traffic, arrival: Arrival, max_model_len: int) -> None:
    """Makes a token of the answer a stop token or the EOS, at times behind min_tokens."""
    if draw.random() >= traffic.stop_share:
        return
    token = draw.choice(arrival.answer(max_model_len).tokens)
    if draw.random() < 0.5:
        arrival.eos_token_id = token
    else:
        arrival.stop_token_ids = (token,)
    if draw.random() < 0.5:
        arrival.min_tokens = draw.randint(0, arrival.max_tokens)


def random_knobs(seed: int, base: Knobs, workload: Workload) -> Knobs:
    """Draws budgets, block sizes and groups; the pool always fits the largest request alone, at times barely."""
    draw = random.Random(seed * 2 + 1)
    block_tokens = draw.choice([2, 4, 8])
    groups = [(Group(block_tokens),), (Group(block_tokens), Group(block_tokens, draw.choice([3, 6, 17])))]
    knobs = replace(
        base,
        groups=draw.choice(groups),
        budget_tokens=draw.choice([8, 16, 32, 64]),
        max_num_seqs=draw.choice([2, 4, 8, 16]),
        prefix_caching=draw.random() < 0.8,
        match_tokens=draw.choice([128, 128, 2, 4]),
    )
    return replace(knobs, num_blocks=pool_for(knobs, workload) * draw.choice([4, 5, 6, 12]) // 4)


def pool_for(knobs: Knobs, workload: Workload) -> int:
    """Blocks that the largest request of a workload needs when it is alone."""
    longest = max((arrival.most_tokens for arrival in workload.arrivals), default=1)
    num_tokens = min(longest, knobs.max_model_len) + knobs.num_spec_tokens
    return sum(-(-num_tokens // group.block_tokens) + 1 for group in knobs.groups)
