# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/kernels.md: made from the benchmark's output, and of the same run as the table that is shipped."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.latent.markdown import bar_lines, cell_lines, fp8_lines, main, prefill_lines
from tokenspeed_plugin.kernels.autotune import SHIPPED

DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"
ROW = re.compile(
    r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+)K \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", re.MULTILINE
)
FP8_ROW = re.compile(r"^\| e4m3 \| (\d+) \| (\d+) \| (\d+) \| (\d+)K \| ([\d.]+) \| ([\d.]+) \|", re.MULTILINE)
PREFILL_ROW = re.compile(
    r"^\| (\d+) \| (\d+) \| (\d+)K \| \d+ \| (\d+) \| (\d+|-) \| (\d+) \| [\d.]+ \|$", re.MULTILINE
)
FP8_FORMATS = "kv=float8_e4m3fn/tensor, q=float8_e4m3fn/tensor"
DOCUMENT = {
    "cells": [
        {
            "cell": {"heads": 16, "query_tokens": 2, "requests": 4, "context_tokens": 32768},
            "floor_us": 36.04,
            "times_us": {
                "ours": 40.0,
                "FlashMLA": 64.44,
                "FlashAttention 3": 50.0,
                "ours, FP8": 25.0,
                "FlashMLA, FP8": 30.0,
            },
        }
    ],
    "prefills": [
        {
            "cell": {"heads": 16, "query_tokens": queries, "context_tokens": 65536},
            "floor_us": 500.4,
            "times_us": {"head_groups": 800.4, "unfolded": 1000.5} | absorbed,
        }
        for queries, absorbed in ((256, {"flashattn3": 900.0}), (2048, {}))
    ],
    "bars": [
        {"claim": "fast", "relation": ">=", "limit": 1.3, "measured": 1.2345, "met": False, "note": ""},
        {"claim": "right", "relation": "<=", "limit": 1, "measured": None, "met": False, "note": "not checked"},
    ],
}


def test_cells_and_bars() -> None:
    assert list(cell_lines(DOCUMENT))[2:] == ["| 16 | 2 | 4 | 32K | 36.0 | 40.0 | 64.4 | 50.0 | - | 1.25 |"]
    assert list(fp8_lines(DOCUMENT))[2:] == ["| e4m3 | 16 | 2 | 4 | 32K | 25.0 | 30.0 | 40.0 | 1.60 | 1.20 |"]
    assert list(prefill_lines(DOCUMENT))[2:] == [
        "| 16 | 256 | 64K | 500 | 800 | 900 | 1000 | 1.12 |",
        "| 16 | 2048 | 64K | 500 | 800 | - | 1000 | 1.25 |",
    ]
    assert list(bar_lines(DOCUMENT))[2:] == [
        "| fast | 1.23 | >= 1.3 | not met |",
        "| right | not checked | <= 1 | not met |",
    ]


def test_it_prints_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "mla.json"
    source.write_text(json.dumps(DOCUMENT))
    assert main([str(source)]) == 0
    assert capsys.readouterr().out.count("\n|") == 13
    assert main([]) == 2


def shape_text(heads: str, queries: str, requests: str, kilotokens: str) -> str:
    """The numbers of a bucket, as the tuning table spells them."""
    context = f"context_tokens={int(kilotokens) * 1024}"
    return f"{context}, heads={heads}, page_tokens=64, query_tokens={queries}, requests={requests}"


def test_the_documented_table_is_the_one_that_is_shipped() -> None:
    buckets = json.loads(SHIPPED.read_text())["devices"]["NVIDIA H200"]
    text = DOCS.read_text()
    rows = ROW.findall(text)
    assert len(rows) == sum(bucket.startswith("mla.decode(kv=bfloat16") for bucket in buckets)
    for heads, queries, requests, kilotokens, *documented in rows:
        shape = shape_text(heads, queries, requests, kilotokens)
        times = buckets[f"mla.decode(kv=bfloat16, q=bfloat16; {shape})"]
        shipped = [f"{times[solution]:.1f}" for solution in ("cuda_sm90", "flashmla", "flashattn3")]
        assert documented == shipped, shape
    fp8_rows = FP8_ROW.findall(text)
    prefill_rows = PREFILL_ROW.findall(text)
    assert len(rows) + len(fp8_rows) + len(prefill_rows) == len(buckets)
    for heads, queries, kilotokens, *documented in prefill_rows:
        shape = shape_text(heads, queries, "1", kilotokens)
        times = buckets[f"mla.cached_prefill(kv=bfloat16, q=bfloat16; {shape})"]
        shipped = [f"{times[n]:.0f}" if n in times else "-" for n in ("head_groups", "flashattn3", "unfolded")]
        assert documented == shipped, shape
    for heads, queries, requests, kilotokens, *documented in fp8_rows:
        times = buckets[f"mla.decode({FP8_FORMATS}; {shape_text(heads, queries, requests, kilotokens)})"]
        assert documented == [f"{times[solution]:.1f}" for solution in ("cuda_sm90_fp8", "flashmla")]
