# SPDX-License-Identifier: Apache-2.0
"""All engines of a run side by side on one GPU: started together, measured in turns, rep by rep."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine_client import EngineFailedError, EngineProcess, engines
from benchmarks.served.answers import compared_answers
from benchmarks.served.kernel_times import KernelTimesError, in_own_process
from benchmarks.served.systems import (
    APPEND,
    MIXED_PROMPT_TOKENS,
    SYSTEMS,
    control,
    decoding,
    draft_tokens,
    drafting,
    entry,
    systems,
)
from benchmarks.served.turns import Cell, in_turns

NUM_BEST = 20
"""Log-probabilities at every position: as many as vLLM gives by default."""
_TRACED_TOKENS, _TRACED_REPLAYS = 16, 20


class Run:
    """One run of the benchmark; `figures` grows part by part."""

    def __init__(self, options: argparse.Namespace, model_folder: Path, layers: int) -> None:
        self.figures: dict[str, Any] = {
            "sessions": options.sessions,
            "context_tokens": options.context_tokens,
            "drafts": options.drafts,
            "draft_sessions": options.draft_sessions,
            "contexts": options.contexts,
            "returning": options.returning,
            "append": options.append,
            "layers": layers,
            "kernels": options.kernels,
            "kv_cache_dtype": options.kv_cache_dtype,
            "engines": {system: {} for system in systems(options)},
        }
        self._options, self._model_folder, self._layers = options, model_folder, layers
        self._deadline = time.monotonic() + options.seconds
        self._known: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def measure(self, folder: Path, write: Callable[[], None]) -> None:
        """Run all parts; `write` is called after each."""
        failures: dict[str, str] = {}
        entries = [entry(name, self._options, self._model_folder, self._layers) for name in self.figures["engines"]]
        environment = {"VLLM_BATCH_INVARIANT": "0"}
        with engines(entries, folder, self._options.startup_seconds, environment, failures=failures) as running:
            for system, reason in failures.items():
                self.figures["engines"][system]["error"] = reason
            self._note(f"engines stand: {', '.join(running) or 'none'}; failed: {failures or 'none'}")
            self._ask(running, lambda engine: {"engine": engine.description})
            self._ask(running, self._who)
            for part in self._parts():
                write()
                if time.monotonic() > self._deadline:
                    self._note(f"out of time: {part.__name__} and what follows is left out")
                    break
                part(running)
            write()

    def _parts(self) -> list[Callable[[dict[str, EngineProcess]], None]]:
        known, alone = self._options.kernel_times is not None, not self._options.no_kernel_times
        measured = alone and not known and self._options.device == "cuda"
        return [
            *([self._kernel_times] if known else []),
            self._times,
            self._alike_times,
            self._returning_times,
            self._long_times,
            self._tokens,
            self._traces,  # a tracer may stay attached to the engines without drafts: nothing is timed on them after it
            self._draft_times,
            *([self._kernel_times] if measured else []),
            self._draft_tokens,
        ]

    def _who(self, engine: EngineProcess) -> dict[str, Any]:
        drafts = next((drafts for drafts in self._options.drafts if engine.options.system in drafting(drafts)), 0)
        counts = self._options.draft_sessions if drafts else self._options.sessions
        return {"who": engine.run("who_decodes", counts=counts, drafts=drafts)}

    def _times(self, running: dict[str, EngineProcess]) -> None:
        """All session counts of the engines without drafts in turns."""
        cells = [Cell(str(n), self._sessions(n)) for n in self._options.sessions]
        self._turns(running, decoding(self._options), "decode", cells)

    def _alike_times(self, running: dict[str, EngineProcess]) -> None:
        """The same with the same experts for every token, which leaves attention as the only difference.

        Otherwise rounding decides between experts that are nearly as good, and one expert more or less in a step moves its
        time by as much as a better attention kernel does in a layer.
        """
        for alike in (True, False):
            self._ask(running, lambda engine, alike=alike: engine.run("route_alike", alike=alike), SYSTEMS)
            if alike and all(self.figures["engines"][name].get("routers") for name in SYSTEMS):
                cells = [Cell(str(n), self._sessions(n)) for n in self._options.sessions]
                self._turns(running, SYSTEMS, "decode_alike", cells)

    def _draft_times(self, running: dict[str, EngineProcess]) -> None:
        """The same with drafts, all of which are taken."""
        counts = self._options.draft_sessions
        for drafts in self._options.drafts:
            cells = [Cell(str(n), {**self._sessions(n), "drafts": drafts}) for n in counts]
            self._turns(running, drafting(drafts), "decode", cells)

    def _long_times(self, running: dict[str, EngineProcess]) -> None:
        """One session whose context grows; each context is the beginning of the next."""
        cells = [Cell(str(n), {"num_sessions": 1, "context_tokens": n}) for n in self._options.contexts]
        self._turns(running, SYSTEMS, "decode_long", cells)

    def _returning_times(self, running: dict[str, EngineProcess]) -> None:
        """Turns of the first session that come back with new tokens, with the append fused, too: outside of whole graphs it costs
        an operation more of the host.
        """
        one = {"context_tokens": self._options.context_tokens}
        cells = [Cell(str(n), {**one, "new_tokens": n}, "returning_turn") for n in self._options.returning]
        self._turns(running, decoding(self._options), "returning_turns", cells)

    def _turns(
        self, running: dict[str, EngineProcess], names: Sequence[str], result: str, cells: Sequence[Cell]
    ) -> None:
        chosen = {name: running[name] for name in names if name in running}
        if not chosen or not cells:
            return
        idle_s = self._options.idle_seconds if self._options.device == "cuda" else 0.0
        measured = in_turns(
            chosen, cells, self._options.reps, self._options.output_tokens, idle_s=idle_s, deadline=self._deadline
        )
        for name, found in measured.items():
            self.figures["engines"][name] |= {result: found.by_cell} if found.by_cell else {}
            if found.error:
                self._lost(running, name, found.error)
            self._note(f"{name}: {_short(found.by_cell)}")

    def _traces(self, running: dict[str, EngineProcess]) -> None:
        """The kernels of the decode graph."""
        if self._options.no_traces:
            return
        for count in self._options.sessions:
            request = {**self._sessions(count), "output_tokens": _TRACED_TOKENS, "replays": _TRACED_REPLAYS}

            def traced(engine: EngineProcess, count: int = count, request: dict[str, Any] = request) -> dict[str, Any]:
                found = engine.run("graph_kernels", round=count, **request)
                known: dict[str, Any] = self.figures["engines"][engine.options.system].get("graphs", {})
                return {"graphs": {**known, str(count): found}}

            self._ask(running, traced, decoding(self._options))

    def _sessions(self, count: int) -> dict[str, int]:
        return {"num_sessions": count, "context_tokens": self._options.context_tokens}

    def _ask(
        self,
        running: dict[str, EngineProcess],
        measure: Callable[[EngineProcess], dict[str, Any]],
        names: Sequence[str] | None = None,
    ) -> None:
        for system in [name for name in running if names is None or name in names]:
            try:
                self.figures["engines"][system] |= measure(running[system])
            except EngineFailedError as error:
                self._lost(running, system, str(error))
            self._note(f"{system}: {_short(self.figures['engines'][system])}")

    def _lost(self, running: dict[str, EngineProcess], system: str, reason: str) -> None:
        self.figures["engines"][system]["error"] = reason
        running.pop(system, None)

    def _tokens(self, running: dict[str, EngineProcess]) -> None:
        names = ("stock", "ours", APPEND, control(self._options.kv_cache_dtype))
        for kind in ("tokens", "long_tokens"):
            self._compare(kind, "stock", self._answers(running, names, kind))
        if self._options.returning:
            self._compare("returning_tokens", "stock", self._answers(running, SYSTEMS, "returning_tokens"))

    def _draft_tokens(self, running: dict[str, EngineProcess]) -> None:
        """With drafts, of which random weights take few: what was drafted and not taken must leave no trace.

        How far vLLM's own answers with and without drafts lie apart stands beside it.
        """
        for drafts in self._options.drafts:
            answers = self._answers(running, (*drafting(drafts), "stock"), "tokens")
            self._compare(draft_tokens(drafts), drafting(drafts)[0], answers)

    def _answers(
        self, running: dict[str, EngineProcess], names: Sequence[str], kind: str
    ) -> dict[str, list[dict[str, Any]]]:
        """The answers of each engine; one that was asked already is not asked again."""
        options = self._options
        request: dict[str, Any] = {"output_tokens": options.token_outputs, "num_best": NUM_BEST}
        if kind == "tokens":
            request |= {"num_requests": options.token_requests, "max_prompt_tokens": MIXED_PROMPT_TOKENS}
        else:
            request |= self._sessions(min(4, max(options.sessions)))
        if kind == "returning_tokens":
            request["new_tokens"] = max(options.returning)
        command = {"long_tokens": "session_tokens"}.get(kind, kind)
        for name in names:
            if name in running and (name, kind) not in self._known:
                try:
                    self._known[name, kind] = running[name].run(command, **request)["answers"]
                except EngineFailedError as error:
                    self.figures["engines"][name][f"{kind}_error"] = str(error)
        return {name: self._known[name, kind] for name in names if (name, kind) in self._known}

    def _compare(self, result: str, stock: str, answers: dict[str, list[dict[str, Any]]]) -> None:
        own = answers.pop(stock, None)
        if own is not None:
            self.figures[result] = {name: compared_answers(own, other) for name, other in answers.items()}

    def _kernel_times(self, _: dict[str, EngineProcess]) -> None:
        known = self._options.kernel_times
        try:
            if known is not None:
                self.figures["kernels_us"] = json.loads(Path(known).read_text())
            else:
                self.figures["kernels_us"] = in_own_process(
                    self._options.context_tokens, self._options.sessions, self._options.kv_cache_dtype
                )
        except (KernelTimesError, OSError, ValueError) as error:
            self.figures["kernels_error"] = str(error)[:300]
            self._note(self.figures["kernels_error"])

    @staticmethod
    def _note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _short(figures: dict[str, Any]) -> str:
    return str(figures)[:600]
