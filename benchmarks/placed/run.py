# SPDX-License-Identifier: Apache-2.0
"""All engines of all models side by side on the same ranks: started together, measured in turns, rep by rep."""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import MULTICAST_OFF, EngineOptions
from benchmarks.gpu.engine_client import EngineFailedError, EngineProcess
from benchmarks.placed.bars import LINK_SIZES_BYTES, QUICK_LINK_SIZES_BYTES, SPLIT, peer_of
from benchmarks.placed.own_cores import CoreShare
from benchmarks.placed.systems import System, systems_of
from benchmarks.served.answers import compared_answers

DECODE_PROMPT_TOKENS = 64
TOKEN_CHECK_REQUESTS, TOKEN_CHECK_PROMPT_TOKENS, TOKEN_CHECK_TOKENS = 16, 200, 48
NUM_BEST = 8
"""Tokens whose log-probabilities are kept at each position: the other engine's token has to be among them."""
EAGER = "-eager"
_WARM_ROUND, _PREFILL_ROUND = 0, 900
_TRACES_TIMEOUT_S = 20.0
_IDLE_S = 1.3
"""After a second without work the processes of an engine stop spinning; then they take no core from the one that is measured."""


class ModelRun:
    """The engines of one model and what they showed."""

    def __init__(self, options: argparse.Namespace, name: str, model_folder: Path, kv_cache_bytes: int) -> None:
        self._options = options
        self._name = name
        self._model_folder = model_folder
        self._kv_cache_bytes = kv_cache_bytes
        self._device = "cpu" if options.quick else "cuda"
        self._systems = {
            name: system
            for name, system in systems_of(self._name, options.ranks, self._device).items()
            if not options.systems or name in options.systems
        }
        self.figures: dict[str, dict[str, Any]] = {name: {} for name in self._systems}
        """By system; what failed has an ``error``."""
        self._eager: dict[str, EngineProcess] = {}
        self._timed: dict[str, EngineProcess] = {}
        self._cores: CoreShare | None = None

    def entries(self, *, eager: bool) -> list[EngineOptions]:
        """The engines to start."""
        return [self._entry(name, eager=eager) for name in self._systems]

    def take(self, running: dict[str, EngineProcess], failures: dict[str, str], *, eager: bool) -> None:
        """Take this model's engines out of all that stand, and note which do not."""
        for name in self._systems:
            key = self._key(name, eager=eager)
            if key in failures:
                self.figures[name].setdefault("error", failures[key])
            elif key in running:
                (self._eager if eager else self._timed)[name] = running[key]
        if self._options.quick:
            self._timed = self._eager

    def note_choice(self, splits_residual: bool) -> None:
        """Whether the cost model chooses what the engine with the forced split runs."""
        if SPLIT in self.figures:
            self.figures[SPLIT]["picked"] = splits_residual

    def share_cores(self, cores: CoreShare) -> None:
        """From now on the engine that is timed has its cores to itself, and the others keep away from them."""
        self._cores = cores
        for engine in self._timed.values():
            cores.confine(engine.pid)

    def check_tokens(self) -> None:
        """Tokens with batch-invariant kernels and the collectives of a step, all eager engines at once.

        One after the other they would take minutes, and time does not matter here.
        """
        self._ask(self._eager, self._tokens_and_collectives, at_once=True)
        _compare_all(self.figures, "answers", "tokens")

    def check_tokens_as_run(self) -> None:
        """Tokens of the engines that are timed."""
        self._ask(self._timed, lambda engine: {"answers_as_run": self._answers(engine)})
        _compare_all(self.figures, "answers_as_run", "tokens_as_run")

    def time_links(self) -> None:
        """The collectives alone, in vLLM's own engine."""
        sizes = QUICK_LINK_SIZES_BYTES if self._options.quick else LINK_SIZES_BYTES
        stock = {name: engine for name, engine in self._timed.items() if name == "stock"}
        self._ask(stock, lambda engine: engine.run("links", sizes_bytes=sizes))

    def time_steps(self, rep: int) -> None:
        """One rep of decode and prefill for each engine; the order turns round with each rep."""
        for name in list(self._timed) if rep % 2 else list(reversed(self._timed)):
            try:
                found = self._rep(self._timed[name], rep)
            except EngineFailedError as error:
                self.figures[name]["error"] = str(error)
                del self._timed[name]
                continue
            if rep != _WARM_ROUND:
                self._add(self.figures[name], found)

    def time_graphs(self) -> None:
        """What the GPU takes for a decode step."""
        self._ask(self._timed, self._graph_times)

    @property
    def num_timed(self) -> int:
        """Engines that are timed and have not failed."""
        return len(self._timed)

    def trace_steps(self) -> None:
        """A trace of a prefill and of a decode step at each batch size; what fails fails behind everything that is timed."""
        self._ask(self._timed, self._traces)

    def _on_cores(self, engine: EngineProcess) -> AbstractContextManager[None]:
        return nullcontext() if self._cores is None else self._cores.given_to(engine.pid)

    @staticmethod
    def _add(figures: dict[str, Any], found_ms: dict[str, float]) -> None:
        reps = figures.setdefault("reps_ms", {})
        for what, milliseconds in found_ms.items():
            reps.setdefault(what, []).append(milliseconds)
        medians = {what: statistics.median(values) for what, values in reps.items()}
        figures["prefill_ms"] = medians.pop("prefill")
        figures["decode_ms"] = medians

    def _key(self, name: str, *, eager: bool) -> str:
        """The engine's name among those of all models; what comes first says whose model it runs."""
        return f"{name}{EAGER if eager else ''}-{self._name}"

    def _entry(self, name: str, *, eager: bool) -> EngineOptions:
        options = self._options
        system: System = self._systems[name]
        captured = sorted({*options.batches, TOKEN_CHECK_REQUESTS})
        return EngineOptions(
            self._key(name, eager=eager),
            str(self._model_folder),
            self._kv_cache_bytes,
            self._device,
            max_requests=max(captured),
            max_model_tokens=max(options.prefill_tokens, 1024) + 128,
            budget_tokens=options.prefill_tokens,
            environment={"VLLM_BATCH_INVARIANT": "1" if eager and not options.quick else "0"},
            llm_settings={
                "dtype": "float32" if options.quick else "bfloat16",
                "tensor_parallel_size": options.ranks,
                "scheduler_cls": None,  # flags choose it, as a user does
                "enable_expert_parallel": system.expert_parallel,
                "enforce_eager": eager,
                "enable_prefix_caching": False,
                "gpu_memory_utilization": 0.05,  # many engines stand side by side; their KV caches have a size of their own
                "worker_extension_cls": "benchmarks.placed.worker.Observed",
                "additional_config": {"tokenspeed": system.flags} if system.flags else {},
                # No other batch is timed, and each graph costs seconds of the start.
                "compilation_config": {} if eager else {"cudagraph_capture_sizes": captured, **system.compilation},
            },
        )

    def _ask(
        self,
        running: dict[str, EngineProcess],
        measure: Callable[[EngineProcess], dict[str, Any]],
        *,
        at_once: bool = False,
    ) -> None:
        def ask(name: str) -> dict[str, Any]:
            try:
                return measure(running[name])
            except EngineFailedError as error:
                return {"error": str(error)}

        with ThreadPoolExecutor(max(1, len(running)) if at_once else 1) as pool:
            for name, found in zip(running, pool.map(ask, running), strict=True):
                self.figures[name] |= found

    def _tokens_and_collectives(self, engine: EngineProcess) -> dict[str, Any]:
        found: dict[str, Any] = {"engine": engine.description}
        found["answers"] = self._answers(engine)
        if self._options.ranks > 1:
            found["collectives"] = engine.run("collectives", prompt_tokens=self._options.prefill_tokens - 1)
        return found

    @staticmethod
    def _answers(engine: EngineProcess) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = engine.run(
            "tokens",
            num_requests=TOKEN_CHECK_REQUESTS,
            max_prompt_tokens=TOKEN_CHECK_PROMPT_TOKENS,
            output_tokens=TOKEN_CHECK_TOKENS,
            num_best=NUM_BEST,
        )["answers"]
        return found

    def _graph_times(self, engine: EngineProcess) -> dict[str, Any]:
        time.sleep(_IDLE_S)
        options = self._options
        asked = {
            "batches": options.batches,
            "prompt_tokens": DECODE_PROMPT_TOKENS,
            "output_tokens": options.decode_steps,
        }
        with self._on_cores(engine):
            return {"decode_gpu_ms": engine.run("graph_times", **asked)}

    def _traces(self, engine: EngineProcess) -> dict[str, Any]:
        options = self._options
        asked = {
            "batches": options.batches,
            "prompt_tokens": DECODE_PROMPT_TOKENS,
            "prefill_tokens": options.prefill_tokens,
        }
        with self._on_cores(engine):
            try:
                return {"traces": engine.run("traces", timeout_s=_TRACES_TIMEOUT_S, **asked)}
            except EngineFailedError as error:
                return {"traces_error": str(error)}

    def _rep(self, engine: EngineProcess, rep: int) -> dict[str, float]:
        """Milliseconds of a decode step at each batch size, and of the prefill."""
        if not self._options.quick:
            time.sleep(_IDLE_S)
        found = {}
        with self._on_cores(engine):
            for what, request in self._requests(rep):
                answer = engine.run("throughput", **request)
                found[what] = answer["elapsed_s"] * 1e3 if what == "prefill" else answer["step_mean_ms"]
        return found

    def _requests(self, rep: int) -> list[tuple[str, dict[str, int]]]:
        options = self._options
        decode = {"prompt_tokens": DECODE_PROMPT_TOKENS, "output_tokens": options.decode_steps, "round": rep}
        found = [(str(batch), {**decode, "num_requests": batch}) for batch in options.batches]
        prefill = {"prompt_tokens": options.prefill_tokens, "output_tokens": 1, "round": _PREFILL_ROUND + rep}
        return [*found, ("prefill", {**prefill, "num_requests": 1})]


def _compare_all(figures: dict[str, dict[str, Any]], kind: str, result: str) -> None:
    """Replace the answers by their comparison with those of vLLM's own model, on as many ranks and as many experts each."""
    answers = {name: found.pop(kind) for name, found in figures.items() if kind in found}
    for name, own in answers.items():
        reference = answers.get(peer_of(name))
        if reference and name != peer_of(name):
            figures[name][result] = compared_answers(reference, own)


def engine_environment(device: str) -> dict[str, str]:
    """No multicast, and the NCCL of torch for vLLM: without one its reduce-scatter does nothing, and says nothing."""
    nccl = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") and device == "cuda" else None
    libraries = (
        [Path(place, "lib", "libnccl.so.2") for place in (nccl.submodule_search_locations or ())] if nccl else []
    )
    found = next((str(library) for library in libraries if library.exists()), None)
    return MULTICAST_OFF | ({"VLLM_NCCL_SO_PATH": found} if found else {})
