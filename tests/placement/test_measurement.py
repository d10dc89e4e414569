# SPDX-License-Identifier: Apache-2.0
"""Two real processes measure their collectives and arrive at one and the same table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing

from tests.placement.placement_cases import TABLE
from tokenspeed_plugin.placement import Conversion
from tokenspeed_plugin.placement.cost import CostTable, Sample
from tokenspeed_plugin.placement.cost.measurement import measure, measured_table, prediction_errors

SIZES_BYTES = (2**12, 2**16, 2**23)


def measure_on_one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    samples = measure(distributed.group.WORLD, torch.device("cpu"), SIZES_BYTES)
    table = measured_table(TABLE, 2, samples, {})
    (Path(folder) / f"table{rank}.json").write_text(table.model_dump_json())
    counts = {kind.value: [s.ring_bytes for s in found] for kind, found in samples.items()}
    (Path(folder) / f"bytes{rank}.json").write_text(json.dumps(counts))
    distributed.destroy_process_group()


def test_ranks_agree_on_what_they_measured(tmp_path: Path) -> None:
    multiprocessing.spawn(measure_on_one_rank, (str(tmp_path),), nprocs=2)
    texts = [(tmp_path / f"table{rank}.json").read_text() for rank in (0, 1)]
    assert texts[0] == texts[1]
    table = CostTable.load(tmp_path / "table0.json")
    assert table.source == "measured"
    assert table.note.count("Everything else: ") == 1
    assert table.links["network"] == TABLE.links["network"]
    for kind, sizes in table.links["node"].items():
        assert sizes[2] != TABLE.links["node"][kind][2]
        assert sizes[8] == TABLE.links["node"][kind][8]
    sent = json.loads((tmp_path / "bytes0.json").read_text())
    assert sent["all-reduce"] == [float(n) for n in SIZES_BYTES]
    assert sent["all-gather"] == [n / 2 for n in SIZES_BYTES]


def test_a_size_is_predicted_from_the_others_relative_to_its_measured_time() -> None:
    kind = Conversion.ALL_GATHER
    samples = [Sample(ring_bytes=n, time_us=t) for n, t in ((1e3, 10.0), (1e4, 20.0), (1e5, 40.0), (1e6, 200.0))]
    (first, second) = prediction_errors({kind: samples}, {})[kind]
    assert first == pytest.approx((1e4, 0.0))
    assert second == pytest.approx((1e5, (20.0 * 200.0) ** 0.5 / 40.0 - 1))


def test_one_disturbed_call_does_not_reach_the_samples() -> None:
    kind, calls = Conversion.ALL_REDUCE, iter([5.0, 6.0, 500.0, 6.2, 5.2, 6.4])
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        found = measure(
            distributed.group.WORLD,
            torch.device("cpu"),
            (2**12, 2**13),
            operations={kind: lambda whole, own: None},
            call_us=lambda run: next(calls),
        )
    finally:
        distributed.destroy_process_group()
    assert [sample.time_us for sample in found[kind]] == [5.2, 6.2]


def test_a_known_change_of_algorithm_is_not_drawn_over_when_a_size_beside_it_is_left_out() -> None:
    """Four sizes of 1 us per kilobyte and four of 3: each is predicted by its own algorithm."""
    kind = Conversion.ALL_REDUCE
    samples = [Sample(ring_bytes=1e3 * 2**k, time_us=2.0**k * (3 if k > 3 else 1)) for k in range(8)]
    drawn_over = dict(prediction_errors({kind: samples}, {})[kind])
    assert abs(drawn_over[8e3]) > 0.2
    known = dict(prediction_errors({kind: samples}, {kind: [16e3]})[kind])
    assert known[8e3] == pytest.approx(0.0)
    assert known[16e3] == pytest.approx(0.0)
