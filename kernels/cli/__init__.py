# SPDX-License-Identifier: Apache-2.0
"""`tokenspeed-plugin kernels`: what there is, what would be chosen and why, and where the measurements come from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tokenspeed_plugin.kernels.autotune import (
    SHIPPED,
    TuningFileError,
    TuningStore,
    TuningTable,
    load_tables,
    user_store,
)
from tokenspeed_plugin.kernels.cli.benchmark_table import NoBenchmarkError, gpu_and_table
from tokenspeed_plugin.kernels.device import device_key, this_platform
from tokenspeed_plugin.kernels.engine.start import KernelsRefusedError, named_solution, share_of
from tokenspeed_plugin.kernels.mla.append_solutions import APPEND_MODE, append_shape, append_signature
from tokenspeed_plugin.kernels.mla.cached_prefill.solutions import MODE as CACHED_PREFILL
from tokenspeed_plugin.kernels.mla.geometry import LATENT_DIMS, ROPE_DIMS
from tokenspeed_plugin.kernels.mla.share import QUERY_TOKENS
from tokenspeed_plugin.kernels.mla.sm100.decode import unavailable_reason
from tokenspeed_plugin.kernels.mla.sm100.layout import SHARED_LIMIT_BYTES, TENSOR_COLUMNS
from tokenspeed_plugin.kernels.mla.solutions import BF16, FP8, decode_shape
from tokenspeed_plugin.kernels.registry import Objective, Platform, default_registry, signature_text
from tokenspeed_plugin.kernels.select import KernelRequest, KernelSelectionError, select_kernel

app = typer.Typer(
    help="Kernels of all families: list. MLA kernels: explain, serving, tune, bench, compile.", no_args_is_help=True
)

Heads = Annotated[int, typer.Option(min=1, help="Query heads on one GPU.")]
Queries = Annotated[int, typer.Option(min=1, help="Query tokens of a request, drafts included.")]
Requests = Annotated[int, typer.Option(min=1, help="Requests in the batch.")]
Context = Annotated[int, typer.Option(min=1, help="Cached tokens of a request.")]
Page = Annotated[int, typer.Option(min=1, help="Tokens of a page.")]
Fp8 = Annotated[bool, typer.Option("--fp8", help="Cache and queries in FP8 instead of bf16.")]


@app.command("list")
def list_kernels() -> None:
    """Show every registered kernel."""
    table = Table("kernel", "tier", "platforms", "formats", "shape", "unavailable because")
    for spec in default_registry():
        table.add_row(
            spec.name,
            spec.priority.name.lower(),
            "; ".join(map(str, spec.capabilities)),
            "; ".join(map(signature_text, spec.signatures)),
            "; ".join(f"{trait.name}: {trait}" for trait in spec.traits) or "any",
            spec.unavailable() or "",
        )
    _console().print(table)


@app.command()
def explain(
    heads: Heads = 16,
    queries: Queries = 1,
    requests: Requests = 1,
    context: Context = 65536,
    page: Page = 64,
    objective: Annotated[Objective, typer.Option(help="What matters most.")] = Objective.LATENCY,
    platform: Annotated[str | None, typer.Option(help="cpu, cuda:9.0 or rocm:9.5; default: this machine.")] = None,
    gpu: Annotated[str, typer.Option(help="Product name of the GPU whose measurements count.")] = "",
    kernels: Annotated[
        str, typer.Option(help="Override as --kernels takes it: auto, mla=NAME, or append=NAME with --append.")
    ] = "auto",
    prefill: Annotated[bool, typer.Option("--prefill", help="Prefill on cached tokens instead of decode.")] = False,
    append: Annotated[bool, typer.Option("--append", help="Append to the latent cache instead of decode.")] = False,
    fp8: Fp8 = False,
) -> None:
    """Show which MLA kernel would run, and why no other (decode, prefill or append; linear layers are not explained)."""
    device = _platform(platform, gpu)
    if append and prefill:
        raise _failure("--append and --prefill, allowed: one of them")
    request = KernelRequest(
        "mla",
        APPEND_MODE if append else CACHED_PREFILL if prefill else "decode",
        append_signature("bfloat16", "float8_e4m3fn" if fp8 else "bfloat16") if append else FP8 if fp8 else BF16,
        append_shape(LATENT_DIMS, ROPE_DIMS) if append else decode_shape(heads, queries, page, requests, context),
        device,
        objective,
    )
    try:
        selection = select_kernel(request, setting=kernels, tuning=_tuning(device))
    except (KernelSelectionError, TuningFileError, ValueError) as error:
        raise _failure(error) from error
    table = Table("kernel", "result", "reason", title=str(request), title_justify="left")
    table.add_row(selection.spec.solution, "chosen", selection.reason)
    for rejection in selection.rejections:
        table.add_row(rejection.solution, "rejected", rejection.reason)
    _console().print(table)
    if selection.spec.host_backend is not None:
        _console().print(
            f"vLLM's own {'layer' if append else 'backend'} {selection.spec.host_backend} stays in charge."
        )


@app.command()
def serving(
    heads: Heads = 16,
    context: Annotated[int, typer.Option(min=1, help="Longest context that the engine allows.")] = 131072,
    gpu: Annotated[str, typer.Option(help="Product name of the GPU whose measurements count.")] = "NVIDIA H200",
    kernels: Annotated[str, typer.Option(help="As --kernels takes it: auto, or mla=NAME.")] = "auto",
    fp8: Fp8 = False,
) -> None:
    """Show which MLA decode batches a kernel of ours takes under vllm serve --kernels on Hopper, and why."""
    try:
        named = named_solution(kernels, "--kernels")
        if named is not None and named.host_backend is not None:
            _console().print(f"vLLM's own backend {named.host_backend} decodes every batch.")
            return
        share = share_of(named, Platform("cuda", (9, 0), gpu), heads, context, "fp8" if fp8 else "auto")
    except (KernelsRefusedError, ValueError) as error:
        raise _failure(error) from error
    title = f"MLA decode, {heads} heads, {'e4m3, ' * fp8}{gpu}"
    table = Table("query tokens", "requests", "decoded by", "reason", title=title)
    for query_tokens in QUERY_TOKENS:
        for requests in (1, 4, 16, 64, 256):
            verdict = share.verdict(query_tokens, requests)
            backend = share.solution if verdict.taken else "vLLM"
            table.add_row(str(query_tokens), str(requests), backend, verdict.reason)
    _console().print(table)


@app.command()
def tune(
    benchmark: Annotated[
        list[Path],
        typer.Option(help="JSON that benchmarks.mla wrote on this kind of GPU; several make medians.", exists=True),
    ],
    output: Annotated[Path | None, typer.Option(help="Tuning file; default: the user's.")] = None,
    any_version: Annotated[bool, typer.Option(help="Key by the GPU's name alone, as the shipped table is.")] = False,
) -> None:
    """Take measurements of ours and of vLLM's kernels, side by side in a run, into the tuning file."""
    try:
        gpu, table = gpu_and_table(benchmark)
        store = TuningStore(output) if output is not None else user_store()
        store.merge(gpu if any_version else device_key(gpu, default_registry()), table)
    except (NoBenchmarkError, TuningFileError) as error:
        raise _failure(error) from error
    _console().print(f"{len(table.buckets)} shape buckets of {gpu} written to {store.path}")


