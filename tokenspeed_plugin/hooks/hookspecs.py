# SPDX-License-Identifier: Apache-2.0
"""What another distribution may add. Implement with `tokenspeed_plugin.hooks.hookimpl`."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pluggy

PROJECT = "tokenspeed_plugin"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def tokenspeed_schedulers() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Schedulers by the short name that `--scheduler` takes.

    Returns:
        name -> dotted path of a class that implements vLLM's `SchedulerInterface`. Nothing is imported until it is asked for.
    """


@hookspec
def tokenspeed_kernels() -> Iterable[Any]:  # type: ignore[empty-body]
    """Kernels to offer beside our own, as `tokenspeed_plugin.kernels.registry.KernelSpec`.

    Returns:
        specifications; each must have a name (family, mode, solution) that nobody else uses. What they load is imported late.
    """


@hookspec(firstresult=True)
def tokenspeed_chunk_budget() -> Callable[[Any], int] | None:
    """How many prompt tokens may share a step with decodes, under `--target-tps-per-user`; the first answer counts.

    Returns:
        a function from a question (docs/pacing.md) to a number of tokens. It is called once a step while prompts want tokens;
        what it answers is cut to the question's `most_tokens`.
    """


@hookspec(firstresult=True)
def tokenspeed_queue_order() -> Callable[[Any], float] | None:
    """Who is served first, among requests of one priority; the first answer counts.

    Returns:
        a function from an arrival (docs/pacing.md) to a number, the smallest first; of two equals the earlier. It is called once
        for each request, when it arrives. The order rules service, admission, and who may be retracted for whom.
    """


@hookspec(firstresult=True)
def tokenspeed_victim_choice() -> Callable[[Any, int], int] | None:
    """Who is retracted when a request lacks blocks; the first answer counts.

    Returns:
        a function from candidates (docs/pacing.md), the last in the order first, and the number of blocks that are missing to
        the index of a candidate. It is called again until enough blocks are free, and only when some are missing.
    """


@hookspec
def tokenspeed_declare_models() -> Mapping[str, Callable[[str, Mapping[str, Any]], Any]]:  # type: ignore[empty-body]
    """Declarations of model architectures for placement (docs/placement.md).

    Returns:
        architecture name, as in the model's `config.json` -> function from (name, that configuration) to its declaration.
    """


@hookspec
def tokenspeed_bind_models() -> Mapping[str, Any]:  # type: ignore[empty-body]
    """Where vLLM model classes keep the modules that a declaration names, so that `--placement` can run them (docs/placement.md).

    Returns:
        architecture name -> `tokenspeed_plugin.placement.models.bindings.ModelBinding`.
    """


@hookspec
def tokenspeed_eviction_policies() -> Mapping[str, Mapping[str, float | bool]]:  # type: ignore[empty-body]
    """Eviction policies by the name that `--kv-eviction` takes.

    Evictions happen inside a step, in C++, so a policy is no callback but a set of weights of the `session` policy.

    Returns:
        name -> its weights, where they differ from `session`: `idle_scale_s`, `output_exponent`, `prompt_exponent`,
        `superseded_first`, `use_hints` (kv_flat/csrc/eviction_policy.h says what they do).
    """
