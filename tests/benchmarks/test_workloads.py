# SPDX-License-Identifier: Apache-2.0
"""Driver and workloads over a plane that only counts."""

import pytest

from benchmarks.control.agentic import SHARED_TOKENS, TURN_OUTPUT_TOKENS, AgenticShape, SessionLoop, agentic
from benchmarks.control.cells import parse_cell
from benchmarks.control.driver import Driver, PlannedStep, Scheduled
from benchmarks.control.tokens import stream_tokens
from benchmarks.control.workloads import BUDGET_TOKENS, DecodeShape, blocks_for, decode, steady_decode
from tests.benchmarks.counting_plane import CountingPlane


class GreedyPlane(CountingPlane):
    """Plans a request again after it finished."""

    def plan(self):
        return PlannedStep([Scheduled("r0", 1, True, -1)], 0, 0, 0)


def make_plane(**options):
    return CountingPlane(block_tokens=16, num_blocks=64, max_requests=8, budget_tokens=100, **options)


@pytest.mark.parametrize("depth", [1, 2])
def test_driver_delivers_the_prescribed_tokens_in_order_and_each_once(depth):
    plane = make_plane(depth=depth)
    driver = Driver(plane)
    outputs = {f"r{i}": stream_tokens(50 + i, 0, 7) for i in range(3)}
    for index, (request_id, output) in enumerate(outputs.items()):
        driver.add(request_id, stream_tokens(index, 0, 130), output, 5)
    while driver.live:
        driver.step()
    assert plane.delivered == {request_id: output[:5] for request_id, output in outputs.items()}
    assert sorted(plane.finished) == sorted(outputs)
    assert sum(step.num_emitted for step in driver.log.steps) == 15
    assert driver.log.adds_ns == [1000] * 3


def test_driver_at_depth_two_hands_over_a_step_after_the_next_was_planned():
    plane = make_plane(depth=2)
    driver = Driver(plane)
    driver.add("r0", [1, 2, 3], [7, 8], 2)
    driver.step()
    assert plane.delivered["r0"] == []
    driver.step()
    assert plane.delivered["r0"] == [7]


@pytest.mark.parametrize("depth", [1, 2])
def test_driver_refuses_a_plane_that_plans_past_the_last_token(depth):
    driver = Driver(GreedyPlane(block_tokens=16, num_blocks=64, max_requests=8, budget_tokens=100, depth=depth))
    driver.add("r0", [1, 2, 3], [7, 8, 9], 1)
    driver.step()
    with pytest.raises(RuntimeError, match="r0 planned after its last token"):
        driver.step()


def test_decode_measures_steps_in_which_every_request_emits():
    shape = DecodeShape(num_requests=4, block_tokens=16, context_tokens=64, num_steps=10, warm_steps=2)
    result = decode(CountingPlane, shape)
    assert result["steps"] == 10
    assert result["generated_tokens"] == 40
    assert result["step_p50_us"] == 5.0
    assert result["computed_prefill_tokens"] == 0


def test_decode_pool_holds_every_request_at_its_longest_and_doubles_on_request():
    shape = DecodeShape(num_requests=4, block_tokens=16, context_tokens=64)
    longest = sum(blocks_for(length + shape.output_tokens, 16) for length in shape.prompt_lengths)
    assert shape.num_blocks >= longest
    assert DecodeShape(4, 16, 64, pool_factor=2).num_blocks == 2 * shape.num_blocks


def test_decode_fails_when_waiting_requests_get_into_the_measured_steps():
    def roomy(**options):
        return CountingPlane(**{**options, "max_requests": 99})

    with pytest.raises(RuntimeError, match="decode steps planned"):
        decode(roomy, DecodeShape(4, 16, 64, num_steps=4, warm_steps=1, num_waiting=2))


def test_long_prompts_are_added_after_the_warm_steps():
    shape = DecodeShape(2, 16, 64, num_steps=4, warm_steps=1, num_long_waiting=4)
    driver = steady_decode(CountingPlane, shape)
    assert sum(len(prompt) == 65_536 for prompt in driver.plane.prompts.values()) == 4


def run_agentic_turns(num_turns):
    plane = CountingPlane(block_tokens=64, num_blocks=1, max_requests=3, budget_tokens=BUDGET_TOKENS)
    driver = Driver(plane)
    SessionLoop(driver, 3).run_turns(num_turns)
    return plane


def test_agentic_sessions_repeat_their_history_and_are_the_same_in_every_run():
    plane = run_agentic_turns(9)
    assert plane.prompts == run_agentic_turns(9).prompts
    shared = stream_tokens(0, 0, SHARED_TOKENS)
    assert all(prompt[:SHARED_TOKENS] == shared for prompt in plane.prompts.values())
    for request_id, prompt in plane.prompts.items():
        session, _, turn = request_id.partition(".")
        earlier = plane.prompts.get(f"{session}.{int(turn) - 1:04d}")
        if earlier is not None:
            history = earlier + plane.delivered[f"{session}.{int(turn) - 1:04d}"]
            assert prompt[: len(history)] == history
            assert len(prompt) == len(history) + 300
    assert all(len(plane.delivered[request_id]) == TURN_OUTPUT_TOKENS for request_id in plane.finished)


def test_agentic_result_counts_only_the_measured_turns():
    result = agentic(CountingPlane, AgenticShape(num_sessions=2, num_turns=1))
    assert result["hit_rate"] == 0.0
    assert 2 * TURN_OUTPUT_TOKENS <= result["generated_tokens"] <= 4 * TURN_OUTPUT_TOKENS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sleep:N=1", "workload 'sleep' is not one of"),
        ("decode:N=4,bs=16,speed=9", "key 'speed' is not one of"),
        ("decode:N=many,bs=16", "N='many' is not int"),
        ("decode:N=4", "keys needed are N and bs"),
    ],
)
def test_bad_cell_is_refused_by_name(text, message):
    with pytest.raises(ValueError, match=message):
        parse_cell(text)


def test_cell_sets_the_shape():
    shape = parse_cell("decode:N=64,bs=16,ctx=4096,steps=128,waiting=256,pool=2,long=4").shape
    assert shape == DecodeShape(64, 16, 4096, 128, 40, 2, 256, 4)
