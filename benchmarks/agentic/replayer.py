# SPDX-License-Identifier: Apache-2.0
"""Plays a trace's sessions, closed loop, against a server: all of them in one event loop."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.agentic.records import CUT, RecordFile, TurnRecord, Window, figures
from benchmarks.agentic.server_metrics import MetricSample, hit_rate, sample, watch
from benchmarks.agentic.streaming import AnswerError, Target, stream_answer
from benchmarks.agentic.trace import Session, Trace
from benchmarks.report import Progress

_MOST_FAILURES_IN_A_ROW = 20


class ServerFailsError(RuntimeError):
    """A server that gives nothing but errors; what came before is kept."""


@dataclass(frozen=True)
class ReplayOptions:
    """How a replay runs.

    Args:
        seconds: when to stop; sessions that are not through are cut. 0 plays the trace to its end.
        warm_s: turns sent before do not count.
        first_token: lowest token id of prompts.
        num_token_kinds: how many token ids prompts draw from.
    """

    seconds: float = 0.0
    warm_s: float = 0.0
    target_tps: float = 70.0
    num_gpus: int = 1
    first_token: int = 1000
    num_token_kinds: int = 7000
    timeout_s: float = 600.0


@dataclass
class Replay:
    """A replay under way; `records` and `samples` hold what has come so far."""

    target: Target
    trace: Trace
    options: ReplayOptions
    file: RecordFile
    records: list[TurnRecord] = field(default_factory=list)
    samples: list[MetricSample] = field(default_factory=list)
    note: Callable[[TurnRecord], None] = lambda _: None
    begin_s: float = 0.0
    cpu_share: float = 0.0
    _failures_in_a_row: int = 0
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _last_error: str = ""

    async def run(self) -> None:
        """Play all sessions. Raises ServerFailsError when one request after the other fails."""
        timeout = aiohttp.ClientTimeout(total=self.options.timeout_s, sock_connect=30)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            self.begin_s = time.perf_counter()
            cpu_s = time.process_time()
            watcher = asyncio.create_task(watch(http, self.target.base_url, self.begin_s, self.samples))
            sessions = [asyncio.create_task(self._play(http, session)) for session in self.trace.sessions]
            stop = asyncio.create_task(self._stop.wait())
            everybody = asyncio.gather(*sessions)
            wait_s = self.options.seconds or None
            await asyncio.wait({everybody, stop}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            for task in (*sessions, stop, watcher):
                task.cancel()
            await asyncio.gather(*sessions, stop, watcher, everybody, return_exceptions=True)
            last = await sample(http, self.target.base_url, self._now_s())
            self.samples += [last] if last is not None else []
            self.cpu_share = (time.process_time() - cpu_s) / max(self._now_s(), 1e-9)
        for task in sessions:
            if not task.cancelled() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc] # not None: a fault of this program
        if self._stop.is_set():
            raise ServerFailsError(
                f"{self.target.base_url}: {_MOST_FAILURES_IN_A_ROW} requests failed in a row, the last with: {self._last_error}"
            )

    def figures(self) -> dict[str, Any]:
        """Return the figures of what has come so far; the hit rate is the server's own where it tells."""
        last_s = max((record.last_s for record in self.records), default=0.0)
        end_s = self.options.seconds or last_s
        window = Window(self.options.warm_s, max(end_s, self.options.warm_s + 1e-9))
        result = figures(self.records, window, self.options.target_tps, self.options.num_gpus)
        of_server = hit_rate(self.samples)
        if not math.isnan(of_server):
            result["hit_rate"] = of_server
        if len(self.samples) > 1:
            result["preemptions"] = self.samples[-1].preemptions - self.samples[0].preemptions
        return {**result, "client_cpu_share": self.cpu_share}

    def _now_s(self) -> float:
        return time.perf_counter() - self.begin_s

    async def _play(self, http: aiohttp.ClientSession, session: Session) -> None:
        await asyncio.sleep(session.start_s)
        for number, turn in enumerate(session.turns):
            if number:
                await asyncio.sleep(turn.gap_s)
            prompt = turn.prompt.token_ids(self.options.first_token, self.options.num_token_kinds)
            record = TurnRecord(session.name, number, self._now_s(), -1.0, -1.0, len(prompt), 0)
            try:
                await stream_answer(http, self.target, prompt, record, turn.output_tokens, self.begin_s)
                self._failures_in_a_row = 0
            except AnswerError as error:
                record.error = str(error)
                self._fail(record.error)
            except asyncio.CancelledError:
                record.error = CUT
                raise
            finally:
                self._keep(record)

    def _fail(self, error: str) -> None:
        self._last_error = error
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= _MOST_FAILURES_IN_A_ROW:
            self._stop.set()

    def _keep(self, record: TurnRecord) -> None:
        if record.first_s < 0:
            record.first_s = record.last_s = self._now_s()
        self.records.append(record)
        self.file.add(record)
        self.note(record)


async def only_model(base_url: str, headers: dict[str, str]) -> str:
    """Return the first model that the server names. Raises ServerFailsError when it does not answer properly."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http,
            http.get(f"{base_url}/v1/models", headers=headers) as response,
        ):
            text = await response.text()
            if response.status != 200:
                raise ServerFailsError(f"{base_url}/v1/models: status {response.status}: {text[:200]}")
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, ConnectionError, LookupError, ValueError, TypeError) as error:
        raise ServerFailsError(f"{base_url}/v1/models: {type(error).__name__}: {error}") from error


def replay(run: Replay, progress: bool) -> None:
    """Run a replay to its end; what came is in its file even when this raises ServerFailsError."""
    with Progress("turns", run.trace.num_turns, shown=progress) as bar:
        run.note = lambda record: bar.advance(record.error or f"last {record.tps:.0f} tokens/s")
        try:
            asyncio.run(run.run())
        finally:
            for item in run.samples:
                run.file.add(item)
