# SPDX-License-Identifier: Apache-2.0
"""What the entries of several kernel families say in the same way: what is missing, which source was measured, what vLLM keeps."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any


def missing_package(*packages: str) -> str | None:
    """Why a solution that needs `packages` cannot be had; None when all are installed."""
    absent = (package for package in packages if importlib.util.find_spec(package) is None)
    return next((f"the package {package} is not installed" for package in absent), None)


def source_hash(*files: Path) -> str:
    """Of the files' bytes, in the order given; measurements of another source do not count."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def left_to_vllm(backend: str) -> Callable[[], Callable[..., Any]]:
    """The loader of a solution that only stands for what vLLM does."""

    def load() -> Callable[..., Any]:
        raise RuntimeError(f"{backend} is a backend of vLLM: leave the choice to vLLM instead of calling it from here")

    return load
