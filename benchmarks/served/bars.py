# SPDX-License-Identifier: Apache-2.0
"""Bars of attention kernels in whole engines: time of a decode step, what the kernels promise, and the same tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.report import Bar, MissingFigureError
from benchmarks.served.answers import LARGEST_ERROR_RATIO, error_ratio, margin, noise_logprob
from benchmarks.served.systems import (
    APPEND,
    CONTROL_BACKENDS,
    KV_TOKEN_BYTES,
    OURS,
    STOCK,
    SYSTEMS,
    control,
    draft_tokens,
    drafting,
)

LARGEST_RATIO = 1.01
LARGEST_RATIO_ALONE = 0.92
LEAST_SHARE_OF_PREDICTION = 0.8
SMALLEST_PREDICTION = 0.01
"""Of stock's step: a smaller saving cannot be told from noise, and is left to the bar that no step gets slower."""
LARGEST_FALL = 1.16
LARGEST_RATIO_OF_APPEND = 1.0
"""Over ours without it: `auto` has no use for a kernel that saves nothing."""
HOST_KERNELS = {"auto": "flashattn3", "fp8": "flashmla"}
"""What stock decodes with, by `--kv-cache-dtype`, among the kernels that were timed alone."""


def engine_bars(figures: dict[str, Any]) -> list[Bar]:
    """Return the bars; what failed or was left out leaves its bars unmet."""
    counts = figures["sessions"]
    bars = [
        Bar(f"{_of(n)}: time of the decode graph, ours over stock", "<=", LARGEST_RATIO, partial(_ratio, figures, n))
        for n in counts
    ]
    bars.append(
        Bar(
            "1 session: time of the decode graph, ours over stock",
            "<=",
            LARGEST_RATIO_ALONE,
            partial(_ratio, figures, 1),
        )
    )
    bars += [
        Bar(
            f"{_of(n)}, same experts: saving of a step over what the kernels promise",
            ">=",
            LEAST_SHARE_OF_PREDICTION,
            partial(_share, figures, n),
        )
        for n in counts
        if _is_judged(figures, n)
    ]
    for kind in ("tokens", "long_tokens"):
        bars += _token_bars(figures, kind, SYSTEMS, _control(figures))
    for drafts in figures.get("drafts", ()):
        bars += _draft_bars(figures, drafts)
    if figures.get("append"):
        bars += _append_bars(figures)
    if figures.get("returning"):
        bars += _returning_bars(figures)
    return bars + (_long_bars(figures) if figures.get("contexts") else [])


def _append_bars(figures: dict[str, Any]) -> list[Bar]:
    """The append to the cache, fused, against ours without that."""
    return [
        *(
            Bar(
                f"{_of(n)}, append fused: time of the decode graph, over ours without",
                "<=",
                LARGEST_RATIO_OF_APPEND,
                partial(_ratio, figures, n, (OURS, APPEND)),
            )
            for n in figures["sessions"]
        ),
        *(
            Bar(
                f"a turn of {n} new tokens, append fused: its forward pass, over ours without",
                "<=",
                LARGEST_RATIO,
                partial(_ratio, figures, n, (OURS, APPEND), "returning_turns"),
            )
            for n in figures.get("returning", ())
        ),
        *_token_bars(figures, "tokens", (STOCK, APPEND), _control(figures)),
    ]


def _returning_bars(figures: dict[str, Any]) -> list[Bar]:
    """No turn may take longer on the GPU, and answers to turns part no further than rounding explains."""
    claim = "a turn of {} new tokens: its forward pass, ours over stock"
    return [
        *(
            Bar(claim.format(n), "<=", LARGEST_RATIO, partial(_ratio, figures, n, SYSTEMS, "returning_turns"))
            for n in figures["returning"]
        ),
        *_token_bars(figures, "returning_tokens", SYSTEMS, _control(figures)),
    ]


def _draft_bars(figures: dict[str, Any], drafts: int) -> list[Bar]:
    """With drafts no step may be slower either, and answers part no further than vLLM's own with and without drafts."""
    pair, words = drafting(drafts), f"{drafts} draft{'s' if drafts > 1 else ''}"
    claim = "{}, {}: time of the decode graph, ours over stock"
    return [
        *(
            Bar(claim.format(words, _of(n)), "<=", LARGEST_RATIO, partial(_ratio, figures, n, pair))
            for n in figures["draft_sessions"]
        ),
        *_token_bars(figures, draft_tokens(drafts), pair, STOCK),
    ]


def _long_bars(figures: dict[str, Any]) -> list[Bar]:
    """One context that grows: no step slower than stock's, and what it costs more is hardly more than reading the KV that came."""
    contexts = sorted(figures["contexts"])
    ends = f"context of {contexts[0] // 1024}K to {contexts[-1] // 1024}K"
    return [
        *(
            Bar(
                f"context of {tokens // 1024}K: time of the decode graph, ours over stock",
                "<=",
                LARGEST_RATIO,
                partial(_ratio, figures, tokens, SYSTEMS, "decode_long"),
            )
            for tokens in contexts
        ),
        Bar(
            f"{ends}: fall of decode throughput over what the floor says",
            "<=",
            LARGEST_FALL,
            partial(_fall, figures, "step_ms"),
        ),
        Bar(
            f"{ends}: growth of the decode graph over what the floor says",
            "<=",
            LARGEST_FALL,
            partial(_fall, figures, "graph_ms"),
        ),
    ]


