# SPDX-License-Identifier: Apache-2.0
"""Serves a model with the scheduler asked for, asks it things, shows what the prefix cache and the scheduler did, and stops.

Every stage checks what it shows; anything off ends the run with an error and exit code 1.
"""

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAI
from rich.console import Console
from rich.table import Table

from demo.server import ServerError, VllmServer

MODEL_NAME = "gemma-3-270m"
SERVER_ARGUMENTS = (
    *("--served-model-name", MODEL_NAME, "--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", "4096", "--max-num-seqs", "8", "--enable-prompt-tokens-details"),
)
SERVER_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}

PROMPT = "The capital of France is"
QUESTION = "Which language is spoken in Brazil?"
BATCH = ("Water boils at", "The opposite of hot is", "Once upon a time, there was", "Two plus two is")
STATISTICS = {
    "vllm:num_requests_running": "running requests",
    "vllm:num_requests_waiting": "waiting requests",
    "vllm:kv_cache_usage_perc": "KV cache in use (0 to 1)",
    "vllm:prefix_cache_queries_total": "prompt tokens looked up",
    "vllm:prefix_cache_hits_total": "prompt tokens found",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prompt_tokens_total": "prompt tokens",
    "vllm:generation_tokens_total": "generated tokens",
    "vllm:request_success_total": "finished requests",
}
LETTERS_OF_ENGLISH = 0.9
NUM_FACTS = 160
NUM_REPEATS = 3


class DemoError(RuntimeError):
    """Something that the demonstration shows is not as it should be."""


@dataclass(frozen=True)
class TimedAnswer:
    """A streamed completion: its text, when its first token came, and how much of its prompt was cached."""

    text: str
    first_token_s: float
    num_prompt_tokens: int
    num_cached_tokens: int


def require(condition: bool, complaint: str) -> None:
    """Raise `DemoError` with ``complaint`` unless ``condition`` holds."""
    if not condition:
        raise DemoError(complaint)


def is_plain_text(text: str, min_words: int) -> bool:
    """Whether ``text`` is at least so many words in Latin letters, as English is and the output of a broken model is not."""
    marks = [character for character in text if not character.isspace()]
    plain = sum(character.isascii() and (character.isalnum() or character in ".,;:'\"!?()-") for character in marks)
    return len(text.split()) >= min_words and plain >= LETTERS_OF_ENGLISH * len(marks)


def stream(client: OpenAI, prompt: str, max_tokens: int, console: Console | None = None) -> TimedAnswer:
    """Stream a greedy completion, printing it as it comes when there is a console."""
    started, first_token_s, pieces, usage = time.perf_counter(), None, [], None
    chunks = client.completions.create(
        model=MODEL_NAME,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            first_token_s = first_token_s or time.perf_counter() - started
            pieces.append(choice.text)
            if console:
                console.print(choice.text, end="", style="bold")
    require(first_token_s is not None and usage is not None, f"no token came for {prompt[:40]!r}")
    assert first_token_s is not None
    assert usage is not None
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens if details else None) or 0
    return TimedAnswer("".join(pieces), first_token_s, usage.prompt_tokens, cached)


def show_scheduler(server: VllmServer, scheduler: str, console: Console) -> None:
    """Say which scheduler class the engine core reports; vLLM reports none when it uses its own."""
    found = re.search(r"custom scheduler class ([\w.]+\w)", server.log_path.read_text(errors="replace"))
    name = found.group(1) if found else "vLLM's own"
    console.print(f"scheduler: {name}")
    require(name.startswith("tokenspeed_plugin.") == (scheduler == "tokenspeed"), f"asked for {scheduler}, got {name}")


def show_completion(client: OpenAI, console: Console) -> None:
    """Stream the continuation of a sentence."""
    console.print(f"\n[cyan]completion, streamed[/]  {PROMPT}", end="")
    answer = stream(client, PROMPT, 40, console)
    console.print()
    require(is_plain_text(answer.text, 8), f"the continuation is not English: {answer.text!r}")


def show_chat(client: OpenAI, console: Console) -> None:
    """Ask one question through the chat endpoint."""
    console.print(f"\n[cyan]chat[/]  {QUESTION}")
    answer = client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=40,
        temperature=0.0,
        stop=["\n"],
    )
    text = answer.choices[0].message.content or ""
    console.print(f"[bold]{text.strip()}[/]")
    require(is_plain_text(text, 1), f"the chat answer is not English: {text!r}")