@app.command()
def bench(
    heads: Heads = 16,
    queries: Queries = 1,
    requests: Requests = 1,
    context: Context = 65536,
    page: Page = 64,
) -> None:
    """Time our MLA decode kernels on this machine's GPU."""
    from tokenspeed_plugin.kernels.mla.measure import NoHopperError, measure_decode

    try:
        times_us = measure_decode(decode_shape(heads, queries, page, requests, context))
    except NoHopperError as error:
        raise _failure(error) from error
    table = Table("kernel", "microseconds")
    for solution, microseconds in sorted(times_us.items(), key=lambda item: item[1]):
        table.add_row(solution, f"{microseconds:.1f}")
    _console().print(table)


@app.command("compile")
def compile_kernels(
    heads: Heads = 16,
    queries: Queries = 1,
    page: Page = 64,
    fp8: Fp8 = False,
    arch: Annotated[str, typer.Option(help="sm_100a or sm_103a.")] = "sm_100a",
) -> None:
    """Compile our Blackwell MLA kernels, with or without a GPU, and show what they use."""
    if (reason := unavailable_reason()) is not None:
        raise _failure(reason)
    from tokenspeed_plugin.kernels.mla.sm100.report import compiled_kernels, compiled_prefill, variant_of

    variant = variant_of(heads, queries, page, "float8_e4m3fn" if fp8 else "bfloat16")
    layout = variant.layout
    table = Table("kernel", "registers", "spilled bytes", "stack bytes", "cubin bytes")
    for kernel in (*compiled_kernels(variant, arch), compiled_prefill(arch)):
        numbers = (kernel.registers, kernel.spill_bytes, kernel.stack_bytes, len(kernel.cubin))
        table.add_row(kernel.name, *map(str, numbers))
    _console().print(table)
    _console().print(
        f"decode: {layout.rows} rows, {layout.latent_slots} latent and {layout.rope_slots} rope slots, "
        f"{layout.shared_bytes} of {SHARED_LIMIT_BYTES} bytes of shared memory, "
        f"{layout.used_columns} of {TENSOR_COLUMNS} tensor-memory columns used, {layout.tensor_columns} allocated"
    )


def _tuning(platform: Platform) -> TuningTable:
    return load_tables(device_key(platform.name, default_registry()), SHIPPED)


def _platform(text: str | None, gpu: str) -> Platform:
    if text is None:
        here = this_platform()
        return Platform(here.kind, here.arch, gpu or here.name)
    kind, _, arch = text.partition(":")
    try:
        major, _, minor = (arch or "0.0").partition(".")
        if kind not in {"cpu", "cuda", "rocm"}:
            raise ValueError(kind)
        return Platform(kind, (int(major), int(minor)), gpu)
    except ValueError:
        raise _failure(f"--platform {text!r}, allowed: cpu, cuda:MAJOR.MINOR, rocm:MAJOR.MINOR") from None


def _failure(error: object) -> typer.Exit:
    Console(stderr=True).print(str(error), style="red", highlight=False, soft_wrap=True)
    return typer.Exit(2)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=180)
