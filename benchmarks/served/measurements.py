# SPDX-License-Identifier: Apache-2.0
"""What the benchmark asks of an engine whose workers are :class:`benchmarks.served.worker.Timed`."""

from __future__ import annotations

import statistics
from functools import cache
from typing import Any

from benchmarks.gpu.measurements import greedy_answers, serve_batch
from benchmarks.gpu.workload import random_prompt

_STREAM = 1_500_000
HELD = "held_prefix"
"""What a request carries whose prompt `benchmarks.served.held_prefix` shall hold."""
_HOLD = {"kv_transfer_params": {HELD: True}}
_NEW_STREAM, _NUM_TURNS = 1_600_000, 3


@cache
def session(index: int, context_tokens: int) -> list[int]:
    """The history of one session; every engine gets the same, and a shorter one is the beginning of a longer one."""
    return random_prompt(_STREAM + index, context_tokens)


def _sessions(request: dict[str, Any]) -> list[list[int]]:
    context_tokens = request["context_tokens"]
    return [session(index, context_tokens) for index in range(request["num_sessions"])]


def decode_sessions(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Decode some tokens of the first sessions: milliseconds of a step, and of its graph on the GPU.

    Each session answers with one token of its own over and over: tokens that part would wake other experts, and how many
    experts a step reads moves its time by more than an attention kernel does. With `drafts` the same token is what an n-gram
    drafter proposes, so that every draft is taken.
    Steps are those in which every session gets a token. The graph is the model's forward pass; planning, sampling and gaps
    between steps lie outside of it.
    """
    prompts, drafts = _sessions(request), request.get("drafts", 0)
    timed = all(llm.collective_rpc("start_timing_graphs"))
    label = f"decode{request['round']}n{len(prompts)}l{request['context_tokens']}"
    served = _serve(llm, prompts, request, label)
    found: dict[str, Any] = {"step_ms": served["step_mean_ms"]}
    step_tokens = len(prompts) * (1 + drafts)
    replays = [ms for tokens, ms in llm.collective_rpc("take_graph_times")[0] if tokens == step_tokens]
    if timed and replays:
        found |= {"graph_ms": statistics.median(replays), "num_replays": len(replays)}
    return found


def _serve(llm: Any, prompts: list[list[int]], request: dict[str, Any], label: str) -> dict[str, float]:
    tokens = request["output_tokens"] * (1 + request.get("drafts", 0))
    return serve_batch(llm, prompts, tokens, label, [prompt[0] for prompt in prompts], _HOLD)


def returning_turn(llm: Any, request: dict[str, Any]) -> dict[str, float]:
    """Turns of the first session come back with new tokens, nobody else being there: median milliseconds to the first token.

    `forward_ms` is the time of a turn's forward pass on the GPU, gaps between kernels included, and `taken` how many of the turns'
    steps had their prefill planned for our kernel, of `forwards`.
    """
    new_tokens, label = request["new_tokens"], f"turn{request['round']}n{request['new_tokens']}"
    history = session(0, request["context_tokens"])
    if not request["round"]:
        serve_batch(llm, [history], 1, f"{label}held", extra=_HOLD)
    timed = all(llm.collective_rpc("start_timing_prefills"))
    streams = (_NEW_STREAM + 100_000 * request["round"] + 10_000 * turn + new_tokens for turn in range(_NUM_TURNS))
    turns = [history + random_prompt(stream, new_tokens) for stream in streams]
    ttft_ms = [serve_batch(llm, [turn], 1, f"{label}-{i}")["elapsed_s"] * 1e3 for i, turn in enumerate(turns)]
    prefills = llm.collective_rpc("take_prefill_times")[0]
    found: dict[str, float] = {"ttft_ms": statistics.median(ttft_ms), "taken": prefills["taken"]}
    if timed and prefills["forward_ms"]:
        found |= {"forward_ms": statistics.median(prefills["forward_ms"]), "forwards": len(prefills["forward_ms"])}
    return found


def returning_tokens(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of turns that come back with new tokens, with the best log-probabilities at every position.

    Their histories are held, one after the other, and then all turns come at once.
    """
    prompts = _sessions(request)
    serve_batch(llm, prompts, 1, "return-held", extra=_HOLD)
    turns = [
        prompt + random_prompt(_NEW_STREAM - 1 - index, request["new_tokens"]) for index, prompt in enumerate(prompts)
    ]
    return {"answers": greedy_answers(llm, turns, request["output_tokens"], request["num_best"])}


def route_alike(llm: Any, request: dict[str, Any]) -> dict[str, int]:
    """See `Timed.route_alike`."""
    return {"routers": llm.collective_rpc("route_alike", args=(request["alike"],))[0]}


def graph_kernels(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """See `Timed.take_graph_trace`: the graph of a step in the middle of decoding the first sessions, replayed by itself."""
    prompts = _sessions(request)
    llm.collective_rpc("start_tracing_graph", args=(len(prompts), request["output_tokens"] // 2, request["replays"]))
    _serve(llm, prompts, request, f"kernels{request['round']}n{len(prompts)}l{request['context_tokens']}")
    found: dict[str, Any] = llm.collective_rpc("take_graph_trace")[0]
    return found


def session_tokens(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of the first sessions, with the best log-probabilities at every position."""
    serve_batch(llm, _sessions(request), 1, "answers-held", extra=_HOLD)
    answers = greedy_answers(llm, _sessions(request), request["output_tokens"], request["num_best"])
    return {"answers": answers}


def who_decodes(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """See `Timed.who_decodes`, of the first worker."""
    arguments = (tuple(request["counts"]), 1 + request.get("drafts", 0))
    found: dict[str, Any] = llm.collective_rpc("who_decodes", args=arguments)[0]
    return found


COMMANDS = {
    "decode_sessions": decode_sessions,
    "returning_turn": returning_turn,
    "returning_tokens": returning_tokens,
    "route_alike": route_alike,
    "graph_kernels": graph_kernels,
    "session_tokens": session_tokens,
    "who_decodes": who_decodes,
}
