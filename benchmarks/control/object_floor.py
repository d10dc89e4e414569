# SPDX-License-Identifier: Apache-2.0
"""The floor of a decode step: vLLM's objects for it, built in C, and nothing else."""

from __future__ import annotations

import ctypes
import os
import shutil
import statistics
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).with_suffix(".c")
_NUM_SAMPLES = 200


def _load() -> ctypes.PyDLL:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("the floor is measured in C: a C compiler is needed")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "object_floor.so")
        include = sysconfig.get_paths()["include"]
        command = [compiler, "-O2", "-shared", "-fPIC", "-I", include, "-o", str(library), str(_SOURCE)]
        subprocess.run(command, check=True)
        loaded = ctypes.PyDLL(str(library))
    for name in ("build_outputs", "build_columns"):
        getattr(loaded, name).restype = ctypes.py_object
    loaded.build_outputs.argtypes = [ctypes.py_object] * 3
    loaded.build_columns.argtypes = [ctypes.py_object, ctypes.c_long]
    return loaded


def object_floor_us(num_requests: int) -> dict[str, float]:
    """Return the median microseconds to build the objects that `schedule` and `update_from_output` return."""
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    library = _load()
    request_ids = [f"r{index:05d}" for index in range(num_requests)]

    def plan(_: Any) -> object:
        ids, new_blocks, computed, outputs, counts = library.build_columns(request_ids, 8192)
        cached = CachedRequestData(
            req_ids=ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=new_blocks,
            num_computed_tokens=computed,
            num_output_tokens=outputs,
        )
        return SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=num_requests,
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
        )

    def outputs(tokens: list[list[int]]) -> object:
        return EngineCoreOutputs(outputs=library.build_outputs(EngineCoreOutput, request_ids, tokens))

    return {
        "schedule": _median_us(plan, num_requests),
        "update_from_output": _median_us(outputs, num_requests),
    }


def _median_us(build: Callable[[list[list[int]]], object], num_requests: int) -> float:
    samples = []
    for _ in range(_NUM_SAMPLES):
        tokens = [[1000 + index] for index in range(num_requests)]
        start = time.thread_time_ns()
        built = build(tokens)
        samples.append((time.thread_time_ns() - start) / 1e3)
        del built
    return statistics.median(samples)
