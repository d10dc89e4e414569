# SPDX-License-Identifier: Apache-2.0
"""`--kernels` at start-up: whether linear layers of few tokens go to a kernel of ours."""

import importlib
import os
from typing import Any

from tokenspeed_plugin.host import few_rows
from tokenspeed_plugin.host.check import check_linear
from tokenspeed_plugin.host.log import logger
from tokenspeed_plugin.host.unserved import Unserved

_START = "tokenspeed_plugin.kernels.engine.linear_start"

# fmt: off
UNSERVED: tuple[Unserved, ...] = (
    Unserved("kernel_config.linear_backend", lambda v: v not in (None, "auto"), "it chooses the products of linear layers"),
)
# fmt: on


def settle(config: Any, text: str, asked_by: str, platform: tuple[str, tuple[int, int], str]) -> None:
    """Have the linear layers of an engine take our kernel where it gains, or leave them to vLLM.

    Args:
        config: vLLM's configuration.
        text: the setting, such as `auto` or `linear=cuda_sm90`.
        asked_by: how the user wrote it, for errors.
        platform: kind, architecture and product name of the GPU.

    Raises:
        SettingsError: what was named cannot be had.
    """
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    taken, line = importlib.import_module(_START).settle_linear(text, asked_by, platform, dtype, reasons(config))
    if taken:
        few_rows.install()
    else:
        few_rows.remove()
    logger(__name__).info("%s.", line)


def reasons(config: Any) -> list[str]:
    """Why our kernel cannot serve a configuration; empty when it can."""
    found = [line for row in UNSERVED if (line := row.line(config))]
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in {"", "0"}:
        found.append("VLLM_BATCH_INVARIANT: results depend on the batch")
    if reason := check_linear().reason:
        found.append(reason)
    return found
