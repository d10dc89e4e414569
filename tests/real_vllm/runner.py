# SPDX-License-Identifier: Apache-2.0
"""Runs scenarios, each in a process of its own, forked from a server that has imported vLLM (about 2 s a scenario)."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from real_vllm.scenario import Outcome, Scenario

TESTS_DIR = Path(__file__).resolve().parents[1]
DEFAULT_TIMEOUT_S = 1000.0
_PRELOADED = "real_vllm.engine_process"


class ScenarioError(RuntimeError):
    """A scenario failed; the message carries the traceback and the end of what its process printed."""


def run_scenario(scenario: Scenario, timeout_s: float = DEFAULT_TIMEOUT_S) -> Outcome:
    """Run ``scenario`` in a fresh process and return what it gave.

    Raises:
        ScenarioError: the process raised, died, or took longer than ``timeout_s``.
    """
    (result,) = run_scenarios([scenario], timeout_s)
    if isinstance(result, ScenarioError):
        raise result
    return result


def run_scenarios(scenarios: Sequence[Scenario], timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Outcome | ScenarioError]:
    """Run ``scenarios`` one after another in one fresh process: a second engine there starts in half the time.

    Returns:
        What each gave; an error in place of one that raised.

    Raises:
        ScenarioError: the process died or took longer than ``timeout_s``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOADED])
    _put_tests_on_path()
    with tempfile.NamedTemporaryFile(prefix="scenario-", suffix=".log") as log:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(list(scenarios), sender, log.name))
        process.start()
        sender.close()
        try:
            result = _receive(receiver, timeout_s)
        finally:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()
        printed = (
            f"(exit code {process.exitcode})\n--- printed ---\n{Path(log.name).read_text(errors='replace')[-4000:]}"
        )
        if isinstance(result, str):
            raise ScenarioError(f"{result} {printed}")
        return [ScenarioError(f"{one} {printed}") if isinstance(one, str) else one for one in result]


def _receive(receiver: Connection, timeout_s: float) -> list[Outcome | str] | str:
    if not receiver.poll(timeout_s):
        return f"no result after {timeout_s:.0f} s"
    try:
        result: list[Outcome | str] | str = receiver.recv()
    except EOFError:
        return "the process died"
    return result


def _child(scenarios: list[Scenario], sender: Connection, log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sender.send([_run_one(scenario) for scenario in scenarios])
    sender.close()
    # vLLM registers exit handlers that wait for threads of the process this one was forked from.
    os._exit(0)


def _run_one(scenario: Scenario) -> Outcome | str:
    try:
        from real_vllm.engine_process import run

        return run(scenario)
    except BaseException:
        return traceback.format_exc()


def _put_tests_on_path() -> None:
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(TESTS_DIR) not in entries:
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, entries), str(TESTS_DIR)])
