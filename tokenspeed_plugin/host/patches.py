# SPDX-License-Identifier: Apache-2.0
"""Every patch of a vLLM object: one row each, with target, why, how and when it can go.

A patched object carries its row's name, so a second installation (plugins load again in each process, and a forked child inherits
the patched object) finds it and leaves it alone.
"""

import functools
import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
_WHOLE = {
    "why": "`dense=tp1` of `--placement` wants MLPs that every rank has whole; vLLM's layers can, but its models do not hand the switch on",
    "how": "calls the constructor with `disable_tp` for the MLPs of decoder layers, told by their prefix",
    "when": "while a placed model with `dense=tp1` on several ranks is being built",
    "goes": "when vLLM's models take a tensor-parallel size for each layer",
}
MERGED_LINEAR = Patch(
    "merged_linear", "vllm.model_executor.layers.linear:MergedColumnParallelLinear.__init__", **_WHOLE
)
ROW_LINEAR = Patch("row_linear", "vllm.model_executor.layers.linear:RowParallelLinear.__init__", **_WHOLE)
KV_MANAGER = Patch(
    name="kv_manager",
    target="vllm.v1.core.sched.scheduler:KVCacheManager",
    why="vLLM's scheduler builds its KV cache manager by name; no setting or registry selects another",
    how="stands for our manager while one scheduler is being constructed, then vLLM's class is back",
    when="while a scheduler with `--kv-manager flat` is being constructed",
    goes="when a KV cache manager can be selected",
)
STAT_LOGGERS = Patch(
    name="stat_loggers",
    target="vllm.v1.metrics.loggers:StatLoggerManager.__init__",
    why="vLLM's group of stat-logger plugins turns statistics on for every engine, with --disable-log-stats and with any scheduler",
    how="passes the logger of the KV cache's metrics to managers of engines with the flat KV manager, and nothing to others",
    when="when a configuration with the tokenspeed scheduler or the flat KV manager is made",
    goes="when a stat-logger plugin can decline",
)
KV_MAP_METHOD = "tokenspeed_kv_map"
KV_MAP = Patch(
    name="kv_map",
    target=f"vllm.v1.engine.core:EngineCore.{KV_MAP_METHOD}",
    why="a server's routes reach the workers, and fixed methods of the engine core, but no scheduler",
    how="adds a method that asks the scheduler for a snapshot of its block pool; replaces nothing",
    when="in development mode, when a scheduler with the flat KV manager is built",
    goes="when an endpoint plugin can ask the scheduler",
)
UNQUANTIZED_PRODUCT = Patch(
    name="unquantized_product",
    target="vllm.model_executor.layers.linear:dispatch_unquantized_gemm",
    why="vLLM takes the product of an unquantized layer from a list of its own, to which nothing can be added",
    how="asks vLLM's function, and gives the layer a product that goes to ours where that gains",
    when="in processes of an engine whose `--kernels` chose a kernel of family `linear`",
    goes="when a product can be registered",
)
PATCHES: tuple[Patch, ...] = (
    PARSER,
    ENGINE_CONFIG,
    BLOCK_HASHER,
    KV_MANAGER,
    MERGED_LINEAR,
    ROW_LINEAR,
    STAT_LOGGERS,
    KV_MAP,
    UNQUANTIZED_PRODUCT,
)


def install_parser(add_flags: Callable[[Any], None]) -> None:
    """Install row `parser`.

    Args:
        add_flags: adds our flags to the argument parser that it is given.
    """

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def add_cli_args(*args: Any, **kwargs: Any) -> Any:
            parser = original(*args, **kwargs)
            add_flags(parser)
            return parser

        return add_cli_args

    wrap(PARSER, around, kind=staticmethod)


def install_engine_config(create: Callable[..., Any]) -> None:
    """Install row `engine_config`.

    Args:
        create: called as `create(original, engine_args, *args, **kwargs)`, returns the `VllmConfig`.
    """

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            return create(original, self, *args, **kwargs)

        return create_engine_config

    wrap(ENGINE_CONFIG, around)


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


