# SPDX-License-Identifier: Apache-2.0
"""The order of a run: which engines stand when, and what is measured on them."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.comparison import compare_tokens
from benchmarks.gpu.engine import EngineOptions
from benchmarks.gpu.engine_client import EngineFailedError, EngineProcess, engines
from benchmarks.gpu.models import MODELS, TINY_MODELS, write_model
from benchmarks.gpu.server import measure_server, server
from benchmarks.gpu.streaming_client import ClientLoad

PARTS = ("engine", "profile", "tokens", "server")
_WARM_ROUND = 0
_FRONTEND_ROUND = 900
_SERVER_ROUND = 950


class Run:
    """Runs the chosen parts on the chosen models within the time given, gathering figures."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.figures: dict[str, Any] = {}
        self._options = options
        self._folder = folder
        self._deadline = time.monotonic() + options.seconds

    def parts(self) -> Iterator[dict[str, Any]]:
        """Run part after part; yield all figures so far after each."""
        measures = {
            "engine": self._engine,
            "profile": self._profile,
            "tokens": self._tokens,
            "server": self._server,
        }
        for name in self._options.models:
            models = TINY_MODELS if self._options.tiny else MODELS
            folder = write_model(models[name], self._folder)
            for part in self._options.parts:
                self._note(f"{name}: {part}, {self._seconds_left():.0f} s left")
                try:
                    figures = measures[part](folder, models[name].kv_cache_bytes)
                except EngineFailedError as error:
                    figures = {"error": str(error)}
                self.figures.setdefault(name, {})[part] = figures
                yield self.figures

    def _seconds_left(self) -> float:
        return float(self._deadline - time.monotonic())

    @staticmethod
    def _note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _startup_s(self) -> float:
        """Return how long engines may take to start; raise EngineFailedError when no time is left."""
        left = self._seconds_left()
        if left < 30:
            raise EngineFailedError(f"not run: {left:.0f} s left of {self._options.seconds:.0f}")
        return float(min(self._options.startup_seconds, left))

    def _engine_options(self, folder: Path, kv_cache_bytes: int, **settings: Any) -> list[EngineOptions]:
        options = self._options
        longest = max(2048, options.prompt_tokens + options.output_tokens)
        return [
            EngineOptions(
                system,
                str(folder),
                kv_cache_bytes,
                options.device,
                max_requests=max(16, *options.counts),
                max_model_tokens=longest,
                **settings,
            )
            for system in options.systems
        ]

    def _batch(self, num_requests: int, round_number: int) -> dict[str, int]:
        return {
            "num_requests": num_requests,
            "round": round_number,
            "prompt_tokens": self._options.prompt_tokens,
            "output_tokens": self._options.output_tokens,
        }

    def _engine(self, folder: Path, kv_cache_bytes: int) -> dict[str, Any]:
        entries = self._engine_options(folder, kv_cache_bytes)
        together = not self._options.one_by_one
        with engines(entries, self._folder, self._startup_s(), together=together) as running:
            self._warm_up(running)
            counts: dict[str, Any] = {}
            for count in self._options.counts:
                reps: dict[str, list[dict[str, float]]] = {system: [] for system in running}
                for rep in range(self._options.reps):
                    for system, engine in running.items():
                        reps[system].append(engine.run("throughput", **self._batch(count, 1 + rep)))
                counts[str(count)] = {system: _medians(figures) for system, figures in reps.items()}
                self._note(f"  N={count}: {counts[str(count)]}")
            largest = max(self._options.counts)
            frontend = {
                system: engine.run("frontend", **self._batch(largest, _FRONTEND_ROUND))
                for system, engine in running.items()
            }
            engines_built = {system: engine.description for system, engine in running.items()}
        return {"engines": engines_built, "counts": counts, "frontend": {str(largest): frontend}}

    def _warm_up(self, running: dict[str, EngineProcess]) -> None:
        for engine in running.values():
            engine.run("throughput", **self._batch(min(8, max(self._options.counts)), _WARM_ROUND))

    def _profile(self, folder: Path, kv_cache_bytes: int) -> dict[str, Any]:
        entries = self._engine_options(folder, kv_cache_bytes, in_process=True)
        together = not self._options.one_by_one
        with engines(entries, self._folder, self._startup_s(), together=together) as running:
            self._warm_up(running)
            counts = {
                str(count): {
                    system: engine.run("profile", **self._batch(count, 1)) for system, engine in running.items()
                }
                for count in self._options.counts
            }
            engines_built = {system: engine.description for system, engine in running.items()}
        return {"engines": engines_built, "counts": counts}

    def _tokens(self, folder: Path, kv_cache_bytes: int) -> dict[str, Any]:
        """Try batch-invariant kernels first, then vLLM's usual ones."""
        try:
            return self._tokens_with(folder, kv_cache_bytes, batch_invariant=True)
        except EngineFailedError as error:
            reason = str(error)
        figures = self._tokens_with(folder, kv_cache_bytes, batch_invariant=False)
        return {**figures, "batch_invariant_failed": reason}

    def _tokens_with(self, folder: Path, kv_cache_bytes: int, batch_invariant: bool) -> dict[str, Any]:
        entries = self._engine_options(folder, kv_cache_bytes, in_process=True, varied_weights=True)
        environment = {"VLLM_BATCH_INVARIANT": "1" if batch_invariant else "0"}
        request = {
            "num_requests": self._options.token_requests,
            "max_prompt_tokens": 512,
            "output_tokens": 64,
        }
        together = not self._options.one_by_one
        with engines(entries, self._folder, self._startup_s(), environment, together) as running:
            answers = {system: engine.run("tokens", **request) for system, engine in running.items()}
            engines_built = {system: engine.description for system, engine in running.items()}
        figures: dict[str, Any] = {
            "engines": engines_built,
            "batch_invariant": batch_invariant,
            "elapsed_s": {system: answer["elapsed_s"] for system, answer in answers.items()},
        }
        if {"stock", "ours"} <= set(answers):
            figures |= compare_tokens(answers["stock"]["answers"], answers["ours"]["answers"])
        return figures

    def _server(self, folder: Path, kv_cache_bytes: int) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        count = self._options.server_requests
        for entry in self._engine_options(folder, kv_cache_bytes):
            with server(entry, self._folder, self._startup_s()) as (base, pid):
                results = {}
                for offset, (name, stream) in enumerate((("warm", True), ("whole", False), ("streaming", True))):
                    load = ClientLoad(
                        count,
                        self._options.prompt_tokens,
                        self._options.output_tokens,
                        stream,
                        _SERVER_ROUND + offset,
                    )
                    results[name] = measure_server(base, pid, load, num_clients=min(4, count))
                figures[entry.system] = {"requests": count, **results}
        return figures


def _medians(reps: list[dict[str, float]]) -> dict[str, Any]:
    """Return the median of every figure, with all values of the throughput."""
    figures: dict[str, Any] = {key: statistics.median(rep[key] for rep in reps) for key in reps[0]}
    figures["tokens_per_s_reps"] = [rep["tokens_per_s"] for rep in reps]
    return figures
