# SPDX-License-Identifier: Apache-2.0
"""Selection: filters, measurements, tiers, overrides, and a reason for everyone."""

import pytest
from kernel_fixtures import BF16, HOPPER, make_registry, make_request, make_spec, missing

from tokenspeed_plugin.kernels.autotune import TuningTable
from tokenspeed_plugin.kernels.registry import Objective, OperandFormat, Platform, Priority, Registry
from tokenspeed_plugin.kernels.select import (
    ENVIRONMENT_VARIABLE,
    KernelSelectionError,
    parse_overrides,
    select_kernel,
    use_kernels,
)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)


def reasons(selection) -> dict[str, str]:
    return {r.solution: r.reason for r in selection.rejections}


def test_the_highest_tier_wins_when_nothing_was_measured() -> None:
    selection = select_kernel(make_request(), registry=make_registry())
    assert selection.spec.solution == "fast"
    assert selection.reason == "tier specialized, nothing was measured"
    assert reasons(selection) == {
        "portable": "tier portable, fast is specialized",
        "reference": "tier reference, fast is specialized",
    }


def test_measurements_beat_tiers() -> None:
    tuning = TuningTable()
    tuning.record("mla", "decode", BF16, make_request().shape, {"fast": 20.0, "portable": 10.0})
    selection = select_kernel(make_request(), registry=make_registry(), tuning=tuning)
    assert selection.spec.solution == "portable"
    assert selection.reason == "measured fastest: 10.0 us"
    assert reasons(selection) == {"fast": "measured 20.0 us, portable 10.0 us", "reference": "not measured"}


def test_measurements_of_another_bucket_say_nothing() -> None:
    tuning = TuningTable()
    tuning.record("mla", "decode", BF16, {"heads": 32, "page_tokens": 64}, {"fast": 20.0, "portable": 10.0})
    assert select_kernel(make_request(), registry=make_registry(), tuning=tuning).spec.solution == "fast"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": Platform("cuda", (8, 0))}, "platform cuda 8.0, allowed: cuda 9.0 to below 9.1"),
        ({"shape": {"page_tokens": 48}}, "page_tokens=48, allowed: at least 16, a power of two"),
        ({"objective": Objective.DETERMINISM}, "objective determinism, allowed: latency, portability, throughput"),
        (
            {"signature": {"q": OperandFormat("bfloat16"), "kv": OperandFormat("float8_e4m3fn", "tensor")}},
            "formats kv=float8_e4m3fn/tensor, q=bfloat16, allowed: kv=bfloat16, q=bfloat16",
        ),
    ],
)
def test_every_filter_names_what_it_refused(changes: dict, reason: str) -> None:
    with pytest.raises(KernelSelectionError) as caught:
        select_kernel(make_request(**changes), solution="fast", registry=make_registry())
    assert str(caught.value).endswith(reason)


def test_a_kernel_that_cannot_run_here_says_why() -> None:
    registry = Registry(
        [make_spec("fast", unavailable=missing("no nvcc")), make_spec("other", priority=Priority.PORTABLE)]
    )
    selection = select_kernel(make_request(), registry=registry)
    assert selection.spec.solution == "other"
    assert reasons(selection) == {"fast": "no nvcc"}


def test_determinism_takes_only_kernels_that_promise_it() -> None:
    selection = select_kernel(make_request(objective=Objective.DETERMINISM), registry=make_registry())
    assert selection.spec.solution == "reference"


def test_portability_prefers_the_portable_tier_whatever_was_measured() -> None:
    tuning = TuningTable()
    tuning.record("mla", "decode", BF16, make_request().shape, {"fast": 1.0, "portable": 10.0})
    request = make_request(objective=Objective.PORTABILITY)
    assert select_kernel(request, registry=make_registry(), tuning=tuning).spec.solution == "portable"


def test_nothing_fits_lists_everyone() -> None:
    with pytest.raises(KernelSelectionError, match=r"no kernel fits .*reference: platform.*portable: .*fast: "):
        select_kernel(make_request(platform=Platform("rocm", (9, 5))), registry=make_registry())


def test_overrides_yield_in_order_argument_context_environment_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = make_registry()

    def chosen(**arguments) -> tuple[str, str]:
        selection = select_kernel(make_request(), registry=registry, **arguments)
        return selection.spec.solution, selection.reason

    assert chosen(setting="mla=portable") == ("portable", "asked for by --kernels")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "mla=reference")
    assert chosen(setting="mla=portable") == ("reference", f"asked for by {ENVIRONMENT_VARIABLE}")
    with use_kernels("mla=fast", registry):
        assert chosen() == ("fast", "asked for by use_kernels")
        assert chosen(solution="portable") == ("portable", "asked for by argument solution")
    assert chosen()[0] == "reference"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mla=best", r"--kernels: mla='best', allowed solutions: fast, portable, reference"),
        ("attention=fast", r"--kernels: 'attention=fast', allowed: auto, or FAMILY=SOLUTION with a family of mla"),
        ("fast", r"--kernels: 'fast', allowed: auto"),
        ("mla=fast,mla=portable", r"mla is given twice, as 'fast' and 'portable'"),
    ],
)
def test_a_bad_override_names_itself_and_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_overrides(text, make_registry(), "--kernels")


def test_an_override_goes_through_the_same_filters() -> None:
    request = make_request(platform=Platform("cpu"))
    with pytest.raises(KernelSelectionError, match=r"--kernels asks for mla=fast, which does not fit .*platform cpu"):
        select_kernel(request, setting="mla=fast", registry=make_registry())


def test_the_rejections_cover_all_others() -> None:
    selection = select_kernel(make_request(platform=HOPPER), registry=make_registry())
    assert {r.solution for r in selection.rejections} == {"reference", "portable"}
