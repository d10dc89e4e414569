# SPDX-License-Identifier: Apache-2.0
"""Every patch of a vLLM object: one row each, with target, why, how and when it can go.

A patched object carries its row's name, so a second installation (plugins load again in each process, and a forked child inherits
the patched object) finds it and leaves it alone.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MARK = "__tokenspeed_patch__"

BlockHasher = Callable[[Any], list[bytes]]
BlockHasherFactory = Callable[[int, Callable[[Any], bytes], int], BlockHasher]


@dataclass(frozen=True)
class Patch:
    """One patched vLLM object.

    Attributes:
        name: of the row.
        target: `module:attribute` or `module:Class.attribute`.
        why: what cannot be done without it.
        how: what the replacement does.
        when: what makes it be installed.
        goes: when it can be taken out.
    """

    name: str
    target: str
    why: str
    how: str
    when: str
    goes: str

    @property
    def is_installed(self) -> bool:
        """Whether the target is patched in this process; False when its module was never imported."""
        try:
            owner, attribute = _owner(self.target)
        except (ImportError, AttributeError):
            return False
        return _name_on(owner, attribute) == self.name


PARSER = Patch(
    name="parser",
    target="vllm.engine.arg_utils:EngineArgs.add_cli_args",
    why="no hook lets a general plugin add a flag; only a platform plugin may, and there can be only one of those",
    how="calls vLLM's function, then adds our flags to the parser that it returns",
    when="always, at registration",
    goes="when vLLM lets a general plugin add flags",
)
ENGINE_CONFIG = Patch(
    name="engine_config",
    target="vllm.engine.arg_utils:EngineArgs.create_engine_config",
    why="runners read the configuration before the scheduler exists, so what a scheduler cannot do is settled here",
    how="passes straight through unless something of ours is asked for; then resolves the scheduler's name and refuses or "
    "adjusts settings",
    when="always, at registration",
    goes="when a scheduler class can veto settings before the runners are built",
)
BLOCK_HASHER = Patch(
    name="block_hasher",
    target="vllm.v1.engine.core:get_request_block_hasher",
    why="EngineCore hashes every prompt in Python, with the GIL, whatever the scheduler does",
    how="hands out the scheduler's own hasher to the one engine core that is being built, then puts vLLM's function back",
    when="while an engine core with the tokenspeed scheduler is being built",
    goes="when a scheduler can supply the hasher",
)
PATCHES: tuple[Patch, ...] = (PARSER, ENGINE_CONFIG, BLOCK_HASHER)


def install_parser(add_flags: Callable[[Any], None]) -> None:
    """Install row `parser`.

    Args:
        add_flags: adds our flags to the argument parser that it is given.
    """
    owner, attribute = _owner(PARSER.target)
    if _name_on(owner, attribute) == PARSER.name:
        return
    original = getattr(owner, attribute)

    @functools.wraps(original)
    def add_cli_args(*args: Any, **kwargs: Any) -> Any:
        parser = original(*args, **kwargs)
        add_flags(parser)
        return parser

    setattr(owner, attribute, staticmethod(_marked(add_cli_args, PARSER)))


def install_engine_config(create: Callable[..., Any]) -> None:
    """Install row `engine_config`.

    Args:
        create: called as `create(original, engine_args, *args, **kwargs)`, returns the `VllmConfig`.
    """
    owner, attribute = _owner(ENGINE_CONFIG.target)
    if _name_on(owner, attribute) == ENGINE_CONFIG.name:
        return
    original = getattr(owner, attribute)

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        return create(original, self, *args, **kwargs)

    setattr(owner, attribute, _marked(create_engine_config, ENGINE_CONFIG))


def install_block_hasher(factory: BlockHasherFactory, vllm_config: Any, *, has_connector: bool) -> bool:
    """Install row `block_hasher` for the engine core that is being built around the calling scheduler.

    Call it last in the scheduler's constructor: EngineCore asks for the hasher right after it. vLLM's function is back in place
    once it has, so an engine with the stock scheduler in the same process is not touched. Nothing is installed when EngineCore
    will not ask (prefix caching off and no connector).

    Args:
        factory: called as `factory(hash_block_size_tokens, caching_hash_fn, num_hash_lookahead_tokens)`; the result takes a
            `Request` and returns its block hashes that are not computed yet.
        vllm_config: of the engine core.
        has_connector: whether the scheduler has a KV connector.

    Returns:
        Whether it was installed.
    """
    if not (vllm_config.cache_config.enable_prefix_caching or has_connector):
        return False
    owner, attribute = _owner(BLOCK_HASHER.target)
    remove_block_hasher()
    original = getattr(owner, attribute)

    @functools.wraps(original)
    def get_request_block_hasher(
        hash_block_size: int, caching_hash_fn: Callable[[Any], bytes], num_hash_lookahead_tokens: int = 0
    ) -> BlockHasher:
        remove_block_hasher()
        return factory(hash_block_size, caching_hash_fn, num_hash_lookahead_tokens)

    setattr(owner, attribute, _marked(get_request_block_hasher, BLOCK_HASHER))
    return True


def remove_block_hasher() -> None:
    """Put vLLM's function back, for a scheduler whose construction fails after it installed its hasher."""
    owner, attribute = _owner(BLOCK_HASHER.target)
    current = getattr(owner, attribute)
    if getattr(current, _MARK, None) == BLOCK_HASHER.name:
        setattr(owner, attribute, current.__wrapped__)


def _marked(function: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    setattr(function, _MARK, patch.name)
    return function


def _name_on(owner: Any, attribute: str) -> str | None:
    name = getattr(getattr(owner, attribute), _MARK, None)
    return None if name is None else str(name)


def _owner(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, attribute = path.split(".")
    for name in parents:
        owner = getattr(owner, name)
    return owner, attribute
