# SPDX-License-Identifier: Apache-2.0
"""What the placement benchmark asks of an engine whose workers are :class:`benchmarks.placed.worker.Observed`."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.measurements import serve_batch
from benchmarks.gpu.workload import batch_of_prompts

_ROUND = 990


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


def links(llm: Any, request: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """By kind of collective: (ring-equivalent bytes, microseconds) for each size, the slowest rank's."""
    samples: dict[str, list[tuple[float, float]]]
    samples = llm.collective_rpc("time_collectives", args=(tuple(request["sizes_bytes"]),))[0]
    return samples
