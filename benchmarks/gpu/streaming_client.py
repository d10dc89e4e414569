# SPDX-License-Identifier: Apache-2.0
"""Client processes that ask a server for completions of token-id prompts, streamed or whole."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from multiprocessing.context import SpawnContext
from typing import Any

from benchmarks.gpu.workload import batch_of_prompts


@dataclass(frozen=True)
class ClientLoad:
    """What all clients together ask for."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    stream: bool
    round_number: int


def run_clients(context: SpawnContext, base: str, load: ClientLoad, num_clients: int) -> list[dict[str, Any]]:
    """Run the load split over `num_clients` processes that begin together; return each one's figures."""
    barrier = context.Barrier(num_clients)
    results = context.SimpleQueue()
    processes = [
        context.Process(target=_client, args=(base, load, index, num_clients, barrier, results))
        for index in range(num_clients)
    ]
    for process in processes:
        process.start()
    collected = [results.get() for _ in processes]
    for process in processes:
        process.join()
    errors = [result["error"] for result in collected if "error" in result]
    if errors:
        raise RuntimeError(f"client failed: {errors[0]}")
    return collected


def _client(base: str, load: ClientLoad, index: int, num_clients: int, barrier: Any, results: Any) -> None:
    prompts = batch_of_prompts(load.round_number, load.num_requests, load.prompt_tokens)[index::num_clients]
    barrier.wait()
    start, cpu_start = time.time(), time.process_time()
    try:
        num_tokens = asyncio.run(_ask_all(base, load, prompts))
    except Exception as error:  # the parent waits for an answer of every client
        results.put({"error": f"{type(error).__name__}: {error}"})
        return
    cpu_s = time.process_time() - cpu_start
    results.put({"start": start, "end": time.time(), "num_tokens": num_tokens, "cpu_s": cpu_s})


async def _ask_all(base: str, load: ClientLoad, prompts: list[list[int]]) -> int:
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        counts = await asyncio.gather(*(_ask(session, base, load, prompt) for prompt in prompts))
    return sum(counts)


async def _ask(session: Any, base: str, load: ClientLoad, prompt: list[int]) -> int:
    """Ask for one completion; return the completion tokens that the server's usage reports."""
    body = {
        "model": "benchmark",
        "prompt": prompt,
        "max_tokens": load.output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": load.stream,
    }
    if load.stream:
        body["stream_options"] = {"include_usage": True}
    async with session.post(f"{base}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {(await response.text())[:300]}")
        if not load.stream:
            return int((await response.json())["usage"]["completion_tokens"])
        usage = 0
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event.get("usage"):
                    usage = int(event["usage"]["completion_tokens"])
        return usage
