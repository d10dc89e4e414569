# SPDX-License-Identifier: Apache-2.0
"""Measured times of kernels, by device and shape bucket: how they are taken, kept and agreed upon."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from tokenspeed_plugin.kernels.registry import KernelSpec, Signature, signature_text

VERSION = 1
"""Of the file's layout; a file of another version is refused, never guessed at."""
EXACT = frozenset({"heads", "query_tokens", "page_tokens"})
"""Shape numbers that a bucket keeps as they are; all others round up to a power of two."""


class TuningFileError(RuntimeError):
    """A tuning file that cannot be read; the message names it and what to do."""


@dataclass(frozen=True)
class DeviceKey:
    """What measurements depend on beside the shape."""

    gpu: str
    driver: str
    torch: str
    sources: str

    def __str__(self) -> str:
        return "|".join((self.gpu, self.driver, self.torch, self.sources))


def sources_hash(specs: list[KernelSpec]) -> str:
    """Hash of the candidates' sources: new code is new measurements."""
    parts = sorted(f"{spec.name}:{spec.source()}" for spec in specs)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def bucket(family: str, mode: str, signature: Signature, shape: Mapping[str, int]) -> str:
    """Name of the bucket that a request falls into."""
    numbers = (
        f"{name}={value if name in EXACT else 1 << max(0, value - 1).bit_length()}"
        for name, value in sorted(shape.items())
    )
    return f"{family}.{mode}({signature_text(signature)}; {', '.join(numbers)})"


@dataclass
class TuningTable:
    """Microseconds by bucket and solution, for one device."""

    buckets: dict[str, dict[str, float]] = field(default_factory=dict)

    def times_us(self, family: str, mode: str, signature: Signature, shape: Mapping[str, int]) -> dict[str, float]:
        """Return the measured solutions of the request's bucket; empty when it was not measured."""
        return self.buckets.get(bucket(family, mode, signature, shape), {})

    def record(
        self, family: str, mode: str, signature: Signature, shape: Mapping[str, int], times_us: Mapping[str, float]
    ) -> None:
        """Set the times of a bucket."""
        self.buckets[bucket(family, mode, signature, shape)] = dict(times_us)


def median_table(tables: Iterable[TuningTable]) -> TuningTable:
    """The median of each solution's times in each bucket, over the tables that have one."""
    samples: dict[str, dict[str, list[float]]] = {}
    for table in tables:
        for name, times_us in table.buckets.items():
            for solution, microseconds in times_us.items():
                samples.setdefault(name, {}).setdefault(solution, []).append(microseconds)
    return TuningTable({b: {s: statistics.median(times) for s, times in of.items()} for b, of in samples.items()})


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    version: int
    devices: dict[str, dict[str, dict[str, float]]]


class TuningStore:
    """A JSON file of tuning tables, by device: locked while it changes, replaced in one step, never half written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, device: DeviceKey | str) -> TuningTable:
        """Return the table of a device; empty when the file or the device is not there.

        Raises:
            TuningFileError: the file is of another version or damaged.
        """
        return TuningTable(self._read().get(str(device), {}))

    def devices(self) -> list[str]:
        """Return the devices that the file has tables for."""
        return sorted(self._read())

    def merge(self, device: DeviceKey | str, table: TuningTable) -> None:
        """Add a table's buckets to the file; what others wrote meanwhile stays.

        Raises:
            TuningFileError: the file is of another version or damaged.
        """
        with self._locked():
            devices = self._read()
            devices.setdefault(str(device), {}).update(table.buckets)
            document = _Document(version=VERSION, devices=devices)
            self._replace(document.model_dump_json(indent=1))

    def _read(self) -> dict[str, dict[str, dict[str, float]]]:
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return {}
        try:
            version = json.loads(text)["version"]
            if version != VERSION:
                raise TuningFileError(f"{self.path}: version {version!r}, allowed: {VERSION}; delete it and tune again")
            return _Document.model_validate_json(text).devices
        except (ValueError, KeyError, TypeError, ValidationError) as error:
            raise TuningFileError(f"{self.path} is damaged ({error}); delete it and tune again") from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A file beside it, because the file itself is replaced under the lock.
        with self.path.with_name(self.path.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _replace(self, text: str) -> None:
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


SHIPPED = Path(__file__).with_name("tuning") / "h200.json"
"""Measurements that come with the package, taken by `benchmarks.mla` on one H200; for GPUs of that name."""


def user_store() -> TuningStore:
    """The user's file: $TOKENSPEED_KERNEL_TUNING, or tokenspeed-plugin/tuning.json in the user's cache folder."""
    chosen = os.environ.get("TOKENSPEED_KERNEL_TUNING")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return TuningStore(Path(chosen) if chosen else cache / "tokenspeed-plugin" / "tuning.json")


def load_tables(device: DeviceKey, shipped: Path = SHIPPED, store: TuningStore | None = None) -> TuningTable:
    """The shipped table of the GPU's name with the user's own measurements over it.

    Raises:
        TuningFileError: a file is of another version or damaged.
    """
    table = TuningStore(shipped).load(device.gpu)
    table.buckets.update((store or user_store()).load(device).buckets)
    return table


class TuningForbiddenError(RuntimeError):
    """Measuring was asked for while requests are served."""


class Autotuner:
    """Measures candidates, at start-up or when asked; rank 0 measures and all ranks use its result.

    Args:
        measure: microseconds of a candidate on a shape.
        rank: this process's rank.
        broadcast: takes rank 0's value (None elsewhere) and returns it on every rank.
    """

    def __init__(
        self,
        measure: Callable[[KernelSpec, Mapping[str, int]], float],
        rank: int = 0,
        broadcast: Callable[[dict[str, float] | None], dict[str, float]] | None = None,
    ) -> None:
        self._measure, self._rank = measure, rank
        self._broadcast = broadcast or _alone
        self._frozen = False

    def freeze(self) -> None:
        """Refuse to measure from here on: requests are being served."""
        self._frozen = True

    def tune(self, candidates: list[KernelSpec], shape: Mapping[str, int]) -> dict[str, float]:
        """Return microseconds by solution; the same on every rank.

        Raises:
            TuningForbiddenError: after `freeze`.
        """
        if self._frozen:
            raise TuningForbiddenError(f"measuring {shape} while requests are served; tune at start-up or by command")
        times = {spec.solution: self._measure(spec, shape) for spec in candidates} if self._rank == 0 else None
        return self._broadcast(times)


def _alone(times: dict[str, float] | None) -> dict[str, float]:
    if times is None:
        raise ValueError("a rank other than 0 needs a broadcast to learn what rank 0 measured")
    return times
