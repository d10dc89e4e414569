# SPDX-License-Identifier: Apache-2.0
"""The GPU's time of a decode step: of the whole graph of so many tokens, not of the pieces that a step with a prompt replays."""

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
from benchmarks.placed import measurements

PIECES_OF_A_STEP = 37
PIECE_MS, SMALL_STEP_MS, STEP_MS, WAIT_MS = 0.125, 2.0, 4.0, 0.5


class Graph:
    """Takes its time on that clock."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def replay(self) -> None:
        CLOCK_MS[0] += self.ms


class Graphs:
    """What a model runner replays whole graphs with."""

    def __init__(self) -> None:
        self.graphs = {1: Graph(SMALL_STEP_MS), 128: Graph(STEP_MS)}

    def run_fullgraph(self, desc: Any) -> int:
        self.graphs[desc.num_tokens].replay()
        return int(desc.num_tokens)


class Engine:
    """Two ranks that replay the graphs of a batch: two steps with a prompt in pieces, then whole graphs."""

    def __init__(self, worker_type: Any) -> None:
        self.workers = [worker_type(), worker_type()]
        for worker in self.workers:
            worker.model_runner = SimpleNamespace(cudagraph_manager=Graphs())

    def collective_rpc(self, method: str) -> list[Any]:
        return [getattr(worker, method)() for worker in self.workers]

    def serve(self, prompts: list[list[int]], num_output_tokens: int) -> None:
        steps = [len(prompts)] * num_output_tokens
        for rank, worker in enumerate(self.workers):
            for _ in range(2 * PIECES_OF_A_STEP):
                torch.cuda.CUDAGraph(PIECE_MS).replay()  # type: ignore[call-arg, arg-type]
            for index, num_tokens in enumerate([1, *steps] if len(prompts) > 1 else steps):
                manager = worker.model_runner.cudagraph_manager
                waits = WAIT_MS * (index % 2 == rank)
                manager.graphs[num_tokens].ms += waits
                assert manager.run_fullgraph(SimpleNamespace(num_tokens=num_tokens)) == num_tokens
                manager.graphs[num_tokens].ms -= waits


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(engine, "vary_dummy_weights", lambda: None)  # importing the module would change vLLM's loader
    sys.modules.pop("benchmarks.placed.worker", None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(measurements, "serve_batch", lambda llm, prompts, tokens, _: llm.serve(prompts, tokens))
    yield Engine(importlib.import_module("benchmarks.placed.worker").Observed)
    sys.modules.pop("benchmarks.placed.worker", None)


REQUEST = {"batches": [1, 128], "prompt_tokens": 64, "output_tokens": 63}


def test_pieces_and_graphs_of_other_batches_do_not_count_and_no_rank_waits(served: Engine) -> None:
    for _ in range(2):  # a second time nothing of the first one is left
        assert measurements.graph_times(served, REQUEST) == {"1": SMALL_STEP_MS, "128": STEP_MS}


def test_an_engine_that_replays_no_such_graph_is_an_error(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "serve_batch", lambda *_: None)
    with pytest.raises(RuntimeError, match="no CUDA graph of 1 tokens"):
        measurements.graph_times(served, REQUEST)
    served.workers[1].model_runner.cudagraph_manager = None
    with pytest.raises(RuntimeError, match="no CUDA graph of a whole step"):
        measurements.graph_times(served, REQUEST)
