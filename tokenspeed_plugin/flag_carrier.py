# SPDX-License-Identifier: Apache-2.0
"""Carries the flags of the command line into every process of the engine.

vLLM parses flags in the API server only. An environment variable is inherited by engine-core and worker processes, whether they
are spawned or forked, and stays out of vLLM's compile-cache key. Ray copies it when `VLLM_RAY_EXTRA_ENV_VARS_TO_COPY` names it.
"""

import json
import os

VARIABLE = "TOKENSPEED_FLAGS"


def record(key: str, value: object) -> None:
    """Remember that flag `key` was given with `value`, in this process and in those it starts."""
    os.environ[VARIABLE] = json.dumps({**recorded(), key: value}, sort_keys=True)


def recorded() -> dict[str, object]:
    """Flags given on the command line, by settings key.

    Raises:
        ValueError: the variable was overwritten with something that is not ours.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return {}
    try:
        flags = json.loads(text)
    except json.JSONDecodeError:
        flags = None
    if not isinstance(flags, dict):
        msg = f"{VARIABLE}={text!r} is not allowed; it is written by the plugin itself: unset it and use the flags"
        raise ValueError(msg)
    return flags


def forget() -> None:
    """Drop all flags, for programs that parse several command lines in one process."""
    os.environ.pop(VARIABLE, None)
