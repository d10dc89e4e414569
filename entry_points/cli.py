# SPDX-License-Identifier: Apache-2.0
"""The flags that registration adds to vLLM's command line."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from tokenspeed_plugin import availability, flag_carrier
from tokenspeed_plugin.host.log import logger
from tokenspeed_plugin.host.schedulers import STOCK, scheduler_path
from tokenspeed_plugin.settings import KEYS, Settings, SettingsError, Source, allowed, parse_value

GROUP = "TokenSpeed"


def add_flags(parser: argparse.ArgumentParser, reason_off: str | None = None) -> None:
    """Add one flag for each setting; a flag that somebody else registered first is left to its owner, with a note.

    Args:
        parser: vLLM's.
        reason_off: why the plugin is off on this vLLM; every flag then fails with it.
    """
    group = parser.add_argument_group(GROUP, "Components of tokenspeed-plugin; nothing is on until asked for.")
    for key in KEYS:
        flag = Source.FLAG.spelling(key)
        if flag in parser._option_string_actions:
            logger(__name__).warning(
                "%s is already taken by vLLM or another plugin and stays with it; set %s instead.",
                flag,
                Source.ENVIRONMENT.spelling(key),
            )
            continue
        group.add_argument(
            flag,
            action=_SchedulerAction if key == "scheduler" else _SettingAction,
            dest="scheduler_cls" if key == "scheduler" else f"tokenspeed_{key}",
            type=_parser_of(key, reason_off),
            default=argparse.SUPPRESS,
            metavar=_metavar(key),
            help=_help(key),
        )


class _SettingAction(argparse.Action):
    """Records the flag, so that every process of the engine sees it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        self._store(namespace, values)

    def _store(self, namespace: argparse.Namespace, value: Any) -> None:
        flag_carrier.record(self.dest.removeprefix("tokenspeed_"), value)
        setattr(namespace, self.dest, value)


class _SchedulerAction(_SettingAction):
    """Records the flag and sets vLLM's own `scheduler_cls`, by which the choice travels to the engine core."""

    def _store(self, namespace: argparse.Namespace, value: Any) -> None:
        name, path, given = str(value), scheduler_path(str(value)), getattr(namespace, self.dest, None)
        if given not in (None, name, path):
            raise argparse.ArgumentError(self, f"{name!r} and --scheduler-cls {given!r} differ; allowed: one of them")
        flag_carrier.record("scheduler", name)
        setattr(namespace, self.dest, path)


def _parser_of(key: str, reason_off: str | None) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = parse_value(key, text, Source.FLAG)
            if key == "scheduler":
                scheduler_path(value)
        except SettingsError as error:
            raise argparse.ArgumentTypeError(_without_flag(str(error), key)) from error
        if reason_off and value != Settings.model_fields[key].default:
            msg = f"{text!r} cannot be honoured: {reason_off}"
            raise argparse.ArgumentTypeError(msg)
        if refusal := availability.refusal(key, value, Source.FLAG):
            raise argparse.ArgumentTypeError(_without_flag(refusal, key))
        return value

    return parse


def _without_flag(message: str, key: str) -> str:
    """The message without the flag's name, which argparse puts in front by itself."""
    return message.removeprefix(f"{Source.FLAG.spelling(key)}: ")


def _metavar(key: str) -> str:
    shown = allowed(key)
    return shown.split(",", 1)[0] if not shown.startswith("{") else shown.split("}", 1)[0] + "}"


def _help(key: str) -> str:
    field = Settings.model_fields[key]
    available = availability.available(key)
    limit = "" if available == "all" else f" In this version only: {available}."
    default = STOCK if key == "scheduler" else field.default
    return f"{field.description} Allowed: {allowed(key)}.{limit} (default: {default})".replace("%", "%%")
