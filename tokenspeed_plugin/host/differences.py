# SPDX-License-Identifier: Apache-2.0
"""What differs between the supported vLLM versions, hidden in one place.

| since | what | how it is hidden |
|---|---|---|
| 0.33 | `SchedulerInterface.has_request` is abstract | implement it always; 0.32 never calls it |
| 0.33 | `SchedulerOutput.skip_drafts`, `.encoder_input_updates` | `known_fields` leaves them out on 0.32 |
| 0.33 | `EngineCoreOutput.error` | `known_fields` leaves it out on 0.32 |
| 0.33 | `BlockStored.lookahead_token_ids` | `known_fields` leaves it out on 0.32 |
| 0.33 | block hasher takes `num_hash_lookahead_tokens` | `host.patches.install_block_hasher` passes 0 on 0.32 |
"""

import dataclasses
from functools import cache
from typing import Any


def num_hash_lookahead_tokens(vllm_config: Any) -> int:
    """Tokens behind a block that its prefix key must name as well; vLLM has drafters ask for them since 0.33."""
    return int(getattr(vllm_config, "num_hash_lookahead_tokens", 0))


@cache
def field_names(cls: type) -> tuple[str, ...]:
    """Constructor fields of a vLLM dataclass or msgspec struct, in positional order.

    Raises:
        TypeError: `cls` is neither.
    """
    if dataclasses.is_dataclass(cls):
        return tuple(f.name for f in dataclasses.fields(cls) if f.init)
    struct_fields = getattr(cls, "__struct_fields__", None)
    if struct_fields is None:
        msg = f"{cls.__qualname__} is neither a dataclass nor a msgspec struct"
        raise TypeError(msg)
    return tuple(struct_fields)


def known_fields(cls: type, **values: Any) -> dict[str, Any]:
    """The part of `values` that the installed vLLM's `cls` has a field for."""
    names = field_names(cls)
    return {name: value for name, value in values.items() if name in names}
