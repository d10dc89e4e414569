# SPDX-License-Identifier: Apache-2.0
"""Installing the package changes nothing: no object of vLLM but the two that the patch table says, in any module."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.host_matrix

# Everything reachable by name in vLLM's modules and classes, before and after registration.
COMPARE = """
import json, sys, types
import vllm.engine.arg_utils, vllm.v1.engine.core, vllm.v1.engine.async_llm, vllm.entrypoints.llm
import vllm.v1.core.sched.async_scheduler, vllm.v1.executor, vllm.config

def snapshot():
    seen = {}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "vllm" and isinstance(module, types.ModuleType):
            for key, value in list(vars(module).items()):
                seen[f"{name}:{key}"] = value
                if isinstance(value, type) and value.__module__ == name:
                    seen.update({f"{name}:{key}.{k}": v for k, v in vars(value).items()})
    return seen

before = snapshot()
from tokenspeed_plugin.entry_points.general import register
for _ in range(2):
    register()
after = snapshot()
changed = sorted(k for k in before.keys() & after.keys() if before[k] is not after[k])
gone = sorted(before.keys() - after.keys())
loaded = sorted(m for m in sys.modules if m.startswith("tokenspeed_plugin."))

from vllm.config import SchedulerConfig
from vllm.engine.arg_utils import EngineArgs
classes = {str(on): SchedulerConfig.default_factory(async_scheduling=on).get_scheduler_cls().__name__ for on in (False, True)}
print("RESULT" + json.dumps({"changed": changed, "gone": gone, "objects": len(before), "loaded": loaded, "classes": classes}))
"""


def test_no_object_is_patched_besides_the_parser_hook_and_the_gate(run_python) -> None:
    done = run_python(COMPARE)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")] or [done.stderr]
    result = json.loads(line.removeprefix("RESULT"))
    assert result["objects"] > 10_000
    assert result["gone"] == []
    assert result["changed"] == [
        "vllm.engine.arg_utils:EngineArgs.add_cli_args",
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    ]
    assert result["classes"] == {"False": "Scheduler", "True": "AsyncScheduler"}
    # Neither the compiled core nor a component is loaded before it is asked for.
    assert [name for name in result["loaded"] if name.split(".")[1] not in {"entry_points", "host", "hooks"}] == [
        "tokenspeed_plugin.availability",
        "tokenspeed_plugin.flag_carrier",
        "tokenspeed_plugin.settings",
    ]
