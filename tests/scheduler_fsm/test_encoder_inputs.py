# SPDX-License-Identifier: Apache-2.0
"""Multimodal requests at the adapter: what becomes of vLLM's features, budgets and plans."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
from exact.images import PLACEHOLDER_TOKEN, Image
from exact.timeline import Timeline
from exact.workload import words
from scheduler_knobs import Knobs

from tokenspeed_plugin.scheduler_fsm import _core, encoder_inputs

pytestmark = pytest.mark.host_matrix
OURS = "tokenspeed"
KNOBS = Knobs(budget_tokens=32, encoder_step_embeds=8, encoder_cache_embeds=16)
SIX = (True,) * 6


def prompt_of(*identifiers: str, masks: tuple[bool, ...] = SIX, stream: int = 0) -> tuple[list[int], tuple[Image, ...]]:
    """Four words before each image, four after the last one."""
    tokens, images = [], []
    for number, identifier in enumerate(identifiers):
        tokens += words(stream + number, 4)
        images.append(Image(identifier, len(tokens), masks))
        tokens += [PLACEHOLDER_TOKEN] * len(masks)
    return tokens + words(9, 4), tuple(images)


def submit(run: Timeline, request_id: str, *identifiers: str, refused: bool = False, **fields: object) -> None:
    prompt, images = prompt_of(*identifiers, **fields)
    run.submit(request_id, prompt, 2, images=images, refused=refused)


def test_features_become_places_and_ranges() -> None:
    mask = (False, True, True, False, True)
    features = [
        Image("a", 3, mask).feature(),
        Image("b", 10, (True,) * 4).feature(),
        Image("c", 20, (False,)).feature(),
    ]
    assert encoder_inputs.encoder_inputs_of(SimpleNamespace(mm_features=features)) == [
        ("a", 3, 8, [(4, 6), (7, 8)]),
        ("b", 10, 14, [(10, 14)]),
        ("c", 20, 21, []),
    ]


def test_limits_are_the_ones_that_vllm_computes() -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(supports_multimodal_inputs=True),
        scheduler_config=SimpleNamespace(disable_chunked_mm_input=True),
    )
    budget = SimpleNamespace(encoder_compute_budget=70, encoder_cache_size=90)
    with mock.patch.object(encoder_inputs, "MultiModalBudget", return_value=budget) as made:
        limits = encoder_inputs.encoder_limits(config, "registry")
    made.assert_called_once_with(config, "registry")
    assert (limits.step_embeds, limits.cache_embeds, limits.split_inputs) == (70, 90, False)
    config.model_config.supports_multimodal_inputs = False
    with mock.patch.object(encoder_inputs, "MultiModalBudget", side_effect=AssertionError):
        limits = encoder_inputs.encoder_limits(config, "registry")
    assert (limits.step_embeds, limits.cache_embeds) == (0, 0)


def test_two_requests_of_one_step_share_an_image() -> None:
    run = Timeline(OURS, KNOBS)
    submit(run, "a", "cat")
    submit(run, "b", "cat", stream=20)
    run.ticks(1)
    (plan,) = run.plans
    assert plan.num_scheduled_tokens == {"a": 14, "b": 14}
    assert plan.scheduled_encoder_inputs == {"a": [0]}
    assert [len(new.mm_features) for new in plan.scheduled_new_reqs] == [1, 1]
    run.finish()
    assert run.worker.encoder.num_runs == 1


def test_the_budget_of_a_step_ends_a_chunk_and_eviction_is_told() -> None:
    run = Timeline(OURS, KNOBS)
    submit(run, "a", "one", "two", "three")
    run.ticks(3)
    assert [plan.num_scheduled_tokens["a"] for plan in run.plans] == [14, 10, 10]
    assert [plan.scheduled_encoder_inputs for plan in run.plans] == [{"a": [0]}, {"a": [1]}, {"a": [2]}]
    assert [plan.free_encoder_mm_hashes for plan in run.plans] == [[], [], ["one"]]
    run.finish()


def test_images_that_must_not_be_split_are_not() -> None:
    knobs = replace(KNOBS, budget_tokens=8, max_num_seqs=4, scheduler={"disable_chunked_mm_input": True})
    run = Timeline(OURS, knobs)
    submit(run, "a", "one", "two")
    run.ticks(4)
    assert [plan.num_scheduled_tokens["a"] for plan in run.plans] == [4, 8, 8, 4]
    run.finish()
    split = Timeline(OURS, replace(knobs, scheduler={}))
    submit(split, "a", "one", "two")
    split.ticks(3)
    assert [plan.num_scheduled_tokens["a"] for plan in split.plans] == [8, 8, 8]
    split.finish()


def test_an_image_in_the_prefix_cache_is_not_encoded_and_another_one_is_no_hit() -> None:
    run = Timeline(OURS, KNOBS)
    submit(run, "first", "cat")
    run.finish()
    run.scheduler.reset_encoder_cache()
    run.worker.encoder.reset()
    submit(run, "same", "cat")
    submit(run, "other", "dog")
    run.finish()
    assert run.cached["same"] == 12
    assert run.cached["other"] == 4, "the words before the image"
    assert run.worker.encoder.num_runs == 2, "the cat for the first request, the dog"


@pytest.mark.parametrize(
    ("identifiers", "masks"),
    [(("large",), (True,) * 9), (("cat", "dog"), (True,) * 20)],
    ids=["more than the budget", "every one of two"],
)
def test_an_image_that_fits_no_step_is_refused_alone(identifiers: tuple[str, ...], masks: tuple[bool, ...]) -> None:
    run = Timeline(OURS, KNOBS)
    submit(run, "large", *identifiers, refused=True, masks=masks)
    submit(run, "small", "cat")
    run.finish()
    assert run.outcome("large") == "error"
    assert run.outcome("small") == "length"


def test_the_refusal_names_both_numbers() -> None:
    run = Timeline(OURS, KNOBS)
    prompt, images = prompt_of("large", masks=(True,) * 9)
    request = run.harness.make_request("large", prompt, 2, images=images)
    with pytest.raises(_core.RefusedRequest, match=r"position 4 has 9 embeddings; the encoder budget of a step is 8"):
        run.scheduler._desk._submit(request)


def test_one_identifier_with_two_sizes_fails_the_second_request_alone() -> None:
    run = Timeline(OURS, KNOBS)
    submit(run, "a", "cat")
    run.finish()
    submit(run, "b", "cat", masks=(True,) * 5, refused=True)
    submit(run, "c", "cat", stream=20)
    run.finish()
    assert [run.outcome(name) for name in "abc"] == ["length", "error", "length"]


def test_a_step_says_what_it_encodes_and_whose_data_nobody_needs() -> None:
    run = Timeline(OURS, replace(KNOBS, runner="v2"))
    submit(run, "a", "cat", "dog")
    run.ticks(3)
    stats = [plan.scheduled_encoder_input_stats for plan in run.plans]
    assert [stat and (stat.num_inputs, stat.output_tokens) for stat in stats] == [(1, 6), (1, 6), None]
    if hasattr(run.plans[0], "encoder_input_updates"):
        assert [plan.encoder_input_updates for plan in run.plans] == [{}, {"a": {0: None}}, {"a": {1: None}}]
    run.finish()


def test_data_in_shared_memory_is_not_given_up_here() -> None:
    features = [SimpleNamespace(data=data) for data in ({"pixels": 1}, {"address": 1}, None)]
    request = SimpleNamespace(request_id="a", mm_features=features)
    assert encoder_inputs.given_up_data([(request, 0), (request, 1), (request, 2)]) == {"a": {0: None}}
    assert encoder_inputs.given_up_data([(request, 1)]) == {}


def test_a_reset_has_unfinished_images_encoded_again() -> None:
    run = Timeline(OURS, replace(KNOBS, budget_tokens=8, max_num_seqs=4))
    submit(run, "a", "cat")
    run.ticks(1)
    assert run.plans[-1].scheduled_encoder_inputs == {"a": [0]}
    run.scheduler.reset_encoder_cache()
    run.worker.encoder.reset()
    run.ticks(1)
    assert run.plans[-1].scheduled_encoder_inputs == {"a": [0]}
    run.finish()


def test_the_core_counts_runs_and_shared_outputs() -> None:
    run = Timeline(OURS, KNOBS)
    submit(run, "a", "cat", "dog")
    submit(run, "b", "cat", stream=20)
    run.finish()
    counters = run.scheduler._core.counters()
    assert counters["encoder_runs"] == 2
    assert counters["encoder_run_embeds"] == 12
    assert counters["encoder_shared"] == 1
    assert counters["encoder_held_embeds"] == 0
