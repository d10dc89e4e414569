# SPDX-License-Identifier: Apache-2.0
"""How vLLM sees this plugin: found among its entry points, and let in by `VLLM_PLUGINS`."""

import os
from importlib.metadata import entry_points

GROUP = "vllm.general_plugins"
NAME = "tokenspeed"


def loading_problem() -> str | None:
    """Why vLLM does not load the plugin, None when it does."""
    if not any(entry.name == NAME for entry in entry_points(group=GROUP)):
        return f"no entry point {NAME!r} in group {GROUP!r}: the package is not installed in this environment"
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and NAME not in chosen.split(","):
        return f"VLLM_PLUGINS={chosen!r} leaves {NAME!r} out"
    return None


def load() -> None:
    """Load vLLM's general plugins as every vLLM process does."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
