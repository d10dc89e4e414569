# SPDX-License-Identifier: Apache-2.0
"""A custom scheduler as a user would write one: vLLM's own, which notes where it was built."""

import json
import os
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from tokenspeed_plugin.host import patches
from tokenspeed_plugin.settings import resolve_in_process

NOTE_VARIABLE = "NOTING_SCHEDULER_FILE"


class NotingScheduler(AsyncScheduler):
    """Writes down its process, the patches and the settings there; schedules as vLLM does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        resolved = resolve_in_process(self.vllm_config.additional_config)
        note = {
            "pid": os.getpid(),
            "patches": [row.name for row in patches.PATCHES if row.is_installed],
            "values": resolved.values.model_dump(),
            "sources": {key: source.value for key, source in resolved.sources.items()},
            "additional_config": self.vllm_config.additional_config,
        }
        Path(os.environ[NOTE_VARIABLE]).write_text(json.dumps(note))
