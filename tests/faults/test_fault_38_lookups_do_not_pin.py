# SPDX-License-Identifier: Apache-2.0
"""Fault 38 (Mooncake 2187, PR 3599): looking a block up keeps it, so that nothing can be evicted any more."""

from __future__ import annotations

from exact.timeline import Timeline
from exact.workload import words
from scheduler_knobs import Knobs

from tokenspeed_plugin.scheduler_fsm import _core

NUM_BLOCKS = 16


def full_cache() -> tuple[_core.KvReplay, list[_core.PreparedPrompt]]:
    config = _core.KvConfig()
    config.num_blocks = NUM_BLOCKS + 1
    config.key_tokens = 4
    config.groups = [_core.GroupSpec(name="full", block_tokens=4, retention=_core.Retention.FULL)]
    cache = _core.KvReplay(config=config)
    prompts = [_core.prepare_prompt(tokens=words(number, 16), key_tokens=4) for number in range(4)]
    for second, prompt in enumerate(prompts):
        cache.set_time(float(second))
        cache.serve(prompt, _core.Departure(num_prompt_tokens=16, num_output_tokens=1))
    return cache, prompts


def test_probes_change_nothing() -> None:
    cache, prompts = full_cache()
    order = cache.free_order()
    for second in range(60):
        cache.set_time(10.0 + second)
        assert [cache.probe(prompt) for prompt in prompts] == [16] * 4
    assert cache.free_order() == order
    assert len(order) == NUM_BLOCKS, "all of it can be taken"


def test_a_put_succeeds_after_every_key_was_probed_each_second() -> None:
    cache, prompts = full_cache()
    for second in range(30):
        cache.set_time(10.0 + second)
        for prompt in prompts:
            cache.probe(prompt)
    new = _core.prepare_prompt(tokens=words(9, 64), key_tokens=4)
    cache.serve(new, _core.Departure(num_prompt_tokens=64, num_output_tokens=1))
    assert cache.probe(new) == 64
    cache.check_integrity()


def test_waiting_requests_that_are_looked_up_again_and_again_hold_nothing() -> None:
    run = Timeline("tokenspeed", Knobs(num_blocks=20, budget_tokens=64, max_num_seqs=1, max_model_len=96))
    run.submit("first", words(1, 16), 1)
    run.finish()
    run.submit("running", 20, 40)
    run.ticks(2)
    # It waits for the slot with its prefix cached, and is looked up meanwhile.
    run.submit("waiting", words(1, 16) + words(2, 4), 1)
    run.ticks(10)
    counters = run.scheduler._core.counters()
    held = counters["usable_blocks"] - counters["free_blocks"]
    assert held <= (20 + 40) // 4 + 1
    run.finish()