def install_stat_loggers(loggers_for: Callable[[Any], list[type]]) -> None:
    """Install row `stat_loggers`.

    Args:
        loggers_for: takes the `VllmConfig` of an engine, returns our loggers for it.
    """

    def around(original: Callable[..., None]) -> Callable[..., None]:
        def build(
            self: Any,
            vllm_config: Any,
            engine_idxs: Any = None,
            custom_stat_loggers: Any = None,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            # Ours come first: they take out of a report what vLLM's own would not understand.
            loggers = [*loggers_for(vllm_config), *(custom_stat_loggers or ())]
            original(self, vllm_config, engine_idxs, loggers or None, *args, **kwargs)

        return build

    wrap(STAT_LOGGERS, around)


def install_kv_map() -> None:
    """Install row `kv_map`."""
    owner, attribute = _owner(KV_MAP.target)

    def kv_map(self: Any) -> dict[str, Any]:
        snapshot: dict[str, Any] = self.scheduler.kv_map()
        return snapshot

    setattr(owner, attribute, _marked(kv_map, KV_MAP))


def remove_block_hasher() -> None:
    """Put vLLM's function back, for a scheduler whose construction fails after it installed its hasher."""
    unwrap(BLOCK_HASHER)


@contextmanager
def whole_on_every_rank(suffixes: tuple[str, ...]) -> Iterator[None]:
    """Rows `merged_linear` and `row_linear`, for as long as vLLM builds a model.

    Args:
        suffixes: of the prefixes, behind the number of a decoder layer, of the linear layers that are not split over the ranks.
    """
    if not suffixes:
        yield
        return
    named = re.compile(r"(?:^|\.)layers\.\d+\.(?:" + "|".join(map(re.escape, suffixes)) + ")$")
    owners = [(patch, _owner(patch.target)[0]) for patch in (MERGED_LINEAR, ROW_LINEAR)]
    originals = [owner.__init__ for _, owner in owners]
    for patch, owner in owners:
        owner.__init__ = _marked(_whole(owner.__init__, named), patch)
    try:
        yield
    finally:
        for (_, owner), original in zip(owners, originals, strict=True):
            owner.__init__ = original


def _whole(original: Callable[..., None], named: re.Pattern[str]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if named.search(str(kwargs.get("prefix", ""))):
            kwargs["disable_tp"] = True
        original(self, *args, **kwargs)

    return __init__


@contextmanager
def kv_manager(factory: Callable[..., Any]) -> Iterator[None]:
    """Row `kv_manager`: while the context lasts, vLLM's scheduler builds its KV cache manager by `factory`.

    Args:
        factory: takes the arguments of vLLM's KVCacheManager, all by keyword.
    """
    owner, attribute = _owner(KV_MANAGER.target)
    original = getattr(owner, attribute)

    def make(*args: Any, **kwargs: Any) -> Any:
        return factory(*args, **kwargs)

    setattr(owner, attribute, _marked(make, KV_MANAGER))
    try:
        yield
    finally:
        setattr(owner, attribute, original)


def wrap(
    patch: Patch, around: Callable[[Callable[..., Any]], Callable[..., Any]], kind: Callable[[Any], Any] = lambda f: f
) -> None:
    """Put a function around vLLM's, once in a process.

    Args:
        around: takes vLLM's function, returns the one that calls it.
        kind: makes an attribute of the class of it, such as `staticmethod`.
    """
    owner, attribute = _owner(patch.target)
    if _name_on(owner, attribute) == patch.name:
        return
    original = getattr(owner, attribute)
    setattr(owner, attribute, kind(_marked(functools.wraps(original)(around(original)), patch)))


def unwrap(patch: Patch) -> None:
    """Put vLLM's function back where the row is installed."""
    owner, attribute = _owner(patch.target)
    if _name_on(owner, attribute) == patch.name:
        setattr(owner, attribute, getattr(owner, attribute).__wrapped__)


def _marked(function: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    setattr(function, _MARK, patch.name)
    return function


def _name_on(owner: Any, attribute: str) -> str | None:
    name = getattr(getattr(owner, attribute, None), _MARK, None)
    return None if name is None else str(name)


def _owner(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    *parents, attribute = path.split(".")
    return functools.reduce(getattr, parents, importlib.import_module(module)), attribute
