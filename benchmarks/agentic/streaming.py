# SPDX-License-Identifier: Apache-2.0
"""One streamed completion: when its tokens came, and what the server said at the end."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.agentic.records import TurnRecord


class AnswerError(RuntimeError):
    """The server did not give a whole answer; the message says what it gave."""


@dataclass(frozen=True)
class Target:
    """A server and the model to ask for."""

    base_url: str
    model: str
    headers: dict[str, str] = field(default_factory=dict)


async def stream_answer(
    http: aiohttp.ClientSession,
    target: Target,
    prompt: list[int],
    record: TurnRecord,
    num_tokens: int,
    begin_s: float,
) -> None:
    """Ask for `num_tokens` tokens after `prompt` and note in `record` what comes, times relative to `begin_s`.

    Raises:
        AnswerError: a status other than 200, an error in the stream, or an end before the last token.
    """
    body = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with http.post(f"{target.base_url}/v1/completions", json=body, headers=target.headers) as response:
            if response.status != 200:
                text = (await response.text())[:300].strip()
                raise AnswerError(f"status {response.status}: {text or 'no text'}")
            usage = await _read_events(response, record, begin_s)
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        raise AnswerError(f"{type(error).__name__}: {error}") from error
    if usage is None:
        raise AnswerError(f"the stream ended after {record.output_tokens} pieces without usage and [DONE]")
    record.output_tokens = int(usage["completion_tokens"])
    details = usage.get("prompt_tokens_details") or {}
    if details.get("cached_tokens") is not None:
        record.cached_tokens = int(details["cached_tokens"])
    if record.output_tokens != num_tokens:
        raise AnswerError(f"{record.output_tokens} tokens instead of {num_tokens}")


async def _read_events(response: aiohttp.ClientResponse, record: TurnRecord, begin_s: float) -> dict[str, Any] | None:
    """Note the time of every piece; return the usage, or None when the stream breaks off before it is complete."""
    usage = None
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            return usage
        # Most pieces are not parsed: one process reads the streams of thousands of sessions.
        if b'"choices":[]' in line or b'"error"' in line[:40]:
            event = json.loads(line[6:])
            if "error" in event:
                raise AnswerError(f"error in the stream: {str(event['error'])[:300]}")
            usage = event.get("usage") or usage
            continue
        now_s = time.perf_counter() - begin_s
        if record.output_tokens:
            record.longest_gap_s = max(record.longest_gap_s, now_s - record.last_s)
        else:
            record.first_s = now_s
        record.last_s = now_s
        record.output_tokens += 1
    return None
