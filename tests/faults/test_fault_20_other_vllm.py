# SPDX-License-Identifier: Apache-2.0
"""Fault 20 (vllm-plugin-FL #125): a module path of another release kills every `vllm` command once the plugin is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from plugin_fixtures import clean_environment, entry_point, run_python

__all__ = ["clean_environment", "entry_point", "run_python"]

# What other releases may look like: each misses something that is relied on.
OLDER = {"__init__.py": "__version__ = '0.25.0'"}
NEWER = {
    "__init__.py": "__version__ = '0.34.0'",
    "engine/__init__.py": "",
    "engine/arg_utils.py": """
class EngineArgs:
    def create_engine_config(self, usage_context=None):
        return 'stock'

    @staticmethod
    def add_cli_args(parser):
        return parser
""",
}
BROKEN = {"__init__.py": "import a_module_that_is_not_there"}

REGISTER = """
import argparse, logging, os, sys
logging.basicConfig(format='%(message)s', stream=sys.stdout)
from tokenspeed_plugin.entry_points.general import register
register()
register()
if 'vllm.engine.arg_utils' in sys.modules:
    from vllm.engine.arg_utils import EngineArgs
    print(EngineArgs().create_engine_config())
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser(usage='vllm serve'))
    parser.parse_args(sys.argv[1:])
print('ALIVE')
"""


@pytest.fixture
def run_beside(tmp_path: Path):
    """Run REGISTER beside a vLLM that consists of the given files."""

    def run(files: dict[str, str], *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        for name, text in files.items():
            path = tmp_path / "vllm" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *(p for p in sys.path if p)]), **environment}
        return subprocess.run(
            [sys.executable, "-c", REGISTER, *arguments], env=env, capture_output=True, text=True, check=False
        )

    return run


@pytest.mark.parametrize(
    ("files", "reason", "works"),
    [
        (OLDER, "vLLM 0.25.0 is not supported (supported: >=0.32,<0.34)", []),
        (NEWER, "vLLM 0.34.0 is not supported (supported: >=0.32,<0.34)", ["stock"]),
        (BROKEN, "vLLM cannot be imported (supported: >=0.32,<0.34)", []),
    ],
    ids=["older", "newer", "broken"],
)
def test_the_plugin_switches_itself_off_with_one_line(run_beside, files, reason: str, works: list[str]) -> None:
    done = run_beside(files)
    line = f"tokenspeed-plugin is off: {reason}."
    assert (done.stdout.splitlines(), done.returncode) == ([line, *works, "ALIVE"], 0), done.stderr


def test_asking_for_it_fails_with_the_reason(run_beside) -> None:
    done = run_beside(NEWER, "--scheduler", "tokenspeed")
    assert done.returncode == 2
    assert "argument --scheduler: 'tokenspeed' cannot be honoured: vLLM 0.34.0 is not supported" in done.stderr
    done = run_beside(NEWER, TOKENSPEED_SCHEDULER="tokenspeed")
    assert done.returncode == 1
    assert "HostError: TOKENSPEED_SCHEDULER tokenspeed cannot be honoured: vLLM 0.34.0 is not supported" in done.stderr


def test_real_vllm_help_survives_an_unsupported_version(run_python, entry_point: str) -> None:
    script = "import vllm; vllm.__version__ = '0.99.0'; from vllm.entrypoints.cli.main import main; main()"
    done = run_python(script, "--help", extra_path=entry_point)
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout
    assert (done.stdout + done.stderr).count("tokenspeed-plugin is off: vLLM 0.99.0 is not supported") == 1
