# SPDX-License-Identifier: Apache-2.0
"""What is noted of every turn, and the figures of a run: the same for simulations and for real servers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.agentic.metric_sample import MetricSample
from benchmarks.control.steps import percentile


class RecordError(ValueError):
    """A file of results that cannot be read; names file, line and what is needed."""


CUT = "the run ended"
"""Error of a turn that was under way when a run ended; what it had until then counts."""


class TurnRecord(msgspec.Struct, tag="turn", tag_field="kind"):
    """One turn; times in seconds since the start of the run. `error` is set when the answer is not whole."""

    session: str
    turn: int
    sent_s: float
    first_s: float
    last_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = -1
    """Prompt tokens from the cache; -1 when nobody says."""
    longest_gap_s: float = 0.0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """From the request to its first token."""
        return self.first_s - self.sent_s

    @property
    def tps(self) -> float:
        """Tokens per second that the user saw, from the first token to the last; NaN for answers of one token."""
        span_s = self.last_s - self.first_s
        return (self.output_tokens - 1) / span_s if self.output_tokens > 1 and span_s > 0 else float("nan")


@dataclass(frozen=True)
class Window:
    """What happens in it counts, so that neither start nor end of a run weigh in."""

    begin_s: float
    end_s: float

    def rates(self, record: TurnRecord) -> bool:
        """Whether the user's rate in this turn counts."""
        return self.begin_s <= record.first_s < self.end_s and not np.isnan(record.tps)


def figures(records: Sequence[TurnRecord], window: Window, target_tps: float, num_gpus: int = 1) -> dict[str, Any]:
    """Return the figures of a run.

    Turns and their TTFT count where the turn was sent, rates where its first token came: where requests wait for longer than the
    window, nobody who was sent in it has one. A turn meets the target when its user got at least `target_tps` tokens per second
    from first to last token. Goodput counts the output of such turns alone. `tps_p5` is the rate that 95% of turns reach or exceed.
    """
    counted = [record for record in records if window.begin_s <= record.sent_s < window.end_s]
    whole = [record for record in counted if record.error in ("", CUT)]
    rated = [record for record in records if record.error in ("", CUT) and window.rates(record)]
    rates = [record.tps for record in rated]
    seconds = window.end_s - window.begin_s
    # Output is counted where it appears, so that long answers do not fall out of the window at its end.
    output = sum(_output_inside(record, window) for record in records)
    known = [record for record in whole if record.cached_tokens >= 0]
    prompts = sum(record.prompt_tokens for record in known)
    return {
        "turns": len(counted),
        "failed": len(counted) - len(whole),
        **_spread("ttft_ms", [record.ttft_s * 1e3 for record in whole]),
        **_spread("tpot_ms", [1e3 / rate for rate in rates]),
        **_spread("longest_gap_ms", [record.longest_gap_s * 1e3 for record in rated]),
        "tps_p50": percentile(rates, 50),
        "tps_p5": percentile(rates, 5),
        "tps_p1": percentile(rates, 1),
        "met_share": sum(rate >= target_tps for rate in rates) / len(rates) if rates else float("nan"),
        "tokens_per_s_per_gpu": output / seconds / num_gpus,
        "goodput_per_gpu": goodput(records, window, target_tps) / num_gpus,
        "hit_rate": sum(record.cached_tokens for record in known) / prompts if prompts else float("nan"),
    }


def goodput_at(
    records: Sequence[TurnRecord], window: Window, targets_tps: Iterable[float], num_gpus: int = 1
) -> dict[str, float]:
    """Return goodput by target: a turn counts at each target that it reached."""
    return {f"{target:g}": goodput(records, window, target) / num_gpus for target in targets_tps}


def goodput(records: Iterable[TurnRecord], window: Window, target_tps: float) -> float:
    """Return the output of turns that met the target, in tokens/s."""
    good = (record for record in records if record.error in ("", CUT) and record.tps >= target_tps)
    return sum(_output_inside(record, window) for record in good) / (window.end_s - window.begin_s)


def _output_inside(record: TurnRecord, window: Window) -> float:
    """Return the output tokens of a turn that fall into the window, as if they came evenly."""
    span_s = record.last_s - record.first_s
    if span_s <= 0:
        return float(record.output_tokens) if window.begin_s <= record.last_s < window.end_s else 0.0
    inside_s = min(record.last_s, window.end_s) - max(record.first_s, window.begin_s)
    return record.output_tokens * max(0.0, inside_s) / span_s


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_p{q}": percentile(values, q) for q in (50, 95, 99)}


class RecordFile:
    """JSON lines: what was run, then turns and samples as they come. Every line is flushed, so a crash keeps the rest."""

    def __init__(self, path: Path | None, run: dict[str, Any]) -> None:
        self._file = path.open("wb") if path is not None else None
        self._write({"run": run})

    def add(self, record: TurnRecord | MetricSample) -> None:
        """Write a line."""
        self._write(record)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, item: Any) -> None:
        if self._file is not None:
            self._file.write(msgspec.json.encode(item) + b"\n")
            self._file.flush()


def write_records(path: Path, run: dict[str, Any], records: Iterable[TurnRecord]) -> None:
    """Write a whole run."""
    file = RecordFile(path, run)
    for record in records:
        file.add(record)
    file.close()


class Recorded(NamedTuple):
    """What a file holds."""

    run: dict[str, Any]
    records: list[TurnRecord]
    samples: list[MetricSample]


def read_records(path: Path) -> Recorded:
    """Read what a simulation or a replay wrote. Raises RecordError naming file, line and what is wrong."""
    run: dict[str, Any] = {}
    records: list[TurnRecord] = []
    samples: list[MetricSample] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise RecordError(f"{path}: {error}; needed: a file that simulate or replay wrote") from error
    for number, line in enumerate(lines, 1):
        try:
            if number == 1:
                run = msgspec.json.decode(line, type=dict[str, dict[str, Any]])["run"]
                continue
            item = msgspec.json.decode(line, type=TurnRecord | MetricSample)
        except (msgspec.DecodeError, KeyError) as error:
            text = line[:80].decode(errors="replace")
            raise RecordError(f"{path}, line {number}: {error}: {text!r}; needed: a line of this benchmark") from error
        if isinstance(item, TurnRecord):
            records.append(item)
        else:
            samples.append(item)
    if not run:
        raise RecordError(f"{path}: empty; needed: a file that simulate or replay wrote")
    return Recorded(run, records, samples)
