# SPDX-License-Identifier: Apache-2.0
"""Samples of a server's /metrics while a replay runs: prefix cache, running and waiting requests."""

from __future__ import annotations

import asyncio
import time

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.agentic.metric_sample import MetricSample

_NAMES = {
    "vllm:prefix_cache_queries_total": "queried_tokens",
    "vllm:prefix_cache_hits_total": "hit_tokens",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_preemptions_total": "preemptions",
}


async def sample(http: aiohttp.ClientSession, base_url: str, at_s: float) -> MetricSample | None:
    """Return the counters now; None when the server has no such metrics or does not answer."""
    try:
        timeout = aiohttp.ClientTimeout(total=5)
        async with http.get(f"{base_url}/metrics", timeout=timeout) as response:
            if response.status != 200:
                return None
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError, ConnectionError):
        return None
    values = dict.fromkeys(_NAMES.values(), 0.0)
    found = False
    for family in text_string_to_metric_families(text):
        for item in family.samples:
            if item.name in _NAMES:
                values[_NAMES[item.name]] += item.value
                found = True
    return MetricSample(at_s, **values) if found else None


async def watch(
    http: aiohttp.ClientSession, base_url: str, begin_s: float, samples: list[MetricSample], every_s: float = 1.0
) -> None:
    """Take a sample at once and then every `every_s` seconds, until cancelled."""
    while True:
        now = await sample(http, base_url, time.perf_counter() - begin_s)
        if now is not None:
            samples.append(now)
        await asyncio.sleep(every_s)


def hit_rate(samples: list[MetricSample]) -> float:
    """Return the share of looked-up prompt tokens that the cache had, over all samples; NaN when nothing was looked up."""
    if len(samples) < 2:
        return float("nan")
    queried = samples[-1].queried_tokens - samples[0].queried_tokens
    return (samples[-1].hit_tokens - samples[0].hit_tokens) / queried if queried else float("nan")
