# SPDX-License-Identifier: Apache-2.0
"""What a client says about its session: vLLM's `session_id`, and our keys in `vllm_xargs` (`SamplingParams.extra_args`)."""

from typing import TYPE_CHECKING

from tokenspeed_plugin.scheduler_fsm import _core

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import Request

SESSION_ENDS = "kv_session_ends"
RETURN_IN_S = "kv_return_in_s"
PIN_S = "kv_pin_s"
MOST_RETURN_S = 86_400.0
MOST_PIN_S = 3_600.0


class SessionNames:
    """What clients call their sessions, for pictures; the latest only.

    Attributes:
        names: by the number that stands for it in the core.
    """

    def __init__(self, most: int = 4096) -> None:
        self.names: dict[int, str] = {}
        self._most = most

    def note(self, number: int, name: str) -> None:
        """A request of that session arrived."""
        self.names.pop(number, None)
        self.names[number] = name
        if len(self.names) > self._most:
            del self.names[next(iter(self.names))]


def session_hints(request: "Request") -> _core.SessionHints:
    """The hints of a request; empty when its client gave none.

    Raises:
        ValueError: names the key, its value and what is allowed.
    """
    session = request.session_id or ""
    extra = request.sampling_params.extra_args if request.sampling_params is not None else None
    if not extra:
        return _core.SessionHints(session=session)
    return _core.SessionHints(
        session=session,
        ends=_flag(extra.get(SESSION_ENDS, 0)),
        return_in_s=_seconds(RETURN_IN_S, extra[RETURN_IN_S], MOST_RETURN_S) if RETURN_IN_S in extra else -1.0,
        pin_s=_seconds(PIN_S, extra.get(PIN_S, 0), MOST_PIN_S),
    )


def _flag(value: object) -> bool:
    if value not in (0, 1) or not isinstance(value, int):
        msg = f"vllm_xargs[{SESSION_ENDS!r}] is {value!r}; allowed: 0 or 1"
        raise ValueError(msg)
    return bool(value)


def _seconds(key: str, value: object, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        msg = f"vllm_xargs[{key!r}] is {value!r}; allowed: a number of seconds from 0 to {most:.0f}"
        raise ValueError(msg)
    return float(value)
