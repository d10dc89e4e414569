# SPDX-License-Identifier: Apache-2.0
"""What the benchmark adds to vLLM's workers (``worker_extension_cls``): it is imported in each before the model is loaded."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.engine import vary_dummy_weights
from benchmarks.gpu.whole_graphs import WholeGraphs
from benchmarks.served.traces import traced_kernels

# Weights within 0.001 of zero would make every token check pass.
vary_dummy_weights()


class Timed(WholeGraphs):
    """Times the replays of decode graphs and the forward passes of prefills on the GPU, and tells who decodes."""

    def start_timing_prefills(self) -> bool:
        """From now on the device time of forward passes that replay no whole graph is kept; False where there is no GPU.

        Prefills that are planned for our kernel are counted, too.
        """
        import torch

        self.prefill_events: list[tuple[Any, Any]] = []
        self.prefills_taken = 0
        if not hasattr(self, "prefill_hooks"):
            model = self.model_runner.model  # type: ignore[attr-defined]
            self.prefill_hooks = [] if not torch.cuda.is_available() else self._hooks(model)
            manager = getattr(self.model_runner, "cudagraph_manager", None)  # type: ignore[attr-defined]
            if self.prefill_hooks and hasattr(manager, "run_pw_graph"):
                manager.run_pw_graph = self._timing_pieces(manager.run_pw_graph)
            for steps in (found for b in self._builders() if (found := getattr(b, "_prefills", None)) is not None):
                steps.step = self._counting(steps.step)
        return bool(self.prefill_hooks)

    def _hooks(self, model: Any) -> list[Any]:
        import torch

        def begin(*_: Any) -> None:
            self.prefill_events.append((_recorded(torch), None))

        def end(*_: Any) -> None:
            self.prefill_events[-1] = (self.prefill_events[-1][0], _recorded(torch))

        return [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]

    def _timing_pieces(self, original: Any) -> Any:
        """Of forward passes in graph pieces; where they call the model its hooks have the time already."""
        import torch

        def timed(*arguments: Any, **named: Any) -> Any:
            known, start = len(self.prefill_events), _recorded(torch)
            result = original(*arguments, **named)
            if len(self.prefill_events) == known:
                self.prefill_events.append((start, _recorded(torch)))
            return result

        return timed

    def _counting(self, original: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            step = original(*arguments)
            self.prefills_taken += step is not None
            return step

        return counted

    def take_prefill_times(self) -> dict[str, Any]:
        """Milliseconds of each forward pass since `start_timing_prefills`, and how many prefills our kernel got."""
        import torch

        if self.prefill_events:
            torch.cuda.synchronize()
        forward_ms = [start.elapsed_time(end) for start, end in self.prefill_events if end is not None]
        self.prefill_events = []
        return {"forward_ms": forward_ms, "taken": self.prefills_taken}

    def route_alike(self, alike: bool) -> int:
        """Let the routers choose the same experts for every token, or as their weights say; return how many routers there are.

        Graphs read the weights where they are. Without weights all experts are equally likely, and the first are taken.
        """
        import torch

        kept: dict[str, Any] = getattr(self, "router_weights", {})
        with torch.inference_mode():
            for name, weight in self.model_runner.model.named_parameters():  # type: ignore[attr-defined]
                if name.endswith(".gate.weight"):
                    kept.setdefault(name, weight.data.clone())
                    weight.data.copy_(kept[name] * (not alike))
        self.router_weights = kept
        return len(kept)

    def start_tracing_graph(self, num_tokens: int, at_replay: int, num_replays: int) -> bool:
        """Replay and trace the graph of `num_tokens` within the `at_replay`-th step from now on that replays it.

        That must be one of all requests: the first and last steps of a batch may have fewer, in the same graph. False where the
        runner replays no graph.
        """
        self.graph_trace: dict[str, Any] = {}
        self.trace_at: tuple[int, int, int] | None = (num_tokens, at_replay, num_replays)
        return self.start_timing_graphs()

    def take_graph_trace(self) -> dict[str, Any]:
        """Milliseconds of a replay by itself, and every kernel with its microseconds.

        Nothing where no such step came, and no kernels where they cannot be traced, with the reason.
        """
        self.trace_at = None
        return self.graph_trace

    def _graph_replayed(self, num_tokens: int) -> None:
        """Trace the graph if its step is due."""
        traced_tokens, steps_left, num_replays = getattr(self, "trace_at", None) or (0, 0, 0)
        if num_tokens != traced_tokens:
            return
        self.trace_at = (num_tokens, steps_left - 1, num_replays) if steps_left > 1 else None
        if self.trace_at is None:
            graphs = self.model_runner.cudagraph_manager.graphs  # type: ignore[attr-defined]
            graph = next((graph for desc, graph in graphs.items() if desc.num_tokens == num_tokens), None)
            self.graph_trace = {} if graph is None else _replayed(graph, num_replays)

    def who_decodes(self, counts: tuple[int, ...], query_tokens: int = 1) -> dict[str, Any]:
        """Backend of the attention layers, tokens of a page, what of its choice our backend says for each batch size, and how
        many layers write new tokens with a kernel of ours.
        """
        layers = self.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
        backends = {".".join(layer.get_attn_backend().full_cls_name()) for layer in layers.values() if _attends(layer)}
        builders, model = self._builders(), self.model_runner.model  # type: ignore[attr-defined]
        steps = next((found for b in builders if (found := getattr(b, "_steps", None)) is not None), None)
        verdicts = {str(n): steps.share.verdict(query_tokens, n) for n in counts} if steps is not None else {}
        return {
            "backends": sorted(backends),
            "page_tokens": [getattr(b, "page_size", None) for b in builders],
            "choices": {n: {"taken": v.taken, "reason": v.reason} for n, v in verdicts.items()},
            "appending_layers": sum(bool(getattr(module, "appends", False)) for module in model.modules()),
        }

    def _builders(self) -> list[Any]:
        groups = getattr(self.model_runner, "attn_groups", [])  # type: ignore[attr-defined]
        return [group.get_metadata_builder(0) for groups_of_cache in groups for group in groups_of_cache]


def _replayed(graph: Any, num_replays: int) -> dict[str, Any]:
    """A step leaves what its graph reads where it is, and a replay writes what is there already."""
    import torch

    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    for _ in range(num_replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    found: dict[str, Any] = {"replay_ms": start.elapsed_time(end) / num_replays}
    try:
        return found | {"kernels": traced_kernels(graph, num_replays)}
    except RuntimeError as error:
        return found | {"kernels_error": str(error)[:300]}


def _recorded(torch: Any) -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _attends(layer: Any) -> bool:
    return hasattr(layer, "get_attn_backend") and hasattr(layer, "impl")
