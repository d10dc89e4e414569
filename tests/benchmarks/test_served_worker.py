# SPDX-License-Identifier: Apache-2.0
"""What the engines' benchmark adds to workers: which forward passes it times, which prefills it counts as ours, which step it traces."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_clock import CLOCK_MS, Event

from benchmarks.gpu import engine


class Model(torch.nn.Module):
    """A forward pass takes 5 ms."""

    def forward(self, tokens: int) -> int:
        CLOCK_MS[0] += 5.0
        return tokens


class Steps:
    """Plans prefills of more than 100 new tokens."""

    def step(self, query_lens: list[int]) -> str | None:
        return "plan" if max(query_lens) > 100 else None


class Graphs:
    """Whole graphs by their number of tokens."""

    def __init__(self, items: list[tuple[Any, Any]]) -> None:
        self.graphs = SimpleNamespace(items=lambda: items)

    def run_fullgraph(self, desc: Any) -> int:
        return int(desc.num_tokens)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A worker of vLLM's with one metadata builder; its graph pieces are replayed without a call of the model."""
    monkeypatch.setattr(engine, "vary_dummy_weights", lambda: None)  # importing the module would change vLLM's loader
    sys.modules.pop("benchmarks.served.worker", None)
    module = importlib.import_module("benchmarks.served.worker")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timed = module.Timed()
    builder = SimpleNamespace(_prefills=Steps())
    manager = SimpleNamespace(run_pw_graph=lambda model, inputs: CLOCK_MS.__setitem__(0, CLOCK_MS[0] + 2.0))
    groups = [[SimpleNamespace(get_metadata_builder=lambda _: builder)]]
    timed.model_runner = SimpleNamespace(model=Model(), cudagraph_manager=manager, attn_groups=groups)
    timed.builder = builder
    yield timed
    sys.modules.pop("benchmarks.served.worker", None)


def test_forward_passes_are_timed_whether_the_model_is_called_or_replayed_in_pieces(worker: Any) -> None:
    runner = worker.model_runner
    assert worker.start_timing_prefills()
    assert runner.model(tokens=7) == 7
    CLOCK_MS[0] += 100.0
    runner.cudagraph_manager.run_pw_graph(runner.model, {})
    assert worker.take_prefill_times() == {"forward_ms": [5.0, 2.0], "taken": 0}
    assert worker.take_prefill_times() == {"forward_ms": [], "taken": 0}


def test_pieces_that_call_the_model_are_timed_once(worker: Any) -> None:
    runner = worker.model_runner
    runner.cudagraph_manager.run_pw_graph = lambda model, inputs: model(**inputs)
    for _ in range(2):  # starting again adds no second hook
        worker.start_timing_prefills()
        runner.cudagraph_manager.run_pw_graph(runner.model, {"tokens": 3})
        assert worker.take_prefill_times()["forward_ms"] == [5.0]


def test_prefills_are_counted_that_our_kernel_plans(worker: Any) -> None:
    for _ in range(2):
        worker.start_timing_prefills()
        plans = [worker.builder._prefills.step(lens) for lens in ([200], [50], [1, 300])]
        assert plans == ["plan", None, "plan"]
        assert worker.take_prefill_times()["taken"] == 2


def test_a_graph_is_traced_within_the_step_that_was_asked_for_and_in_no_other(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    def graph(tokens: int) -> Any:
        def replay() -> None:
            CLOCK_MS[0] += tokens
            ran.append(tokens)

        return SimpleNamespace(replay=replay)

    four, two = SimpleNamespace(num_tokens=4), SimpleNamespace(num_tokens=2)
    assert not worker.start_tracing_graph(4, 2, 5)
    worker.model_runner.cudagraph_manager = manager = Graphs([(two, graph(2)), (four, graph(4))])
    module = sys.modules["benchmarks.served.worker"]
    monkeypatch.setattr(module, "traced_kernels", lambda _, num_replays: [{"name": "a", "calls": num_replays}])
    assert worker.start_tracing_graph(4, 2, 5)
    for desc, replays in ((four, 0), (two, 0), (four, 6), (four, 6)):
        assert manager.run_fullgraph(desc) == desc.num_tokens
        assert ran == [4] * replays
    found = {"replay_ms": 4.0, "kernels": [{"name": "a", "calls": 5}]}
    assert worker.take_graph_trace() == found
    assert worker.start_tracing_graph(4, 1, 5)
    assert worker.take_graph_trace() == {}
    manager.run_fullgraph(four)
    assert len(ran) == 6
