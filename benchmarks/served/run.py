# SPDX-License-Identifier: Apache-2.0
"""Stock and ours side by side on one GPU: started together, measured in turns, rep by rep."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.comparison import compare_tokens
from benchmarks.gpu.engine import EngineOptions
from benchmarks.gpu.engine_client import EngineFailedError, EngineProcess, engines
from benchmarks.served.bars import CONTROL
from benchmarks.served.kernel_times import KernelTimesError, in_own_process

SYSTEMS = ("stock", "ours")
KV_TOKEN_BYTES_PER_LAYER = 1152
MIXED_PROMPT_TOKENS = 512
NUM_BEST = 20
"""Log-probabilities at every position: as many as vLLM gives by default."""
_IDLE_S = 1.3
"""After a second without work an engine's processes stop spinning; then they take no core from the one that is measured."""


class Run:
    """One run of the benchmark; `figures` grows part by part."""

    def __init__(self, options: argparse.Namespace, model_folder: Path, layers: int) -> None:
        self.figures: dict[str, Any] = {
            "sessions": options.sessions,
            "context_tokens": options.context_tokens,
            "layers": layers,
            "kernels": options.kernels,
            "engines": {system: {} for system in self._systems(options)},
        }
        self._options, self._model_folder, self._layers = options, model_folder, layers
        self._deadline = time.monotonic() + options.seconds

    def measure(self, folder: Path, write: Callable[[], None]) -> None:
        """Run all parts; `write` is called after each."""
        failures: dict[str, str] = {}
        entries = [self._entry(system) for system in self.figures["engines"]]
        environment = {"VLLM_BATCH_INVARIANT": "0"}
        with engines(entries, folder, self._options.startup_seconds, environment, failures=failures) as running:
            for system, reason in failures.items():
                self.figures["engines"][system]["error"] = reason
            self._note(f"engines stand: {', '.join(running) or 'none'}; failed: {failures or 'none'}")
            self._ask(running, lambda engine: {"engine": engine.description})
            self._ask(running, lambda engine: {"who": engine.run("who_decodes", counts=self._options.sessions)})
            write()
            timed = {system: running[system] for system in SYSTEMS if system in running}
            self._ask(timed, self._fill)
            self._times(timed)
            write()
            self._tokens(running)
            write()
            if not self._options.no_kernel_times and self._options.device == "cuda":
                self._kernel_times()
                write()

    @staticmethod
    def _systems(options: argparse.Namespace) -> tuple[str, ...]:
        return SYSTEMS if options.no_control else (*SYSTEMS, CONTROL)

    def _entry(self, system: str) -> EngineOptions:
        options = self._options
        longest = max(options.context_tokens, MIXED_PROMPT_TOKENS)
        longest += max(options.output_tokens, options.token_outputs) + 64
        tokens = max(options.sessions) * (longest + 128) + 640 * options.token_requests
        ours = {"tokenspeed": {"kernels": options.kernels}}
        return EngineOptions(
            system,
            str(self._model_folder),
            tokens * KV_TOKEN_BYTES_PER_LAYER * self._layers + (1 << 28),
            options.device,
            max_requests=max(16, *options.sessions),
            max_model_tokens=longest,
            llm_settings={
                "scheduler_cls": None,  # vLLM's own in both, so that nothing else differs
                "gpu_memory_utilization": 0.05,
                "worker_extension_cls": "benchmarks.served.worker.Timed",
                "additional_config": ours if system == "ours" else {},
                **({"attention_backend": "FLASHMLA"} if system == CONTROL else {}),
            },
        )

    def _fill(self, engine: EngineProcess) -> dict[str, Any]:
        return {"fill_s": engine.run("fill_sessions", **self._sessions(max(self._options.sessions)))["elapsed_s"]}

    def _sessions(self, count: int) -> dict[str, int]:
        return {"num_sessions": count, "context_tokens": self._options.context_tokens}

    def _ask(self, running: dict[str, EngineProcess], measure: Callable[[EngineProcess], dict[str, Any]]) -> None:
        for system in list(running):
            try:
                self.figures["engines"][system] |= measure(running[system])
            except EngineFailedError as error:
                self.figures["engines"][system]["error"] = str(error)
                del running[system]
            self._note(f"{system}: {_short(self.figures['engines'][system])}")

    def _times(self, running: dict[str, EngineProcess]) -> None:
        """All session counts of both engines in turns; the order turns round with each rep, and the first rep only warms up."""
        reps: dict[str, dict[str, list[dict[str, float]]]] = {system: {} for system in running}
        for rep in range(self._options.reps + 1):
            for system in list(running) if rep % 2 else list(reversed(running)):
                if self._options.device == "cuda":
                    time.sleep(_IDLE_S)
                for count in self._options.sessions:
                    try:
                        found = running[system].run(
                            "decode_sessions",
                            round=rep,
                            output_tokens=self._options.output_tokens,
                            **self._sessions(count),
                        )
                    except EngineFailedError as error:
                        self.figures["engines"][system]["error"] = str(error)
                        del running[system]
                        break
                    if rep:
                        reps[system].setdefault(str(count), []).append(found)
            if time.monotonic() > self._deadline:
                self._note(f"stopped after {rep} of {self._options.reps} reps: out of time")
                break
        for system, by_count in reps.items():
            self.figures["engines"][system]["decode"] = {count: _summary(found) for count, found in by_count.items()}

    def _tokens(self, running: dict[str, EngineProcess]) -> None:
        options = self._options
        requests = {
            "tokens": {"num_requests": options.token_requests, "max_prompt_tokens": MIXED_PROMPT_TOKENS},
            "session_tokens": self._sessions(min(4, max(options.sessions))),
        }
        for command, result in (("tokens", "tokens"), ("session_tokens", "long_tokens")):
            answers: dict[str, list[dict[str, Any]]] = {}
            for system, engine in running.items():
                try:
                    found = engine.run(
                        command, output_tokens=options.token_outputs, num_best=NUM_BEST, **requests[command]
                    )
                    answers[system] = found["answers"]
                except EngineFailedError as error:
                    self.figures["engines"][system][f"{result}_error"] = str(error)
            stock = answers.pop("stock", None)
            for system, own in answers.items() if stock is not None else ():
                compared = compare_tokens(stock, own) | {"error": logprob_error(stock, own)}
                self.figures.setdefault(result, {})[system] = compared

    def _kernel_times(self) -> None:
        try:
            self.figures["kernels_us"] = in_own_process(self._options.context_tokens, self._options.sessions)
        except KernelTimesError as error:
            self.figures["kernels_error"] = str(error)[:300]
            self._note(self.figures["kernels_error"])

    @staticmethod
    def _note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def logprob_error(stock: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, float]:
    """Difference of the log-probability of stock's best token, at positions before the answers part."""
    differences = []
    for first, second in zip(stock, ours, strict=True):
        for position, (one, other) in enumerate(zip(first["best"], second["best"], strict=False)):
            known = dict(other)
            if one[0][0] in known:
                differences.append(abs(one[0][1] - known[one[0][0]]))
            if first["tokens"][position] != second["tokens"][position]:
                break
    return {
        "positions": len(differences),
        "mean": statistics.fmean(differences) if differences else float("nan"),
        "largest": max(differences, default=float("nan")),
    }


def _summary(reps: list[dict[str, float]]) -> dict[str, Any]:
    names = {name for rep in reps for name in rep}
    medians = {name: statistics.median(rep[name] for rep in reps if name in rep) for name in sorted(names)}
    return medians | {"reps": reps}


def _short(figures: dict[str, Any]) -> str:
    return str(figures)[:600]
