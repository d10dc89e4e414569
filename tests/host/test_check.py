# SPDX-License-Identifier: Apache-2.0
"""The host check: passes on the supported vLLMs, and names what another one lacks."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.interface import SchedulerInterface

import tokenspeed_plugin.host.check as check_module
from tokenspeed_plugin.host import capabilities, names
from tokenspeed_plugin.host.check import HostError, check_host, check_start, require_host, signature_differences
from tokenspeed_plugin.host.differences import field_names, known_fields
from tokenspeed_plugin.host.version import is_supported

pytestmark = pytest.mark.host_matrix


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.32.0", True),
        ("0.32.0+cpu", True),
        ("0.33.1.dev7+gabc", True),
        ("0.31.9", False),
        ("0.34.0", False),
        ("1.0.0", False),
        ("dev", False),
        ("", False),
    ],
)
def test_supported_range(version: str, supported: bool) -> None:
    assert is_supported(version) is supported


def test_the_installed_vllm_has_everything() -> None:
    assert check_host().missing == ()
    assert check_host().reason is None
    require_host("--scheduler tokenspeed")


def test_every_method_of_the_scheduler_interface_is_in_the_table() -> None:
    methods = {name for name, value in vars(SchedulerInterface).items() if inspect.isfunction(value)}
    # Abstract since 0.33 only, so 0.32 cannot be asked for it.
    assert methods - set(capabilities.SCHEDULER_METHODS) <= {"has_request"}


@pytest.mark.parametrize(
    ("owner", "attribute", "name"),
    [
        (SchedulerInterface, "make_stats", "vllm.v1.core.sched.interface:SchedulerInterface.make_stats"),
        (names.PauseState, "PAUSED_ALL", "vllm.v1.core.sched.interface:PauseState.PAUSED_ALL"),
        (names.Request, "take_events", "vllm.v1.request:Request.take_events"),
    ],
)
def test_a_missing_method_is_named(monkeypatch: pytest.MonkeyPatch, owner: type, attribute: str, name: str) -> None:
    if attribute in getattr(owner, "__members__", {}):
        monkeypatch.setattr(check_module, "_has", lambda found, wanted: wanted != attribute and hasattr(found, wanted))
    else:
        monkeypatch.delattr(owner, attribute)
    assert check_host().missing == (name,)
    with pytest.raises(HostError) as error:
        require_host("--scheduler tokenspeed")
    assert str(error.value).startswith("--scheduler tokenspeed cannot be honoured: vLLM ")
    assert name in str(error.value)


def test_a_missing_parameter_field_and_request_attribute_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchedulerInterface, "schedule", lambda self: None)
    monkeypatch.setattr(names.SchedulerOutput, "__dataclass_fields__", {})
    original = names.Request.__init__

    def without_salt(self: object, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        del self.cache_salt

    monkeypatch.setattr(names.Request, "__init__", without_salt)
    missing = check_host().missing
    assert "vllm.v1.core.sched.interface:SchedulerInterface.schedule(throttle_prefills)" in missing
    assert "vllm.v1.core.sched.output:SchedulerOutput.kv_cache_block_copies" in missing
    assert "vllm.v1.request:Request.cache_salt" in missing


def test_an_unsupported_version_is_reported_without_looking_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "installed_version", lambda: "0.29.1")
    monkeypatch.setattr(check_module, "_find", lambda target: pytest.fail(f"looked at {target}"))
    assert check_host() == check_start()
    assert check_host().reason == "vLLM 0.29.1 is not supported (supported: >=0.32,<0.34)"
    monkeypatch.setattr(check_module, "installed_version", lambda: None)
    assert check_host().reason == "vLLM cannot be imported (supported: >=0.32,<0.34)"


def test_an_unsupported_version_says_so_once_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stock_vllm: None
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from tokenspeed_plugin.entry_points.general import register

    monkeypatch.setattr(check_module, "installed_version", lambda: "0.29.1")
    register()
    lines = [record.getMessage() for record in caplog.records if "tokenspeed" in record.name]
    assert lines == ["tokenspeed-plugin is off: vLLM 0.29.1 is not supported (supported: >=0.32,<0.34)."]
    with pytest.raises(HostError, match=r"--scheduler tokenspeed cannot be honoured: vLLM 0\.29\.1 is not supported"):
        EngineArgs.create_engine_config(SimpleNamespace(scheduler_cls="tokenspeed", additional_config={}))


def test_signature_differences_are_named_with_both_signatures() -> None:
    class Base:
        def schedule(self, throttle_prefills: bool = False) -> None: ...

        def finish(self, ids: str, status: int) -> None: ...

    class Narrow(Base):
        def schedule(self) -> None: ...

        def finish(self, ids: str, status: int, extra: int) -> None: ...

    class Renamed(Base):
        def schedule(self, throttle: bool = False) -> None: ...

    class Wider(Base):
        def schedule(self, throttle_prefills: bool = False, more: int = 0) -> None: ...

        def finish(self, *args: object, **kwargs: object) -> None: ...

    assert [line.partition("(")[0] for line in signature_differences(Narrow, Base)] == ["finish", "schedule"]
    assert "schedule(self) " in signature_differences(Narrow, Base)[1]
    assert len(signature_differences(Renamed, Base)) == 1
    assert signature_differences(Wider, Base) == []


def test_fields_that_only_one_version_has_are_left_out() -> None:
    fields = field_names(names.SchedulerOutput)
    assert fields[:2] == ("scheduled_new_reqs", "scheduled_cached_reqs")
    assert field_names(names.EngineCoreOutput)[:2] == ("request_id", "new_token_ids")
    given = known_fields(names.SchedulerOutput, preempted_req_ids=set(), skip_drafts=True, never_there=1)
    assert given == {"preempted_req_ids": set()} | ({"skip_drafts": True} if "skip_drafts" in fields else {})
    with pytest.raises(TypeError, match="int is neither"):
        field_names(int)


def test_every_name_is_exported() -> None:
    imported = {name for name in vars(names) if not name.startswith("__")}
    assert imported == set(names.__all__)
