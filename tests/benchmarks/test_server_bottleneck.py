# SPDX-License-Identifier: Apache-2.0
"""The bottleneck of a server run is the process that fills a core, or nobody."""

from benchmarks.gpu.server import bottleneck


def test_a_full_core_is_named():
    assert bottleneck({"API process": 0.97, "engine core": 0.6}) == "API process (0.97 cores)"


def test_nobody_is_named_when_no_core_is_full():
    text = bottleneck({"API process": 0.4, "engine core": 0.6})
    assert text == "no process fills a core (busiest: engine core, 0.60 cores)"
