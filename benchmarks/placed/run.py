# SPDX-License-Identifier: Apache-2.0
"""All engines of one model side by side on the same ranks: started together, measured in turns, rep by rep."""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.comparison import compare_tokens
from benchmarks.gpu.engine import MULTICAST_OFF, EngineOptions
from benchmarks.gpu.engine_client import EngineFailedError, EngineProcess, engines
from benchmarks.placed.bars import LINK_SIZES_BYTES, QUICK_LINK_SIZES_BYTES, UNFUSED, peer_of

DECODE_PROMPT_TOKENS = 64
TOKEN_CHECK_REQUESTS, TOKEN_CHECK_PROMPT_TOKENS, TOKEN_CHECK_TOKENS = 16, 200, 48
EAGER = "-eager"
_WARM_ROUND, _PREFILL_ROUND = 0, 900
_IDLE_S = 1.3
"""After a second without work the processes of an engine stop spinning; then they take no core from the one that is measured."""


@dataclass(frozen=True)
class System:
    """An engine that is compared: a placement, or None for vLLM's own model, whether experts are split, the scheduler."""

    placement: str | None
    expert_parallel: bool = False
    scheduler: str = "vllm"

    @property
    def flags(self) -> dict[str, str]:
        """Flags of this project that the engine gets."""
        given = {"placement": self.placement, "scheduler": self.scheduler if self.scheduler != "vllm" else None}
        return {flag: value for flag, value in given.items() if value is not None}


def systems_of(model: str, ranks: int, device: str = "cuda") -> dict[str, System]:
    """The engines that are compared; vLLM's CPU kernel cannot split experts."""
    whole = f"attn=tp{ranks},dense=tp{ranks}"
    found = {"stock": System(None), "placed": System("auto"), "ours": System("auto", scheduler="tokenspeed")}
    if ranks > 1:
        found[UNFUSED] = System("auto,fusion=off")
        found["placed-split"] = System(f"{whole},residual=sharded")
    if ranks > 1 and model == "mla" and device != "cpu":
        found["stock-experts"] = System(None, expert_parallel=True)
        found["placed-experts"] = System(f"{whole},moe=ep{ranks}", expert_parallel=True)
    return found


