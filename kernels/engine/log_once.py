# SPDX-License-Identifier: Apache-2.0
"""Lines in vLLM's log that many layers and builders have reason to write."""

from __future__ import annotations

import logging
from functools import cache

_logger = logging.getLogger("vllm.tokenspeed_plugin.kernels")


@cache
def log_once(line: str) -> None:
    """Write `line` once for each process, however often it is said."""
    _logger.info(line)
