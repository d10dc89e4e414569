# SPDX-License-Identifier: Apache-2.0
"""The gate around `create_engine_config`: an exact pass-through, until something of ours is asked for."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tokenspeed_plugin import flag_carrier, hooks, scheduler_fsm
from tokenspeed_plugin.hooks import HookError, hookimpl, plugin_manager
from tokenspeed_plugin.host import config_gate, schedulers
from tokenspeed_plugin.host.config_gate import ConfigRefusedError
from tokenspeed_plugin.host.config_rows import ADJUSTED, Refused
from tokenspeed_plugin.host.engine_gate import create_engine_config
from tokenspeed_plugin.host.schedulers import TOKENSPEED_PATH
from tokenspeed_plugin.settings import SettingsError

pytestmark = pytest.mark.host_matrix

SYNC = "vllm.v1.core.sched.scheduler.Scheduler"
ASYNC = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"


class Original:
    """Stands for vLLM's `create_engine_config`: notes the arguments as they were when it was called."""

    def __init__(self, **config: Any) -> None:
        self.config = SimpleNamespace(**config)
        self.seen: dict[str, Any] = {}
        self.call: tuple[Any, ...] = ()

    def __call__(self, engine_args: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen = copy.copy(vars(engine_args))
        self.call = (args, kwargs)
        return self.config


def arguments(**given: Any) -> SimpleNamespace:
    defaults = {
        "scheduler_cls": None,
        "additional_config": {},
        "async_scheduling": None,
        "prefix_caching_hash_algo": "sha256",
    }
    return SimpleNamespace(**{**defaults, **given})


def honoured_config(**scheduler: Any) -> dict[str, Any]:
    """A configuration that nothing in the table refuses."""
    return {
        "scheduler_config": SimpleNamespace(**{"policy": "fcfs", "async_scheduling": False, **scheduler}),
        "cache_config": SimpleNamespace(prefix_caching_hash_algo="sha256", prefix_cache_retention_interval=0),
    }


@pytest.fixture
def _our_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in where the compiled scheduler is not what is tested."""
    stand_in = type("TokenSpeedScheduler", (), {"__module__": scheduler_fsm.__name__})
    monkeypatch.setitem(vars(scheduler_fsm), "TokenSpeedScheduler", stand_in)


def test_nothing_asked_is_an_exact_pass_through() -> None:
    for scheduler_cls in (None, SYNC, object):
        args = arguments(scheduler_cls=scheduler_cls, additional_config={"other": {"scheduler": "tokenspeed"}})
        before = copy.deepcopy(vars(args))
        original = Original()
        config = create_engine_config(original, args, "context", headless=True)
        assert config is original.config
        assert original.call == (("context",), {"headless": True})
        assert original.seen == before == vars(args)


def test_asking_for_vllm_is_the_stock_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_SCHEDULER", "tokenspeed")
    flag_carrier.record("scheduler", "vllm")
    original = Original()
    assert create_engine_config(original, arguments()) is original.config
    assert original.seen == vars(arguments())
    flag_carrier.forget()
    create_engine_config(original, arguments(scheduler_cls="vllm"))
    assert original.seen == vars(arguments())


@pytest.mark.usefixtures("_our_scheduler")
@pytest.mark.parametrize("route", ["flag", "short name", "path", "class", "environment", "additional_config"])
def test_every_way_of_asking_reaches_our_scheduler(monkeypatch: pytest.MonkeyPatch, route: str) -> None:
    args, expected = arguments(), TOKENSPEED_PATH
    if route == "flag":
        flag_carrier.record("scheduler", "tokenspeed")
        args.scheduler_cls = TOKENSPEED_PATH
    elif route == "short name":
        args.scheduler_cls = "tokenspeed"
    elif route == "path":
        args.scheduler_cls = TOKENSPEED_PATH
    elif route == "class":
        args.scheduler_cls = expected = type("Mine", (scheduler_fsm.TokenSpeedScheduler,), {})
    elif route == "environment":
        monkeypatch.setenv("TOKENSPEED_SCHEDULER", "tokenspeed")
    else:
        args.additional_config = {"tokenspeed": {"scheduler": "tokenspeed"}}
    additional = copy.deepcopy(args.additional_config)
    original = Original(**honoured_config())
    assert create_engine_config(original, args) is original.config
    assert original.seen["scheduler_cls"] == expected
    assert all(original.seen[row.argument] == row.value for row in ADJUSTED)
    assert args.additional_config == additional


@pytest.mark.usefixtures("_our_scheduler")
def test_settings_are_adjusted_before_the_configuration_is_made(caplog: pytest.LogCaptureFixture) -> None:
    original = Original(**honoured_config())
    create_engine_config(original, arguments(scheduler_cls="tokenspeed", **{row.argument: "other" for row in ADJUSTED}))
    assert {row.argument: original.seen[row.argument] for row in ADJUSTED} == {
        row.argument: row.value for row in ADJUSTED
    }
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.split(" ")[0] for line in warnings] == ["--" + row.argument.replace("_", "-") for row in ADJUSTED]


@pytest.mark.usefixtures("_our_scheduler")
def test_what_cannot_be_honoured_stops_the_start_in_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        Refused("scheduler_config.interval", lambda v: v > 1, "an interval", "leave it out"),
        Refused("lora_config.max_loras", lambda v: v is not None, "LoRA", "leave it out"),
        Refused("speculative_config.method", lambda v: v is not None, "speculation", "leave it out"),
    )
    monkeypatch.setattr(config_gate, "REFUSED", rows)
    config = honoured_config(interval=4) | {"lora_config": SimpleNamespace(max_loras=2), "speculative_config": None}
    config["cache_config"].prefix_caching_hash_algo = "xxhash"
    with pytest.raises(ConfigRefusedError) as error:
        create_engine_config(Original(**config), arguments(scheduler_cls="tokenspeed"))
    lines = str(error.value).splitlines()
    assert lines[0] == "the tokenspeed scheduler cannot honour:"
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "scheduler_config.interval=4",
        "lora_config.max_loras=2",
        "cache_config.prefix_caching_hash_algo='xxhash'",
    ]
    assert all("or use `--scheduler vllm`" in line for line in lines[1:])


def test_a_dotted_path_is_not_held_to_our_limits() -> None:
    original = Original(
        **honoured_config(policy="priority", async_scheduling=True), lora_config=SimpleNamespace(max_loras=2)
    )
    flag_carrier.record("scheduler", ASYNC)
    assert create_engine_config(original, arguments(scheduler_cls=ASYNC, async_scheduling=True)) is original.config
    assert original.seen == vars(arguments(scheduler_cls=ASYNC, async_scheduling=True))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "tokensped",
            "--scheduler: 'tokensped' is not a scheduler (did you mean 'tokenspeed'?); allowed: {vllm,tokenspeed,dotted.path}",
        ),
        ("no.such.Class", "--scheduler no.such.Class: no class at 'no.such.Class'"),
        ("os.path.join", "--scheduler os.path.join: 'os.path.join' is <function join"),
    ],
)
def test_a_scheduler_that_cannot_be_is_named(name: str, message: str) -> None:
    flag_carrier.record("scheduler", name)
    with pytest.raises(SettingsError) as error:
        create_engine_config(Original(), arguments())
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(("flag", "scheduler_cls"), [("tokenspeed", SYNC), ("vllm", SYNC), (SYNC, "tokenspeed")])
def test_two_different_schedulers_are_refused(flag: str, scheduler_cls: str) -> None:
    flag_carrier.record("scheduler", flag)
    with pytest.raises(SettingsError) as error:
        create_engine_config(Original(), arguments(scheduler_cls=scheduler_cls))
    assert flag in str(error.value)
    assert repr(scheduler_cls) in str(error.value)


def test_what_this_version_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_KV_STORE", "mooncake")
    with pytest.raises(
        SettingsError, match="TOKENSPEED_KV_STORE: 'mooncake' is not available in this version; available: none"
    ):
        create_engine_config(Original(), arguments())


class Others:
    """A hook plugin of another distribution."""

    def __init__(self, **names: str) -> None:
        self.names = names

    @hookimpl
    def tokenspeed_schedulers(self) -> dict[str, str]:
        return self.names


@pytest.fixture
def _hook_plugins():
    manager = plugin_manager()
    before = set(manager.get_plugins())
    yield
    for plugin in set(manager.get_plugins()) - before:
        manager.unregister(plugin)


@pytest.mark.usefixtures("_hook_plugins")
def test_other_distributions_add_schedulers_by_name() -> None:
    plugin_manager().register(Others(theirs=ASYNC))
    original = Original(**honoured_config())
    create_engine_config(original, arguments(scheduler_cls="theirs"))
    assert original.seen["scheduler_cls"] == ASYNC
    with pytest.raises(SettingsError, match="other distributions add theirs"):
        schedulers.scheduler_path("their")


@pytest.mark.usefixtures("_hook_plugins")
@pytest.mark.parametrize("name", ["vllm", "tokenspeed"])
def test_a_scheduler_name_has_one_owner(name: str) -> None:
    plugin_manager().register(Others(**{name: ASYNC}))
    with pytest.raises(HookError, match=f"scheduler name '{name}' is claimed by {ASYNC}"):
        schedulers.scheduler_path(name if name != "vllm" else "x")


def test_a_hook_plugin_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unknown:
        @hookimpl
        def tokenspeed_shedulers(self) -> dict[str, str]:
            return {}

    def broken() -> object:
        message = "no module named theirs"
        raise ImportError(message)

    for load, reason in ((Unknown, "unknown hook 'tokenspeed_shedulers'"), (broken, "no module named theirs")):
        entry = SimpleNamespace(
            name="theirs", value="theirs:plugin", dist=SimpleNamespace(name="their-dist"), load=load
        )
        monkeypatch.setitem(
            hooks.plugin_manager.__wrapped__.__globals__, "entry_points", lambda group, entry=entry: [entry]
        )
        with pytest.raises(HookError) as error:
            hooks.plugin_manager.__wrapped__()
        assert "'theirs' (theirs:plugin) of their-dist cannot be used" in str(error.value)
        assert reason in str(error.value)


@pytest.mark.parametrize(
    ("path", "is_async", "warns"), [(SYNC, True, True), (SYNC, False, False), (ASYNC, True, False)]
)
def test_a_scheduler_on_the_synchronous_base_is_warned_about(
    path: str, is_async: bool, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault 14 for the classes of others: built on the synchronous base, they lose the overlap without a word."""
    flag_carrier.record("scheduler", path)
    create_engine_config(Original(**honoured_config(async_scheduling=is_async)), arguments(scheduler_cls=path))
    messages = {record.getMessage() for record in caplog.records if "tokenspeed" in record.name}
    expected = f"--scheduler {path} extends vLLM's synchronous Scheduler, so asynchronous scheduling gains nothing"
    assert [message.startswith(expected) for message in messages] == [True] * warns


@pytest.mark.parametrize("scheduler_cls", [None, ASYNC])
def test_a_rate_per_user_needs_our_scheduler(monkeypatch: pytest.MonkeyPatch, scheduler_cls: str | None) -> None:
    monkeypatch.setenv("TOKENSPEED_TARGET_TPS_PER_USER", "70")
    with pytest.raises(
        SettingsError, match=r"TOKENSPEED_TARGET_TPS_PER_USER: 70 has no effect with .*allowed: 0, or any"
    ):
        create_engine_config(Original(), arguments(scheduler_cls=scheduler_cls))
    monkeypatch.setenv("TOKENSPEED_TARGET_TPS_PER_USER", "0")
    monkeypatch.setenv("TOKENSPEED_STEP_TIME_PROFILE", "learnt.json")
    with pytest.raises(
        SettingsError, match=r"STEP_TIME_PROFILE: 'learnt.json' has no effect with .*allowed: none, or a file"
    ):
        create_engine_config(Original(), arguments(scheduler_cls=scheduler_cls))
    original = Original(**honoured_config())
    assert create_engine_config(original, arguments(scheduler_cls="tokenspeed")) is original.config