def show_batch(client: OpenAI, console: Console) -> None:
    """Send several prompts in one request; the engine runs them side by side."""
    console.print(f"\n[cyan]batch of {len(BATCH)}[/]")
    answer = client.completions.create(model=MODEL_NAME, prompt=list(BATCH), max_tokens=16, temperature=0.0)
    require(len(answer.choices) == len(BATCH), f"{len(answer.choices)} answers to {len(BATCH)} prompts")
    for choice in sorted(answer.choices, key=lambda choice: choice.index):
        console.print(f"  {BATCH[choice.index]}[bold]{' '.join(choice.text.splitlines())}[/]")
        require(bool(choice.text.strip()), f"no answer to {BATCH[choice.index]!r}")


def show_cache(client: OpenAI, server: VllmServer, console: Console) -> None:
    """Send a long prompt again and again: it is found in the cache and its first token comes sooner."""
    facts = (f"In the year {1000 + year} the village counted {year * 7} sheep." for year in range(NUM_FACTS))
    prompt = " ".join(facts) + " The village"
    hits_before = server.metrics()["vllm:prefix_cache_hits_total"]
    answers = [stream(client, prompt, 4) for _ in range(NUM_REPEATS)]
    hits = server.metrics()["vllm:prefix_cache_hits_total"] - hits_before
    first, repeats = answers[0], answers[1:]
    table = Table(title=f"one prompt of {first.num_prompt_tokens} tokens, sent {NUM_REPEATS} times")
    for heading in ("time", "cached tokens", "time to first token"):
        table.add_column(heading, justify="right")
    for number, answer in enumerate(answers, 1):
        table.add_row(str(number), str(answer.num_cached_tokens), f"{answer.first_token_s * 1000:.0f} ms")
    console.print()
    console.print(table)
    cached = sum(answer.num_cached_tokens for answer in answers)
    require(all(answer.num_cached_tokens > 0 for answer in repeats), "the usage of a repeat reports no cached token")
    require(hits == cached, f"/metrics counts {hits:.0f} hits, the usages {cached}")
    require(all(answer.text == first.text for answer in repeats), f"the answers differ: {answers}")
    # The best of the repeats: a busy machine may hold up any single one.
    best_s = min(answer.first_token_s for answer in repeats)
    require(best_s < first.first_token_s, "no repeat got its first token sooner than the first request")


def show_statistics(server: VllmServer, console: Console) -> None:
    """Print what the scheduler reports through ``/metrics``, and check that it is at rest."""
    metrics = server.metrics()
    table = Table(title="scheduler, from /metrics")
    table.add_column("statistic")
    table.add_column("value", justify="right")
    for name, meaning in STATISTICS.items():
        require(name in metrics, f"/metrics lacks {name}")
        table.add_row(meaning, f"{metrics[name]:g}")
    for name in sorted(name for name in metrics if name.startswith("tokenspeed")):
        table.add_row(name, f"{metrics[name]:g}")
    console.print()
    console.print(table)
    require(metrics["vllm:num_requests_running"] == 0, "requests are still running")
    require(metrics["vllm:kv_cache_usage_perc"] == 0, "blocks are still in use")


def run(model: Path, scheduler: str, console: Console) -> None:
    """Serve ``model`` and go through all stages."""
    arguments = (*SERVER_ARGUMENTS, "--scheduler", scheduler)
    with tempfile.TemporaryDirectory(prefix="tokenspeed-demo-") as folder:
        console.print(f"vllm serve {model} {' '.join(arguments)}")
        started = time.monotonic()
        with VllmServer(model, arguments, Path(folder) / "serve.log", SERVER_ENVIRONMENT) as server:
            console.print(f"ready at {server.url} after {time.monotonic() - started:.0f} s")
            show_scheduler(server, scheduler, console)
            client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300.0, max_retries=0)
            show_completion(client, console)
            show_chat(client, console)
            show_batch(client, console)
            show_cache(client, server, console)
            show_statistics(server, console)
        console.print("\nserver stopped, no process left")


def main(arguments: Iterable[str] | None = None) -> int:
    """Run from the command line; the exit code says whether everything was as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--scheduler", default="tokenspeed", help="value of vLLM's --scheduler (default: %(default)s)")
    options = parser.parse_args(None if arguments is None else list(arguments))
    console = Console(highlight=False, soft_wrap=True)
    try:
        run(options.model, options.scheduler, console)
    except (DemoError, ServerError) as error:
        console.print(f"\n[red]demo failed:[/] {error}", markup=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
