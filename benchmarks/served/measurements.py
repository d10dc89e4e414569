# SPDX-License-Identifier: Apache-2.0
"""What the benchmark asks of an engine whose workers are :class:`benchmarks.served.worker.Timed`."""

from __future__ import annotations

import statistics
from functools import cache
from typing import Any

from benchmarks.gpu.measurements import greedy_answers, serve_batch
from benchmarks.gpu.workload import random_prompt

_STREAM = 1_500_000


@cache
def session(index: int, context_tokens: int) -> list[int]:
    """The history of one session; every engine gets the same."""
    return random_prompt(_STREAM + index, context_tokens)


def _sessions(request: dict[str, Any]) -> list[list[int]]:
    return [session(index, request["context_tokens"]) for index in range(request["num_sessions"])]


def fill_sessions(llm: Any, request: dict[str, Any]) -> dict[str, float]:
    """Compute all histories once, so that they lie in the prefix cache."""
    return {"elapsed_s": serve_batch(llm, _sessions(request), 1, "fill")["elapsed_s"]}


def decode_sessions(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Decode some tokens of the first sessions: milliseconds of a step, and of its graph on the GPU.

    Each session answers with one token of its own over and over: tokens that part would wake other experts, and how many
    experts a step reads moves its time by more than an attention kernel does.
    Steps are those in which every session gets a token. The graph is the model's forward pass; planning, sampling and gaps
    between steps lie outside of it.
    """
    prompts = _sessions(request)
    timed = all(llm.collective_rpc("start_timing_graphs"))
    forced = [prompt[0] for prompt in prompts]
    served = serve_batch(llm, prompts, request["output_tokens"], f"decode{request['round']}n{len(prompts)}", forced)
    found: dict[str, Any] = {"step_ms": served["step_mean_ms"]}
    replays = [ms for tokens, ms in llm.collective_rpc("take_graph_times")[0] if tokens == len(prompts)]
    if timed and replays:
        found |= {"graph_ms": statistics.median(replays), "num_replays": len(replays)}
    return found


def session_tokens(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of the first sessions, with the best log-probabilities at every position."""
    answers = greedy_answers(llm, _sessions(request), request["output_tokens"], request["num_best"])
    return {"answers": answers}


def who_decodes(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """See `Timed.who_decodes`, of the first worker."""
    found: dict[str, Any] = llm.collective_rpc("who_decodes", args=(tuple(request["counts"]),))[0]
    return found


COMMANDS = {
    "fill_sessions": fill_sessions,
    "decode_sessions": decode_sessions,
    "session_tokens": session_tokens,
    "who_decodes": who_decodes,
}
