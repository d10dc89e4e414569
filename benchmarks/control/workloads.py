# SPDX-License-Identifier: Apache-2.0
"""Workloads: steady decode, decode under pressure, admission of long prompts, prompts that wait for memory."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.control.driver import Driver, PlaneFactory, settle
from benchmarks.control.steps import OtherThreadsClock, StepLog, spread, summarize
from benchmarks.control.tokens import stream_tokens

BUDGET_TOKENS = 8192
"""Token budget of a step (chunked prefill)."""
LONG_PROMPT_TOKENS = 65_536

Result = dict[str, object]


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Return how many blocks hold `num_tokens`."""
    return -(-num_tokens // block_tokens)


@dataclass(frozen=True)
class DecodeShape:
    """N requests of unique content, each `context_tokens` plus 0 to 127 tokens long."""

    num_requests: int
    block_tokens: int
    context_tokens: int = 8192
    num_steps: int = 256
    warm_steps: int = 40
    pool_factor: int = 1
    """Pool size as a multiple of what the requests need."""
    num_waiting: int = 0
    """Prompts that wait for a request slot during the measured steps."""
    num_long_waiting: int = 0
    """Prompts of 64K tokens that wait for memory during the measured steps."""

    @property
    def prompt_lengths(self) -> list[int]:
        """Prompt tokens of each request."""
        return [self.context_tokens + i % 128 for i in range(self.num_requests)]

    @property
    def output_tokens(self) -> int:
        """Tokens that a request may emit: nobody finishes while others prefill or during the measurement."""
        prefill_steps = sum(self.prompt_lengths) / (BUDGET_TOKENS - self.num_requests)
        return 2 * self.num_steps + self.warm_steps + int(prefill_steps * 1.1) + 200

    @property
    def num_blocks(self) -> int:
        """Usable blocks of the pool."""
        lengths = [length + self.output_tokens for length in self.prompt_lengths]
        needed = sum(blocks_for(length, self.block_tokens) for length in lengths) + 64
        return needed * self.pool_factor


def steady_decode(make: PlaneFactory, shape: DecodeShape) -> Driver:
    """Return a driver whose requests have all finished their prompts and are warmed up."""
    plane = make(
        block_tokens=shape.block_tokens,
        num_blocks=shape.num_blocks,
        max_requests=shape.num_requests + shape.num_long_waiting,
        budget_tokens=BUDGET_TOKENS,
    )
    settle()
    driver = Driver(plane)
    for index, length in enumerate(shape.prompt_lengths):
        tokens = stream_tokens(1000 + index, 0, length + shape.output_tokens)
        driver.add(f"r{index:05d}", tokens[:length], tokens[length:], shape.output_tokens)
    _prefill_all(driver, shape)
    for _ in range(shape.warm_steps):
        driver.step()
    _add_waiting(driver, shape)
    return driver


def _prefill_all(driver: Driver, shape: DecodeShape) -> None:
    limit = 20 * shape.num_requests + 4000
    for _ in range(limit):
        driver.step()
        steps = driver.log.steps
        if driver.num_started() == shape.num_requests and steps and not steps[-1].num_prefill_tokens:
            return
    raise RuntimeError(f"{driver.plane.name}: prompts of {shape} not finished after {limit} steps")


def _add_waiting(driver: Driver, shape: DecodeShape) -> None:
    for index in range(shape.num_waiting):
        tokens = stream_tokens(20_000 + index, 0, 264)
        driver.add(f"w{index:05d}", tokens[:256], tokens[256:], 8)
    for index in range(shape.num_long_waiting):
        tokens = stream_tokens(30_000 + index, 0, LONG_PROMPT_TOKENS + 8)
        driver.add(f"l{index:05d}", tokens[:LONG_PROMPT_TOKENS], tokens[LONG_PROMPT_TOKENS:], 8)
    if shape.num_waiting or shape.num_long_waiting:
        for _ in range(4):
            driver.step()


def measure(driver: Driver, num_steps: int) -> Result:
    """Run `num_steps` steps and return their statistics, with the CPU time that other threads spent."""
    driver.log = StepLog()
    others = OtherThreadsClock()
    for _ in range(num_steps):
        driver.step()
    others_us = others.elapsed_ns() / 1e3 / num_steps
    return {**summarize(driver.log), "other_threads_us_per_step": others_us}


def decode(make: PlaneFactory, shape: DecodeShape) -> Result:
    """Steady decode: the cost of a step in which every request emits one token."""
    driver = steady_decode(make, shape)
    result = measure(driver, shape.num_steps)
    planned = {step.num_requests for step in driver.log.steps}
    if planned != {shape.num_requests}:
        raise RuntimeError(f"{driver.plane.name}: decode steps planned {sorted(planned)} of {shape}")
    return {**result, "preemptions": driver.plane.num_preemptions}


@dataclass(frozen=True)
class PressureShape:
    """N requests that outgrow the pool, run to completion."""

    num_requests: int = 128
    block_tokens: int = 64
    context_tokens: int = 8192
    output_tokens: int = 1024
    pool_share: float = 0.93
    """Pool size as a share of the peak demand."""


def decode_pressure(make: PlaneFactory, shape: PressureShape) -> Result:
    """Decode until the pool is too small: preemptions, recomputation, stalls."""
    lengths = [shape.context_tokens + i % 128 for i in range(shape.num_requests)]
    peak = sum(blocks_for(length + shape.output_tokens, shape.block_tokens) for length in lengths)
    plane = make(
        block_tokens=shape.block_tokens,
        num_blocks=int(peak * shape.pool_share),
        max_requests=shape.num_requests,
        budget_tokens=BUDGET_TOKENS,
    )
    settle()
    driver = Driver(plane)
    for index, length in enumerate(lengths):
        tokens = stream_tokens(1000 + index, 0, length + shape.output_tokens)
        driver.add(f"r{index:05d}", tokens[:length], tokens[length:], shape.output_tokens)
    num_empty = 0
    while driver.live:
        num_empty = 0 if driver.step() else num_empty + 1
        if num_empty > 2000:
            raise RuntimeError(f"{plane.name}: {len(driver.live)} requests stalled under {shape}")
    result: Result = dict(summarize(driver.log))
    result["preemptions"] = plane.num_preemptions
    result["recompute_ratio"] = sum(s.num_prefill_tokens for s in driver.log.steps) / driver.prompt_tokens
    return result


@dataclass(frozen=True)
class AdmissionShape:
    """One long prompt at a time, cold and then warm (all but its last token cached)."""

    block_tokens: int = 16
    prompt_tokens: int = LONG_PROMPT_TOKENS
    num_samples: int = 15
    warm_samples: int = 2


def admit(make: PlaneFactory, shape: AdmissionShape) -> Result:
    """Cost of a long prompt from its arrival to its first plan, in microseconds."""
    rounds = shape.num_samples + shape.warm_samples
    plane = make(
        block_tokens=shape.block_tokens,
        num_blocks=(shape.prompt_tokens // shape.block_tokens + 64) * (rounds + 2),
        max_requests=64,
        budget_tokens=BUDGET_TOKENS,
    )
    settle()
    driver = Driver(plane)
    costs: dict[str, list[float]] = {"cold": [], "warm": []}
    for index in range(rounds):
        tokens = stream_tokens(5000 + index, 0, shape.prompt_tokens + 8)
        prompt, output = tokens[: shape.prompt_tokens], tokens[shape.prompt_tokens :]
        for phase, content in (("cold", prompt), ("warm", [*prompt[:-1], 7])):
            cost_us = _admission_us(driver, f"{phase}{index}", content, output)
            if phase == "warm" and driver.log.steps[0].num_prefill_tokens > 2 * shape.block_tokens + 1:
                raise RuntimeError(f"{plane.name}: warm prompt {index} missed the cache")
            if index >= shape.warm_samples:
                costs[phase].append(cost_us)
    return {f"{phase}_{name}_us": value for phase, us in costs.items() for name, value in spread(us).items()}


def _admission_us(driver: Driver, request_id: str, prompt: list[int], output: list[int]) -> float:
    """Serve one request; return add + first plan, plus whatever other threads spent until it was done."""
    driver.log = StepLog()
    others = OtherThreadsClock()
    driver.add(request_id, prompt, output, 2)
    while driver.live:
        driver.step()
    others_ns = others.elapsed_ns()
    first = driver.log.steps[0]
    return (driver.log.adds_ns[0] + first.plan_ns + first.extract_ns + others_ns) / 1e3
