# SPDX-License-Identifier: Apache-2.0
"""The device's time of the whole CUDA graphs that an engine replays, for extensions of vLLM's workers."""

from __future__ import annotations

from typing import Any


class WholeGraphs:
    """Part of a worker extension that times each replay of a graph of a whole forward pass: a decode step.

    The pieces of a graph that a mixed step of few tokens replays, one for each stretch between two attention layers, are left out: an
    engine of 36 layers replays 37 of them in such a step, and two such steps are more than all the decode steps of a short batch.
    """

    def start_timing_graphs(self) -> bool:
        """From now on the device time of every replay of a whole graph is kept; False where the runner replays none."""
        self.graph_events: list[tuple[int, Any, Any]] = []
        manager = getattr(self.model_runner, "cudagraph_manager", None)  # type: ignore[attr-defined]
        if manager is None or not hasattr(manager, "run_fullgraph"):
            return False
        if "run_fullgraph" not in vars(manager):
            manager.run_fullgraph = self._timing(manager.run_fullgraph)
        return True

    def _timing(self, original: Any) -> Any:
        import torch

        def timed(desc: Any) -> Any:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            result = original(desc)
            end.record()
            self.graph_events.append((desc.num_tokens, start, end))
            self._graph_replayed(desc.num_tokens)
            return result

        return timed

    def _graph_replayed(self, num_tokens: int) -> None:
        """Behind each replay, outside of the time that is taken."""

    def take_graph_times(self) -> list[tuple[int, float]]:
        """Tokens of the graph and milliseconds on the GPU, for each replay since `start_timing_graphs`."""
        import torch

        if self.graph_events:
            torch.cuda.synchronize()
        taken = [(tokens, start.elapsed_time(end)) for tokens, start, end in self.graph_events]
        self.graph_events = []
        return taken
