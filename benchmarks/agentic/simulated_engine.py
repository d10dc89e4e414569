# SPDX-License-Identifier: Apache-2.0
"""An engine whose scheduler is real and whose GPU is a step-time model on a virtual clock.

The order of a step follows vLLM's loop: schedule, launch, and once as many steps are in flight as the engine queues,
wait for the oldest and take its results in. The device runs steps one after the other. What a scheduler delivers is
read from the outputs that it returns, never assumed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import core as engine_core
from vllm.v1.outputs import ModelRunnerOutput

from benchmarks.agentic.bound import StepDone
from benchmarks.agentic.step_time import StepShape, StepTimeModel
from benchmarks.control.vllm_plane import arriving_request, build_engine, greedy

SCHEDULERS = {
    "stock": "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
    "ours": "tokenspeed_plugin.scheduler_fsm.TokenSpeedScheduler",
}
_TOKEN = 7  # what answers consist of; nothing depends on it
_NOTHING = StepShape(0, 0, 0, 0)


@dataclass(frozen=True)
class EngineSettings:
    """A system and how it is tuned.

    Args:
        system: ``stock`` or ``ours``.
        num_blocks: usable blocks of the pool.
        target_tps: `target_tps_per_user` of ours; 0 is off.
        depth: steps in flight; 2 is asynchronous scheduling.
        knows_graphs: whether the scheduler is told for how many tokens CUDA graphs are captured.
    """

    system: str
    num_blocks: int
    block_tokens: int = 64
    max_num_seqs: int = 256
    budget_tokens: int = 8192
    long_prefill_tokens: int = 0
    target_tps: float = 0.0
    depth: int = 2
    knows_graphs: bool = True

    def describe(self) -> str:
        """Return the tuning in few words."""
        parts = [f"batched_tokens={self.budget_tokens}", f"seqs={self.max_num_seqs}"]
        parts += [f"long_prefill={self.long_prefill_tokens}"] if self.long_prefill_tokens else []
        parts += [f"target={self.target_tps:g}"] if self.target_tps else []
        return f"{self.system} {' '.join(parts)}"


class Emission(NamedTuple):
    """Tokens that a request got from a step."""

    request_id: str
    num_tokens: int
    finished: bool
    cached_tokens: int
    """Prompt tokens from the cache at its first admission."""


@dataclass
class _Progress:
    prompt_tokens: int
    num_delivered: int = 0
    num_pending: int = 0
    cached_tokens: int = -1


@dataclass
class _InFlight:
    output: SchedulerOutput
    samples: list[str] = field(default_factory=list)
    shape: StepShape = _NOTHING
    begin_ms: float = 0.0
    end_ms: float = 0.0
    device_ms: float = 0.0
    update_ms: float = 0.0


class SimulatedEngine:
    """One engine. `now_s` is its virtual clock: the time of its CPU thread."""

    def __init__(self, settings: EngineSettings, times: StepTimeModel) -> None:
        scheduler: dict[str, Any] = {}
        if settings.long_prefill_tokens:
            scheduler["long_prefill_token_threshold"] = settings.long_prefill_tokens
        self._engine = build_engine(
            SCHEDULERS[settings.system],
            settings.block_tokens,
            settings.num_blocks,
            settings.max_num_seqs,
            settings.budget_tokens,
            settings.depth,
            scheduler,
            _additional_config(settings),
            times.graph_sizes() if settings.knows_graphs else (),
        )
        self.scheduler = self._engine.scheduler
        self.now_s = 0.0
        self.device_s = 0.0
        self.num_steps = 0
        self.num_preemptions = 0
        self.steps: list[StepDone] = []
        self.most_host_ms = 0.0
        """The longest that the CPU thread was busy with a step."""
        self.times = times
        self._depth = settings.depth
        self._device_free_ms = 0.0
        self._progress: dict[str, _Progress] = {}
        self._queue: deque[_InFlight] = deque()
        if settings.target_tps:
            self.scheduler.use_clock(lambda: self.now_s)

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        """Submit a request."""
        self._progress[request_id] = _Progress(len(prompt))
        arrival = arriving_request(request_id, prompt, greedy(max_tokens))
        request, wave = engine_core.EngineCore.preprocess_add_request(self._engine, arrival)
        engine_core.EngineCore.add_request(self._engine, request, wave)

    @property
    def is_idle(self) -> bool:
        """Nobody runs or waits, nothing is in flight."""
        return not self._progress and not self._queue

    def model_error(self) -> float:
        """Return by how much ours mistook its steps, as a share of their time; NaN where it measures none."""
        core = getattr(self.scheduler, "_core", None)
        rows = core.step_classes() if core is not None else []
        measured_ms = sum(row[4] for row in rows)
        return sum(row[5] for row in rows) / measured_ms if measured_ms else math.nan

    def step(self) -> list[Emission] | None:
        """Plan and launch a step, or take the oldest results in; None when there was nothing to do."""
        planned = len(self._queue) < self._depth and self._plan()
        if planned and len(self._queue) < self._depth:
            return []
        if not self._queue:
            return None
        return self._take_in(self._queue.popleft())

    def _plan(self) -> bool:
        output = self.scheduler.schedule()
        self.num_preemptions += len(output.preempted_req_ids or ())
        if not output.total_num_scheduled_tokens:
            return False
        step = _InFlight(output)
        step.shape = self._shape(output, step.samples)
        host = self.times.host(step.shape)
        now_ms = self.now_s * 1e3 + host.schedule_ms + host.runner_ms
        self.most_host_ms = max(self.most_host_ms, sum(host))
        device_ms = step.device_ms = self.times.device_ms(step.shape)
        # A CUDA graph is launched at once, when all is prepared. Without one the device begins with the first kernel and
        # is not through before the last one is launched.
        is_graph = not step.shape.prefill_tokens
        launched_ms = now_ms if is_graph else now_ms - host.runner_ms
        step.begin_ms = max(launched_ms, self._device_free_ms)
        step.end_ms = max(step.begin_ms + device_ms, now_ms)
        step.update_ms = host.update_ms
        self._device_free_ms = step.end_ms
        self.now_s = now_ms / 1e3
        self.device_s += device_ms / 1e3
        self.num_steps += 1
        self._queue.append(step)
        return True

    def _shape(self, output: SchedulerOutput, samples: list[str]) -> StepShape:
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for request_id, num_tokens in computed.items():
            progress = self._progress[request_id]
            progress.cached_tokens = num_tokens if progress.cached_tokens < 0 else progress.cached_tokens
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        num_decodes = context = prefill = pairs = 0
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            progress, begin = self._progress[request_id], computed[request_id]
            end = begin + num_tokens
            emits = end == progress.prompt_tokens + progress.num_delivered + progress.num_pending
            if emits:
                progress.num_pending += 1
                samples.append(request_id)
            if num_tokens == 1 and begin >= progress.prompt_tokens:
                num_decodes += 1
                context += end
            else:
                prefill += num_tokens
                pairs += num_tokens * (begin + end) // 2
        return StepShape(num_decodes, context, prefill, pairs)

    def _take_in(self, step: _InFlight) -> list[Emission]:
        self.now_s = (max(self.now_s * 1e3, step.end_ms) + step.update_ms) / 1e3
        request_ids = list(step.output.num_scheduled_tokens)
        sampled = set(step.samples)
        for request_id in sampled & self._progress.keys():
            self._progress[request_id].num_pending -= 1
        result = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=[[_TOKEN] if request_id in sampled else [] for request_id in request_ids],
        )
        emissions = []
        for outputs in self.scheduler.update_from_output(step.output, result).values():
            for output in outputs.outputs:
                progress = self._progress[output.request_id]
                num_tokens = len(output.new_token_ids)
                progress.num_delivered += num_tokens
                finished = output.finish_reason is not None
                emissions.append(Emission(output.request_id, num_tokens, finished, progress.cached_tokens))
                if finished:
                    del self._progress[output.request_id]
        self._note(step, sum(emission.num_tokens for emission in emissions))
        return emissions

    def _note(self, step: _InFlight, num_tokens: int) -> None:
        shape, fixed_ms = step.shape, self.times.device_ms(_NOTHING)
        decode_ms = self.times.device_ms(StepShape(shape.num_decodes, shape.context_tokens, 0, 0)) - fixed_ms
        # What prompts take by their tokens alone: another schedule could have fewer steps that hold some.
        mixed_ms = self.times.mixed_ms(shape) * self.times.device_factor
        prompt_ms = step.device_ms - fixed_ms - mixed_ms - decode_ms
        self.steps.append(StepDone(self.now_s, step.begin_ms, step.end_ms, decode_ms, prompt_ms, num_tokens))


def _additional_config(settings: EngineSettings) -> Mapping[str, Any]:
    if settings.system != "ours" or not settings.target_tps:
        return {}
    return {"tokenspeed": {"target_tps_per_user": settings.target_tps}}
