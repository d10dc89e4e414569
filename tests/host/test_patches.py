# SPDX-License-Identifier: Apache-2.0
"""Patches: installed once, listed, and gone when they should be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import vllm.v1.engine.core as core
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tokenspeed_plugin.host import patches

pytestmark = [pytest.mark.host_matrix, pytest.mark.usefixtures("stock_vllm")]

CACHING = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=True))
NOT_CACHING = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=False))


def test_every_row_says_why_how_when_and_when_it_goes() -> None:
    assert (
        len({row.name for row in patches.PATCHES})
        == len({row.target for row in patches.PATCHES})
        == len(patches.PATCHES)
    )
    assert all((row.why, row.how, row.when, row.goes) > ("", "", "", "") for row in patches.PATCHES)


def test_parser_and_config_are_wrapped_once() -> None:
    calls: list[str] = []
    for _ in range(3):
        patches.install_parser(lambda parser: calls.append("flags"))
        patches.install_engine_config(lambda original, *args, **kwargs: calls.append("config"))
    assert patches.PARSER.is_installed
    assert patches.ENGINE_CONFIG.is_installed
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    assert parser.parse_args(["--scheduler-cls", "a.B"]).scheduler_cls == "a.B"
    EngineArgs.create_engine_config(SimpleNamespace())
    assert calls == ["flags", "config"]


def test_wrappers_keep_name_and_signature() -> None:
    before = EngineArgs.add_cli_args, EngineArgs.create_engine_config
    patches.install_parser(lambda parser: None)
    patches.install_engine_config(lambda original, *args, **kwargs: None)
    after = EngineArgs.add_cli_args, EngineArgs.create_engine_config
    assert [f.__wrapped__ for f in after] == list(before)
    assert [(f.__qualname__, f.__doc__, f.__module__) for f in after] == [
        (f.__qualname__, f.__doc__, f.__module__) for f in before
    ]


def test_block_hasher_serves_one_engine_core_and_leaves() -> None:
    original = core.get_request_block_hasher
    made: list[tuple[object, ...]] = []

    def factory(*arguments: object) -> object:
        made.append(arguments)
        return "ours"

    assert patches.install_block_hasher(factory, CACHING, has_connector=False)
    assert patches.install_block_hasher(factory, CACHING, has_connector=False)
    assert patches.BLOCK_HASHER.is_installed
    assert core.get_request_block_hasher(16, len) == "ours"
    assert made == [(16, len, 0)]
    assert core.get_request_block_hasher is original
    patches.install_block_hasher(factory, NOT_CACHING, has_connector=True)
    assert core.get_request_block_hasher(32, len, 3) == "ours"
    assert made[-1] == (32, len, 3)
    assert core.get_request_block_hasher is original


def test_block_hasher_is_not_installed_where_engine_core_will_not_ask() -> None:
    original = core.get_request_block_hasher
    assert not patches.install_block_hasher(lambda *a: None, NOT_CACHING, has_connector=False)
    assert core.get_request_block_hasher is original


def test_block_hasher_can_be_taken_back() -> None:
    original = core.get_request_block_hasher
    patches.install_block_hasher(lambda *a: None, CACHING, has_connector=False)
    patches.remove_block_hasher()
    patches.remove_block_hasher()
    assert core.get_request_block_hasher is original
    assert not patches.BLOCK_HASHER.is_installed


def test_a_row_can_be_taken_back_and_is_wrapped_once() -> None:
    import vllm.model_executor.layers.linear as linear

    original = linear.dispatch_unquantized_gemm
    for _ in range(2):
        patches.wrap(patches.UNQUANTIZED_PRODUCT, lambda choose: lambda: ("ours, then", choose()))
    assert patches.UNQUANTIZED_PRODUCT.is_installed
    assert linear.dispatch_unquantized_gemm() == ("ours, then", original())
    patches.unwrap(patches.UNQUANTIZED_PRODUCT)
    patches.unwrap(patches.UNQUANTIZED_PRODUCT)
    assert linear.dispatch_unquantized_gemm is original
