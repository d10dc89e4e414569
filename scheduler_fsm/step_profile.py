# SPDX-License-Identifier: Apache-2.0
"""What a run learnt about the times of its steps, kept in a file from one start to the next."""

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenspeed_plugin.host.log import logger as named_logger
from tokenspeed_plugin.settings import SettingsError, resolve_in_process

if TYPE_CHECKING:
    from tokenspeed_plugin.scheduler_fsm._core import Core

logger = named_logger(__name__)

_KEY = "step_time_profile"
_LEAST_STEPS = 64  # fewer are no better than what the file says already
# Milliseconds of any step; microseconds of a request that decodes, of a KV token that a decode reads, of a prompt token,
# and of a prompt token and one that it attends to.
_FIGURES = ("fixed_ms", "row_us", "context_us", "prefill_us", "pair_us")
# Milliseconds more, 0 where a file does not say: of a step with prompts that fits a CUDA graph, of one that fits none, and of decodes
# alone that fit none.
_LATER_FIGURES = ("mixed_ms", "large_mixed_ms", "large_ms")


class ProfileFile:
    """The file that `step_time_profile` names: read when there is one, written as the engine learns.

    Raises:
        SettingsError: the folder is not there, or the file is no profile; the message says what is wrong with which figure.
    """

    def __init__(self, path: Path, core: "Core") -> None:
        self._path = path
        self._core = core
        self._can_write = True
        if not path.parent.is_dir():
            raise SettingsError(
                f"{_KEY}: {path}: there is no folder {path.parent}; allowed: a path in a folder that exists"
            )
        if path.exists():
            core.start_from_profile(_read(path))
            logger.info("The step-time model starts from the profile %s", path)

    @classmethod
    def named_in(cls, additional_config: object, core: "Core") -> "ProfileFile | None":
        """The file that the settings name; None without one."""
        name = resolve_in_process(additional_config).values.step_time_profile
        return cls(Path(name), core) if name else None

    def save(self) -> None:
        """Write what is known now, at once or not at all; a file that cannot be written is warned of once."""
        if not self._can_write or self._core.pace()["learnt_steps"] < _LEAST_STEPS:
            return
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            beside.write_text(json.dumps(self._core.step_time_profile(), indent=2) + "\n")
            beside.replace(self._path)
        except OSError as error:
            self._can_write = False
            logger.warning("The step-time profile %s cannot be written: %s", self._path, error)


def _read(path: Path) -> dict[str, float]:
    """The file's figures by name. Raises SettingsError naming the first that cannot be."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _refusal(path, f"it cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise _refusal(path, f"it holds {found!r:.80}")
    otherwise: dict[str, Any] = {**dict.fromkeys(_FIGURES, "missing"), **dict.fromkeys(_LATER_FIGURES, 0)}
    for name in found:
        if name not in otherwise:
            raise _refusal(path, f"{name} is no figure of a profile")
    figures = {**otherwise, **found}
    for name, value in figures.items():
        # A step that takes no time at all would let everything into it.
        is_time = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
        if not is_time or (name == "fixed_ms" and value == 0):
            raise _refusal(path, f"{name} is {value!r:.80}")
    return {name: float(value) for name, value in figures.items()}


def _refusal(path: Path, why: str) -> SettingsError:
    return SettingsError(
        f"{_KEY}: {path}: {why}; allowed: a JSON object with {', '.join(_FIGURES)} and, if known, {', '.join(_LATER_FIGURES)}, "
        "each a number of 0 or more, the first above 0"
    )
