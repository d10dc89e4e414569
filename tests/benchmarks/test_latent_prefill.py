# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of prefills on a cached prefix reports of both of our ways."""

from __future__ import annotations

import pytest

from benchmarks.latent.cells import PrefillCell
from benchmarks.latent.prefill import MeasuredPrefill, print_prefills
from tokenspeed_plugin.kernels.mla.cached_prefill.solutions import ABSORBED, OURS, OURS_TMA, UNFOLDED


def test_the_untried_way_has_a_column_and_no_part_in_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    both, one = (MeasuredPrefill(PrefillCell(16, 256, context), 100.0) for context in (32768, 65536))
    both.add({OURS: 1000.0, OURS_TMA: 501.0, ABSORBED: 1200.0, UNFOLDED: 2000.0}, 1e-3)
    one.add({OURS: 1000.0, ABSORBED: 1300.0, UNFOLDED: 2000.0}, 1e-3)
    assert (both.speedup, one.speedup) == (1.2, 1.3)
    print_prefills([both, one])
    printed = capsys.readouterr().out
    assert "ours, own unfold" in printed
    with_it, without = (line for line in printed.splitlines() if " 1000 " in line)
    assert " 501 " in with_it
    assert " - " in without
