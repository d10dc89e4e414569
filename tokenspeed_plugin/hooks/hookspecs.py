# SPDX-License-Identifier: Apache-2.0
"""What another distribution may add. Implement with `tokenspeed_plugin.hooks.hookimpl`."""

from collections.abc import Mapping

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
