# SPDX-License-Identifier: Apache-2.0
"""The systems under test by name, and how each builds its plane."""

from __future__ import annotations

import os
from functools import partial

from benchmarks.control.driver import PlaneFactory

SCHEDULER_CLASSES = {
    "vllm": "vllm.v1.core.sched.scheduler.Scheduler",
    "vllm-async": "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
    "ours": "tokenspeed_plugin.scheduler_fsm.TokenSpeedScheduler",
    "ours-async": "tokenspeed_plugin.scheduler_fsm.TokenSpeedScheduler",
}
TOKENSPEED = "tokenspeed"
SYSTEMS = (*SCHEDULER_CLASSES, TOKENSPEED)

_VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "OMP_NUM_THREADS": "1",
}


def load_factory(system: str) -> PlaneFactory:
    """Import what `system` needs and return its plane factory; cells may then be run in forked children.

    Stock vLLM is measured with no plugin loaded; ours loads vLLM's general plugins first, as EngineCore does.
    """
    if system not in SYSTEMS:
        raise ValueError(f"system {system!r} is not one of {sorted(SYSTEMS)}")
    if system == TOKENSPEED:
        from benchmarks.control.tokenspeed_plane import TokenSpeedPlane

        return TokenSpeedPlane
    for name, value in _VLLM_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not system.startswith("ours"):
        os.environ["VLLM_PLUGINS"] = ""
    return _load_vllm_factory(system)


def _load_vllm_factory(system: str) -> PlaneFactory:
    import torch
    from vllm.model_executor.models import registry
    from vllm.plugins import load_general_plugins

    from benchmarks.control.vllm_plane import VllmPlane, model_config

    torch.set_num_threads(1)
    if system.startswith("ours"):
        load_general_plugins()
    registry._run_in_subprocess = lambda function: function()  # a forked cell must not import vLLM again
    model_config()  # caches the inspection of the model class
    return partial(VllmPlane, SCHEDULER_CLASSES[system], 2 if system.endswith("-async") else 1)
