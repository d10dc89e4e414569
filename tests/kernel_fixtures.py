# SPDX-License-Identifier: Apache-2.0
"""Small registries and requests for the tests of selection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenspeed_plugin.kernels.registry import (
    Capability,
    KernelSpec,
    Objective,
    OperandFormat,
    Platform,
    Priority,
    Registry,
    ShapeTrait,
)
from tokenspeed_plugin.kernels.select import KernelRequest

BF16 = {"q": OperandFormat("bfloat16"), "kv": OperandFormat("bfloat16")}
HOPPER = Platform("cuda", (9, 0), "NVIDIA H200")


def make_spec(solution: str = "fast", **changes: Any) -> KernelSpec:
    fields: dict[str, Any] = {
        "capabilities": (Capability("cuda", (9, 0), (9, 1)),),
        "signatures": (BF16,),
        "load": lambda: print,
        "priority": Priority.SPECIALIZED,
    }
    return KernelSpec("mla", "decode", solution, **{**fields, **changes})


def make_request(**changes: Any) -> KernelRequest:
    fields: dict[str, Any] = {
        "family": "mla",
        "mode": "decode",
        "signature": BF16,
        "shape": {"heads": 16, "page_tokens": 64},
        "platform": HOPPER,
    }
    return KernelRequest(**{**fields, **changes})


def make_registry() -> Registry:
    everywhere = (Capability("cpu"), Capability("cuda"))
    return Registry(
        [
            make_spec(
                "reference",
                capabilities=everywhere,
                priority=Priority.REFERENCE,
                objectives=frozenset(Objective),
            ),
            make_spec("portable", capabilities=(Capability("cuda", (8, 0)),), priority=Priority.PORTABLE),
            make_spec("fast", traits=(ShapeTrait("page_tokens", 16, power_of_two=True),)),
        ]
    )


def missing(reason: str) -> Callable[[], str]:
    return lambda: reason
