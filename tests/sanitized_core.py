# SPDX-License-Identifier: Apache-2.0
"""pytest plugin (-p sanitized_core): the tests meet the `_core` that the variable TOKENSPEED_CORE names, not the installed one.

`make sanitize` runs tests of the scheduler this way on a core that is built with sanitizers.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

NAME = "tokenspeed_plugin.scheduler_fsm._core"


def load_core(path: Path) -> None:
    """Imports the core from a file under its own name; whoever imports it later gets this one."""
    spec = importlib.util.spec_from_file_location(NAME, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"TOKENSPEED_CORE={path} is not an extension module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)


def pytest_report_header() -> str:
    """Says which core is under test, in the first lines of the run."""
    return f"core: {sys.modules[NAME].__file__}"


load_core(Path(os.environ["TOKENSPEED_CORE"]))
