# SPDX-License-Identifier: Apache-2.0
"""The rate that a client asks for: our key in `vllm_xargs` (`SamplingParams.extra_args`)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import Request

KEY = "target_tps_per_user"
MOST_TPS = 10_000.0
NONE_NAMED = -1.0


def wished_tps(request: "Request") -> float:
    """Output tokens per second that the request asks for, 0 for no rate; NONE_NAMED when it leaves that to the server.

    Raises:
        ValueError: names the key, its value and what is allowed.
    """
    extra = request.sampling_params.extra_args if request.sampling_params is not None else None
    if not extra or KEY not in extra:
        return NONE_NAMED
    value = extra[KEY]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_TPS:
        msg = f"vllm_xargs[{KEY!r}] is {value!r}; allowed: a number of tokens per second from 0 (no rate) to {MOST_TPS:.0f}"
        raise ValueError(msg)
    return float(value)
