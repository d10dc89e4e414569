# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies: prompts with images, and encoder budgets and caches that are barely large enough."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from scheduler_knobs import Knobs

from exact.images import PLACEHOLDER_TOKEN, Image
from exact.random_workload import pool_for
from exact.strategies import Scenario, shapes
from exact.workload import BEFORE_SCHEDULE, BEFORE_UPDATE, Arrival, Reset, Workload, words

# Identifier -> mask: an identifier always stands for the same content, of the same size.
POOL = {
    "one": (True,),
    "dot": (False, True),
    "wide": (True,) * 7,
    "tiles": (False, True, True, False, True, True, False),
    "long": (True,) * 12,
    "frame": (False,) * 3 + (True,) * 2 + (False,) * 3,
    "text": (False, False),
}
LARGEST = max(sum(mask) for mask in POOL.values())


@st.composite
def prompts(draw: st.DrawFn, stream: int) -> tuple[list[int], tuple[Image, ...]]:
    """Text and images in turn; every image has the same placeholder token."""
    tokens: list[int] = []
    images = []
    for part in range(draw(st.integers(1, 4))):
        tokens += words(stream + part, draw(st.integers(0, 6)))
        if draw(st.booleans()):
            identifier = draw(st.sampled_from(sorted(POOL)))
            images.append(Image(identifier, len(tokens), POOL[identifier]))
            tokens += [PLACEHOLDER_TOKEN] * len(POOL[identifier])
    return tokens or words(stream, 1), tuple(images)


@st.composite
def turns(draw: st.DrawFn, session: int, knobs: Knobs) -> list[Arrival]:
    """One session: each turn sends the history again, images included."""
    tokens, images = draw(prompts(draw(st.integers(0, 2))))
    arrivals: list[Arrival] = []
    for turn in range(draw(st.integers(1, 3))):
        if len(tokens) >= knobs.max_model_len - 1:
            break
        arrival = Arrival(
            tick=draw(st.integers(0, 8)),
            request_id=f"s{session}.{turn}",
            prompt=tokens,
            max_tokens=draw(st.integers(1, 10)),
            priority=draw(st.integers(0, 2)) if knobs.policy == "priority" else 0,
            after=arrivals[-1].request_id if arrivals else None,
            abort_tick=draw(st.none() | st.none() | st.integers(0, 16)),
            abort_phase=draw(st.sampled_from([BEFORE_SCHEDULE, BEFORE_UPDATE])),
            images=images,
        )
        arrivals.append(arrival)
        more, new = draw(prompts(100 * session + 10 * turn + 10))
        base = [*tokens, *arrival.answer(knobs.max_model_len).tokens]
        images = (*images, *(replace(image, offset=image.offset + len(base)) for image in new))
        tokens = base + more
    return arrivals


@st.composite
def multimodal_scenarios(draw: st.DrawFn, max_depth: int, *, splits: bool | None = None) -> Scenario:
    """A configuration, multimodal traffic, and pools of KV and of encoder outputs that barely or amply suffice."""
    knobs = replace(draw(shapes(max_depth)), num_lora_adapters=0)
    split = draw(st.booleans()) if splits is None else splits
    knobs = replace(
        knobs,
        budget_tokens=max(knobs.budget_tokens, *map(len, POOL.values())),
        encoder_step_embeds=LARGEST + draw(st.sampled_from([0, 1, 5, 20])),
        encoder_cache_embeds=LARGEST + draw(st.sampled_from([0, 1, 5, 20])),
        scheduler={} if split else {"disable_chunked_mm_input": True},
    )
    sessions = [draw(turns(session, knobs)) for session in range(draw(st.integers(1, 6)))]
    arrivals = [arrival for session in sessions for arrival in session]
    resets = draw(st.lists(st.builds(Reset, st.integers(0, 40), st.booleans(), st.booleans()), max_size=2))
    workload = Workload(arrivals, resets, seed=draw(st.integers(0, 99)))
    knobs = replace(knobs, num_blocks=pool_for(knobs, workload) + draw(st.sampled_from([0, 1, 4, 30])))
    return Scenario(knobs, workload, draw(st.sampled_from([0.0, 0.6, 1.0])))