class ModelRun:
    """The measurements of one model."""

    def __init__(self, options: argparse.Namespace, name: str, model_folder: Path, kv_cache_bytes: int) -> None:
        self._options = options
        self._name = name
        self._model_folder = model_folder
        self._kv_cache_bytes = kv_cache_bytes
        self._device = "cpu" if options.quick else "cuda"

    def measure(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Figures by system; what failed has an ``error``."""
        chosen = {
            name: system
            for name, system in systems_of(self._name, self._options.ranks, self._device).items()
            if not self._options.systems or name in self._options.systems
        }
        failures: dict[str, str] = {}
        figures: dict[str, dict[str, Any]] = {name: {} for name in chosen}
        entries = [self._entry(name, system, eager=eager) for name, system in chosen.items() for eager in self._kinds()]
        seconds = self._options.seconds_to_start
        with engines(entries, folder, seconds, _environment(self._device), failures=failures) as running:
            self._note(f"{len(running)} engines stand, {len(failures)} failed")
            eager = {name: running[f"{name}{EAGER}"] for name in chosen if f"{name}{EAGER}" in running}
            self._ask(figures, eager, self._tokens_and_collectives)
            for engine in eager.values():
                if not self._options.quick:
                    engine.let_go()
            timed = {name: running[name] for name in chosen if name in running} or eager
            self._ask(figures, timed, lambda engine: {"answers_as_run": self._answers(engine)})
            if self._options.ranks > 1:
                self._ask(figures, {name: timed[name] for name in ("stock",) if name in timed}, self._links)
            self._times(figures, timed)
            if not self._options.quick:
                self._ask(figures, timed, self._graph_times)
        _compare_all(figures)
        for name, reason in failures.items():
            figures[name.removesuffix(EAGER)].setdefault("error", reason)
        return figures

    def _kinds(self) -> tuple[bool, ...]:
        """On CPU one eager engine does both jobs."""
        return (True,) if self._options.quick else (True, False)

    def _entry(self, name: str, system: System, *, eager: bool) -> EngineOptions:
        options = self._options
        return EngineOptions(
            name + EAGER if eager else name,
            str(self._model_folder),
            self._kv_cache_bytes,
            self._device,
            max_requests=max(*options.batches, TOKEN_CHECK_REQUESTS),
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
            },
        )

    def _ask(self, figures: dict[str, dict[str, Any]], running: dict[str, EngineProcess], measure: Any) -> None:
        for name, engine in running.items():
            try:
                figures[name] |= measure(engine)
            except EngineFailedError as error:
                figures[name]["error"] = str(error)

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
        )["answers"]
        return found

    def _links(self, engine: EngineProcess) -> dict[str, Any]:
        sizes = QUICK_LINK_SIZES_BYTES if self._options.quick else LINK_SIZES_BYTES
        return {"links": engine.run("links", sizes_bytes=sizes)}

    def _graph_times(self, engine: EngineProcess) -> dict[str, Any]:
        time.sleep(_IDLE_S)
        options = self._options
        asked = {
            "batches": options.batches,
            "prompt_tokens": DECODE_PROMPT_TOKENS,
            "output_tokens": options.decode_steps,
        }
        return {"decode_gpu_ms": engine.run("graph_times", **asked)}

    def _times(self, figures: dict[str, dict[str, Any]], running: dict[str, EngineProcess]) -> None:
        """Decode and prefill of all engines in turns; the order turns round with each rep."""
        reps: dict[str, dict[str, list[float]]] = {name: {} for name in running}
        standing = dict(running)
        for rep in range(self._options.reps + 1):
            for name in list(standing) if rep % 2 else list(reversed(standing)):
                try:
                    found = self._rep(standing[name], rep)
                except EngineFailedError as error:
                    figures[name]["error"] = str(error)
                    del standing[name]
                    continue
                for what, milliseconds in found.items() if rep != _WARM_ROUND else ():
                    reps[name].setdefault(what, []).append(milliseconds)
        for name, found_ms in reps.items():
            figures[name]["reps_ms"] = found_ms
            medians = {what: statistics.median(values) for what, values in found_ms.items()}
            if "prefill" in medians:
                figures[name]["prefill_ms"] = medians.pop("prefill")
                figures[name]["decode_ms"] = medians

    def _rep(self, engine: EngineProcess, rep: int) -> dict[str, float]:
        """Milliseconds of a decode step at each batch size, and of the prefill."""
        if not self._options.quick:
            time.sleep(_IDLE_S)
        found = {}
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

    def _note(self, text: str) -> None:
        print(f"{self._name}: {text}", file=sys.stderr, flush=True)


def _compare_all(figures: dict[str, dict[str, Any]]) -> None:
    """Replace the answers by their comparison with those of vLLM's own model, on as many ranks and as many experts each."""
    for kind, result in (("answers", "tokens"), ("answers_as_run", "tokens_as_run")):
        answers = {name: found.pop(kind) for name, found in figures.items() if kind in found}
        for name, own in answers.items():
            reference = answers.get(peer_of(name))
            if reference and name != peer_of(name):
                figures[name][result] = compare_tokens(reference, own)


def _environment(device: str) -> dict[str, str]:
    """No multicast, and the NCCL of torch for vLLM: without one its reduce-scatter does nothing, and says nothing."""
    nccl = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") and device == "cuda" else None
    libraries = (
        [Path(place, "lib", "libnccl.so.2") for place in (nccl.submodule_search_locations or ())] if nccl else []
    )
    found = next((str(library) for library in libraries if library.exists()), None)
    return MULTICAST_OFF | ({"VLLM_NCCL_SO_PATH": found} if found else {})
