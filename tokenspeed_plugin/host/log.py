# SPDX-License-Identifier: Apache-2.0
"""Loggers below vLLM's own, so that our lines get vLLM's handler and format without importing vLLM."""

import logging
import multiprocessing


def logger(name: str) -> logging.Logger:
    """The logger for module `name` of this project."""
    return logging.getLogger(f"vllm.{name}")


def is_main_process() -> bool:
    """Whether this is the process that the user started; engine cores and workers keep quiet about what it already said."""
    return multiprocessing.parent_process() is None
