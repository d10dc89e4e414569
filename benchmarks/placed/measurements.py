# SPDX-License-Identifier: Apache-2.0
"""What the placement benchmark asks of an engine whose workers are :class:`benchmarks.placed.worker.Observed`."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.gpu.measurements import serve_batch
from benchmarks.gpu.workload import batch_of_prompts

_ROUND = 990
_TRACED_DECODE_STEP, _TRACED_PREFILL = 4, 2
"""The first ones warm up what the profiler slows down."""


def collectives(llm: Any, request: dict[str, Any]) -> dict[str, list[tuple[str, int, int]]]:
    """Collectives of one prefill step and of one decode step on the first rank: kind, bytes of the input, calls.

    Only an eager engine shows them: a captured step calls none from Python.
    """
    llm.collective_rpc("start_counting_collectives")
    prompt = batch_of_prompts(_ROUND, 1, request["prompt_tokens"])
    serve_batch(llm, prompt, 1, "prefill")
    prefill = llm.collective_rpc("take_counted_collectives")[0]
    serve_batch(llm, prompt, 2, "both")
    both = {(kind, size): times for kind, size, times in llm.collective_rpc("take_counted_collectives")[0]}
    for kind, size, times in prefill:
        both[kind, size] = both.get((kind, size), 0) - times
    decode = [(kind, size, times) for (kind, size), times in sorted(both.items()) if times > 0]
    return {"prefill": prefill, "decode": decode}


def links(llm: Any, request: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By kind of collective: (ring-equivalent bytes, microseconds) for each size, and from which bytes on the algorithm is another."""
    return {
        "links": llm.collective_rpc("time_collectives", args=(tuple(request["sizes_bytes"]),))[0],
        "link_changes": llm.collective_rpc("collective_changes")[0],
    }


def graph_times(llm: Any, request: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of the device for the model of one decode step, by batch size: the median over the steps of so many tokens.

    A rank that starts early waits for the others in its first collective, so of each step the rank counts that took least. Steps
    that carry prompts replay other graphs, or pieces of one, and do not count.
    """
    if not all(llm.collective_rpc("start_timing_graphs")):
        raise RuntimeError("the engine replays no CUDA graph of a whole step")
    found = {}
    for batch in request["batches"]:
        prompts = batch_of_prompts(_ROUND + 1, batch, request["prompt_tokens"])
        serve_batch(llm, prompts, request["output_tokens"], f"graphs{batch}")
        by_rank = llm.collective_rpc("take_graph_times")
        steps = [min(ms for _, ms in step) for step in zip(*by_rank, strict=True) if step[0][0] == batch]
        if not steps:
            raise RuntimeError(f"no CUDA graph of {batch} tokens was replayed")
        found[str(batch)] = statistics.median(steps)
    return found


def traces(llm: Any, request: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What one prefill and one decode step of each batch size did on the first rank, see `benchmarks.placed.traces.step_figures`."""
    num_tokens = request["prefill_tokens"]
    llm.collective_rpc("start_tracing", args=(1, num_tokens, _TRACED_PREFILL))
    for index in range(_TRACED_PREFILL):
        serve_batch(llm, batch_of_prompts(_ROUND + 2 + index, 1, num_tokens), 1, f"trace{index}")
    found = {"prefill": _taken_trace(llm, f"a prefill of {num_tokens} tokens")}
    for batch in request["batches"]:
        llm.collective_rpc("start_tracing", args=(batch, batch, _TRACED_DECODE_STEP))
        prompts = batch_of_prompts(_ROUND + 1, batch, request["prompt_tokens"])
        serve_batch(llm, prompts, 2 * _TRACED_DECODE_STEP, f"trace-batch{batch}")
        found[str(batch)] = _taken_trace(llm, f"a decode step of batch {batch}")
    return found


def _taken_trace(llm: Any, what: str) -> dict[str, Any]:
    taken: dict[str, Any] = llm.collective_rpc("take_trace")[0]
    if not taken:
        raise RuntimeError(f"{what} never came in one step")
    return taken
