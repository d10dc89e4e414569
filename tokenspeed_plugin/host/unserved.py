# SPDX-License-Identifier: Apache-2.0
"""A row of what kernels of ours cannot serve in vLLM's configuration."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenspeed_plugin.host.config_rows import shown, value_at


@dataclass(frozen=True)
class Unserved:
    """A setting under which the work stays with vLLM.

    Attributes:
        setting: dotted path below `VllmConfig`.
        is_asked: whether the value found there asks for the feature.
        what: the feature, in words.
    """

    setting: str
    is_asked: Callable[[Any], bool]
    what: str

    def line(self, config: Any) -> str | None:
        """This row as a reason, None when `config` does not ask for the feature."""
        value = value_at(config, self.setting)
        return f"{self.setting}={shown(value)}: {self.what}" if self.is_asked(value) else None
