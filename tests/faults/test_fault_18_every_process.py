# SPDX-License-Identifier: Apache-2.0
"""Fault 18 (vllm PR 18326, PR 27940): registration ran in the driver, or before a fork, but not in every process."""

from __future__ import annotations

import json

import pytest
from plugin_fixtures import clean_environment, entry_point, run_python

__all__ = ["clean_environment", "entry_point", "run_python"]

pytestmark = pytest.mark.host_matrix

PROCESSES = """
import json, multiprocessing, os, sys

def look(queue):
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    load_general_plugins()
    from tokenspeed_plugin.host import patches
    from tokenspeed_plugin.settings import resolve_in_process
    resolved = resolve_in_process({})
    depth, function = 0, __import__("vllm.engine.arg_utils", fromlist=["EngineArgs"]).EngineArgs.create_engine_config
    while hasattr(function, "__wrapped__"):
        depth, function = depth + 1, function.__wrapped__
    queue.put({
        "pid": os.getpid(),
        "installed": [patches.PARSER.is_installed, patches.ENGINE_CONFIG.is_installed],
        "depth": depth,
        "scheduler": [resolved.values.scheduler, resolved.source("scheduler").value],
    })

if __name__ == "__main__":
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--scheduler", "a.b.C"])
    seen = []
    for method, count in (("fork", 2), ("spawn", 1)):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        children = [context.Process(target=look, args=(queue,)) for _ in range(count)]
        for child in children:
            child.start()
        seen += [queue.get(timeout=150) for _ in children]
        for child in children:
            child.join()
    print("RESULT" + json.dumps(seen))
"""


def test_every_process_is_registered_once_and_sees_the_flags(run_python, tmp_path, entry_point) -> None:
    """Forked children inherit the registration, spawned ones load it themselves; neither is wrapped twice."""
    script = tmp_path / "processes.py"
    script.write_text(PROCESSES)
    done = run_python(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')", extra_path=entry_point)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")] or [done.stderr]
    seen = json.loads(line.removeprefix("RESULT"))
    assert len({child.pop("pid") for child in seen}) == 3
    assert seen == [{"installed": [True, True], "depth": 1, "scheduler": ["a.b.C", "flag"]}] * 3
