# SPDX-License-Identifier: Apache-2.0
"""Fault 19 (ROCm/ATOM #683): the host's base class grows a method, and the plugin declared no version range."""

from __future__ import annotations

import re
from abc import abstractmethod
from pathlib import Path

import pytest
from vllm.v1.core.sched import interface

from tokenspeed_plugin.host.check import HostError, check_host, require_host
from tokenspeed_plugin.host.version import SUPPORTED

pytestmark = pytest.mark.host_matrix

ROOT = Path(__file__).resolve().parents[2]


def test_the_check_names_an_abstract_method_that_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    class Grown(interface.SchedulerInterface):
        @abstractmethod
        def is_ssm(self) -> bool: ...

    monkeypatch.setattr(interface, "SchedulerInterface", Grown)
    (missing,) = check_host().missing
    assert missing == "an implementation here of vllm.v1.core.sched.interface:SchedulerInterface.is_ssm"
    with pytest.raises(HostError, match=r"--scheduler tokenspeed cannot be honoured: .*SchedulerInterface\.is_ssm"):
        require_host("--scheduler tokenspeed")


def test_metadata_declares_the_range_that_the_check_enforces() -> None:
    (declared,) = re.findall(r'^vllm = \["vllm([^"]+)"\]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared == SUPPORTED
