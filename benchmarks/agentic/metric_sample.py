# SPDX-License-Identifier: Apache-2.0
"""A sample of a server's counters, as it stands in files of results."""

from __future__ import annotations

import msgspec


class MetricSample(msgspec.Struct, tag="sample", tag_field="kind"):
    """Counters of a server at a time; tokens count since the server's start."""

    at_s: float
    queried_tokens: float = 0.0
    hit_tokens: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    preemptions: float = 0.0
