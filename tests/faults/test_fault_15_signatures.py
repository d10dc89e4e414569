# SPDX-License-Identifier: Apache-2.0
"""Fault 15 (vllm-gaudi PR 1555): vLLM adds an argument, the override does not take it, the first request dies."""

from __future__ import annotations

import inspect

import pytest
from exact.timeline import Timeline
from scheduler_harness import class_of, resolve_class
from scheduler_knobs import Group, Knobs
from vllm.v1.core.sched.interface import SchedulerInterface

pytestmark = pytest.mark.host_matrix

METHODS = sorted(
    name for name, value in vars(SchedulerInterface).items() if inspect.isfunction(value) and not name.startswith("__")
)


@pytest.mark.parametrize("arguments", [(), (True,), (False,)])
@pytest.mark.parametrize("keywords", [{}, {"throttle_prefills": False}, {"throttle_prefills": True}])
def test_schedule_takes_vllms_arguments(scheduler: str, arguments: tuple[bool, ...], keywords: dict[str, bool]) -> None:
    run = Timeline(scheduler, Knobs(groups=(Group(4),), num_blocks=64))
    run.submit("a", 7, 3)
    plan = run.scheduler.schedule(*arguments) if not keywords else run.scheduler.schedule(**keywords)
    assert plan.num_scheduled_tokens == {"a": 7}, "with nobody decoding, throttling holds nothing back"


@pytest.mark.parametrize("name", ["__init__", *METHODS])
def test_every_method_takes_what_the_installed_vllm_passes(scheduler: str, name: str) -> None:
    theirs = inspect.signature(getattr(SchedulerInterface, name)).parameters
    ours = inspect.signature(getattr(resolve_class(class_of(scheduler, Knobs())), name)).parameters
    takes_any_keyword = any(p.kind is p.VAR_KEYWORD for p in ours.values())
    missing = set(theirs) - set(ours)
    assert not missing or takes_any_keyword, f"{name} does not take {sorted(missing)}"
    for key in set(theirs) & set(ours):
        assert ours[key].kind in (theirs[key].kind, inspect.Parameter.POSITIONAL_OR_KEYWORD), f"{name}({key})"
        has_default = theirs[key].default is not inspect.Parameter.empty
        assert not has_default or ours[key].default == theirs[key].default, f"default of {name}({key})"
    extra = [key for key in set(ours) - set(theirs) if ours[key].default is inspect.Parameter.empty]
    assert all(ours[key].kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL) for key in extra)


def test_nothing_abstract_is_left(scheduler: str) -> None:
    cls = resolve_class(class_of(scheduler, Knobs()))
    assert issubclass(cls, SchedulerInterface)
    assert not cls.__abstractmethods__
