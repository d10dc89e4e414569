# SPDX-License-Identifier: Apache-2.0
"""The tuning file and the autotuner: versioned, locked, atomic, agreed upon, never during service."""

import json
import multiprocessing
from pathlib import Path

import pytest
from kernel_fixtures import BF16, make_spec

from tokenspeed_plugin.kernels.autotune import (
    SHIPPED,
    Autotuner,
    DeviceKey,
    TuningFileError,
    TuningForbiddenError,
    TuningStore,
    TuningTable,
    bucket,
    load_tables,
    sources_hash,
)
from tokenspeed_plugin.kernels.mla.cached_prefill.solutions import ABSORBED_QUERY_TOKENS

DEVICE = DeviceKey("GPU", "13000", "2.11", "abc")
SHAPE = {"heads": 16, "context_tokens": 5000}


def table_with(solution: str, microseconds: float, shape: dict[str, int] = SHAPE) -> TuningTable:
    table = TuningTable()
    table.record("mla", "decode", BF16, shape, {solution: microseconds})
    return table


def test_a_bucket_rounds_lengths_up_and_keeps_heads() -> None:
    assert bucket("mla", "decode", BF16, SHAPE) == "mla.decode(kv=bfloat16, q=bfloat16; context_tokens=8192, heads=16)"
    assert bucket("mla", "decode", BF16, {**SHAPE, "context_tokens": 8192}) == bucket("mla", "decode", BF16, SHAPE)
    assert bucket("mla", "decode", BF16, {**SHAPE, "context_tokens": 8193}) != bucket("mla", "decode", BF16, SHAPE)
    assert bucket("mla", "decode", BF16, {**SHAPE, "heads": 17}) != bucket("mla", "decode", BF16, SHAPE)


def test_what_was_written_is_read_back_for_that_device_only(tmp_path: Path) -> None:
    store = TuningStore(tmp_path / "deep" / "tuning.json")
    store.merge(DEVICE, table_with("fast", 12.5))
    assert store.load(DEVICE).times_us("mla", "decode", BF16, SHAPE) == {"fast": 12.5}
    assert store.load(DeviceKey("GPU", "13000", "2.11", "changed")).buckets == {}
    assert store.devices() == ["GPU|13000|2.11|abc"]


def test_a_missing_file_is_an_empty_table(tmp_path: Path) -> None:
    assert TuningStore(tmp_path / "none.json").load(DEVICE).buckets == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": 2, "devices": {}}', "version 2, allowed: 1; delete it and tune again"),
        ('{"version": 1, "devices": {"GPU"', "is damaged"),
        ('{"version": 1, "devices": {"GPU": {"bucket": {"fast": "quick"}}}}', "is damaged"),
        ("[]", "is damaged"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(text)
    with pytest.raises(TuningFileError, match=message) as caught:
        TuningStore(path).load(DEVICE)
    assert str(path) in str(caught.value)
    assert path.read_text() == text


def write_many(path: str, writer: int) -> None:
    for i in range(20):
        TuningStore(Path(path)).merge(DEVICE, table_with("fast", float(i), {"heads": 100 * writer + i}))


def test_writers_in_several_processes_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(str(path), writer)) for writer in range(3)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    assert [process.exitcode for process in writers] == [0, 0, 0]
    assert len(TuningStore(path).load(DEVICE).buckets) == 60


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TuningStore(tmp_path / "tuning.json")
    store.merge(DEVICE, table_with("fast", 1.0))
    before = store.path.read_text()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        store.merge(DEVICE, table_with("fast", 2.0))
    assert store.path.read_text() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tuning.json", "tuning.json.lock"]


def test_own_measurements_go_over_the_shipped_ones(tmp_path: Path) -> None:
    shipped, own = TuningStore(tmp_path / "shipped.json"), TuningStore(tmp_path / "own.json")
    shipped.merge("GPU", table_with("fast", 9.0))
    shipped.merge("GPU", table_with("fast", 5.0, {"heads": 64}))
    own.merge(DEVICE, table_with("portable", 3.0))
    table = load_tables(DEVICE, shipped.path, own)
    assert table.times_us("mla", "decode", BF16, SHAPE) == {"portable": 3.0}
    assert table.times_us("mla", "decode", BF16, {"heads": 64}) == {"fast": 5.0}


def test_the_shipped_table_is_in_order() -> None:
    buckets = TuningStore(SHIPPED).load("NVIDIA H200").buckets
    assert len(buckets) >= 80
    allowed = {
        "mla.decode(kv=bfloat16": {"cuda_sm90", "flashmla", "flashattn3"},
        "mla.decode(kv=float8_e4m3fn": {"cuda_sm90_fp8", "flashmla"},
        "mla.cached_prefill(kv=bfloat16": {"head_groups", "unfolded", "flashattn3"},
    }
    for name, times in buckets.items():
        expected = next(solutions for operation, solutions in allowed.items() if name.startswith(operation))
        new_tokens = int(name.partition("query_tokens=")[2].partition(",")[0])
        assert set(times) == expected - ({"flashattn3"} if new_tokens > ABSORBED_QUERY_TOKENS else set()), name
    assert all(any(name.startswith(operation) for name in buckets) for operation in allowed)
    assert json.loads(SHIPPED.read_text())["version"] == 1


def test_new_sources_are_new_measurements() -> None:
    assert sources_hash([make_spec(source=lambda: "a")]) != sources_hash([make_spec(source=lambda: "b")])


def test_rank_0_measures_and_every_rank_gets_its_result() -> None:
    measured: list[str] = []

    def measure(spec, shape) -> float:
        measured.append(spec.solution)
        return 7.0

    sent: list[dict[str, float] | None] = []

    def broadcast(times: dict[str, float] | None) -> dict[str, float]:
        sent.append(times)
        return {"fast": 7.0}

    for rank in (0, 1):
        assert Autotuner(measure, rank, broadcast).tune([make_spec("fast")], SHAPE) == {"fast": 7.0}
    assert measured == ["fast"]
    assert sent == [{"fast": 7.0}, None]


def test_nothing_is_measured_while_requests_are_served() -> None:
    tuner = Autotuner(lambda *_: 1.0)
    tuner.freeze()
    with pytest.raises(TuningForbiddenError, match="while requests are served"):
        tuner.tune([make_spec()], SHAPE)
