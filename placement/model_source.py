# SPDX-License-Identifier: Apache-2.0
"""Finds the configuration of a model without the network: a file, a folder, or the local Hugging Face cache."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tokenspeed_plugin.placement.algebra import PlacementError


def read_config(model: str) -> dict[str, Any]:
    """The configuration of ``model`` as a mapping.

    Raises:
        PlacementError: nothing of that name is here, or it is not a JSON object.
    """
    path = _config_path(model)
    if path is None:
        message = (
            f"model {model!r}: give a config.json, a folder that has one, or a model of the Hugging Face cache "
            f"({_cache()}); nothing is downloaded"
        )
        raise PlacementError(message)
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        message = f"{path}: not valid JSON: {error}"
        raise PlacementError(message) from error
    if not isinstance(config, dict):
        message = f"{path}: holds a {type(config).__name__}, a JSON object is needed"
        raise PlacementError(message)
    return config


def _config_path(model: str) -> Path | None:
    given = Path(model)
    if given.is_file():
        return given
    if (given / "config.json").is_file():
        return given / "config.json"
    snapshots = _cache() / f"models--{model.replace('/', '--')}" / "snapshots"
    found = sorted(snapshots.glob("*/config.json"), key=lambda p: p.stat().st_mtime)
    return found[-1] if found else None


def _cache() -> Path:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