def _fall(figures: dict[str, Any], key: str) -> float:
    """How many times longer the longest context takes than the shortest, over the same for a step that only reads the new KV."""
    shortest, longest = min(figures["contexts"]), max(figures["contexts"])
    first_ms, last_ms = (_decoded_ms(figures, OURS, tokens, key, "decode_long") for tokens in (shortest, longest))
    token_bytes = KV_TOKEN_BYTES[_cache_dtype(figures)]
    floor_ms = first_ms + figures["layers"] * (longest - shortest) * token_bytes / _bytes_per_s(figures) * 1e3
    return (last_ms / first_ms) / (floor_ms / first_ms)


def _bytes_per_s(figures: dict[str, Any]) -> float:
    for kernels in figures.get("kernels_us", {}).values():
        return float(kernels["bytes_per_s"])
    raise MissingFigureError(f"bandwidth was not measured: {figures.get('kernels_error', 'left out')}")


def _token_bars(figures: dict[str, Any], kind: str, systems: tuple[str, str], control_system: str) -> list[Bar]:
    """Where answers part, and how far apart they were before; what vLLM's own do so is the measure where it ran."""
    found = figures.get(kind, {}).get(control_system)
    words = kind.replace("_", " ") + (", append fused" if systems[1] == APPEND else "")
    noise = noise_logprob(found["mismatches"] if found else ())
    bars = [
        Bar(
            f"{words}: log-probability between stock's and ours where answers part",
            "<=",
            noise,
            lambda: max(map(margin, _compared(figures, kind, systems)["mismatches"]), default=0.0),
        )
    ]
    if found and control_system in CONTROL_BACKENDS:
        whose = "Triton's" if control_system == "stock-triton" else "FlashMLA's"
        claim = f"{words}: mean error of log-probabilities against stock, ours over {whose}"
        bars.append(Bar(claim, "<=", LARGEST_ERROR_RATIO, partial(_error_ratio, figures, kind, systems)))
    return bars


def _error_ratio(figures: dict[str, Any], kind: str, systems: tuple[str, str]) -> float:
    return error_ratio(_compared(figures, kind, systems), figures[kind][_control(figures)])


def _cache_dtype(figures: dict[str, Any]) -> str:
    return str(figures.get("kv_cache_dtype", "auto"))


def _control(figures: dict[str, Any]) -> str:
    return control(_cache_dtype(figures))


def _compared(figures: dict[str, Any], kind: str, systems: tuple[str, str]) -> dict[str, Any]:
    found: dict[str, Any] | None = figures.get(kind, {}).get(systems[1])
    if found is None:
        command = kind.partition("_drafts")[0]
        reasons = [why for system in systems if (why := _engine(figures, system).get(f"{command}_error"))]
        raise MissingFigureError("; ".join(reasons) or "the answers were not compared")
    if found["constant_answers"] * 2 > found["requests"]:
        raise MissingFigureError("most answers repeat one token: equality proves nothing")
    return found


def predicted_ms(figures: dict[str, Any], count: int) -> float:
    """What the kernel benchmark says that a step of `count` sessions saves; nothing where the batch stays with vLLM."""
    choice = _engine(figures, "ours")["who"]["choices"].get(str(count))
    if choice is None or not choice["taken"]:
        return 0.0
    kernels = figures.get("kernels_us", {}).get(str(count))
    if kernels is None:
        raise MissingFigureError(f"the kernels were not timed: {figures.get('kernels_error', 'left out')}")
    return float(figures["layers"] * (kernels[HOST_KERNELS[_cache_dtype(figures)]] - kernels["ours"]) * 1e-3)


def _of(count: int) -> str:
    return f"{count} session{'s' if count > 1 else ''}"


def _engine(figures: dict[str, Any], system: str) -> dict[str, Any]:
    found: dict[str, Any] = figures["engines"].get(system, {})
    if "error" in found:
        raise MissingFigureError(f"{system}: {found['error']}")
    return found


_UNTIMED = {
    "decode_long": "replayed no decode graph of a context of {} tokens",
    "returning_turns": "timed no forward pass of a turn of {} new tokens",
}


def _decoded_ms(figures: dict[str, Any], system: str, cell: int, key: str, part: str = "decode") -> float:
    found = _engine(figures, system).get(part, {}).get(str(cell), {})
    if key not in found:
        what = _UNTIMED.get(part, "replayed no decode graph of {} requests").format(cell)
        raise MissingFigureError(f"{system} {what}")
    return float(found[key])


def _ratio(figures: dict[str, Any], cell: int, systems: tuple[str, str] = SYSTEMS, part: str = "decode") -> float:
    key = "forward_ms" if part == "returning_turns" else "graph_ms"
    stock_ms, ours_ms = (_decoded_ms(figures, system, cell, key, part) for system in systems)
    return ours_ms / stock_ms


def _is_judged(figures: dict[str, Any], count: int) -> bool:
    try:
        return predicted_ms(figures, count) >= SMALLEST_PREDICTION * _decoded_ms(figures, STOCK, count, "graph_ms")
    except (MissingFigureError, KeyError):
        return True  # and the bar says what is missing


def _share(figures: dict[str, Any], count: int) -> float:
    stock, ours = (_decoded_ms(figures, system, count, "graph_ms", "decode_alike") for system in SYSTEMS)
    return (stock - ours) / predicted_ms(figures, count)
