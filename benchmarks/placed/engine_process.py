# SPDX-License-Identifier: Apache-2.0
"""One engine, stock or placed, measured in a process of its own: a JSON object of options in, one of figures out."""

from __future__ import annotations

import json
import os
import sys
import time
from statistics import median
from typing import Any

from benchmarks.gpu.workload import batch_of_prompts, mixed_prompts

DECODE_PROMPT_TOKENS = 64
TOKEN_CHECK_REQUESTS, TOKEN_CHECK_TOKENS = 16, 48


def main() -> None:
    """Build the engine that standard input describes and print its figures."""
    answer = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints to standard output
    options = json.loads(sys.stdin.read())
    _prepare_environment(options)
    print(json.dumps(_measure(options)), file=answer)


def _prepare_environment(options: dict[str, Any]) -> None:
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    # Multicast stays off: one H200 driver hangs in it.
    settings |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
    if options["device"] == "cpu":
        settings |= {"VLLM_TARGET_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    else:
        settings["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    os.environ.update(settings)


def _measure(options: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM

    start = time.perf_counter()
    llm = LLM(**_settings(options))
    figures: dict[str, Any] = {"startup_s": time.perf_counter() - start}
    figures["architecture"] = llm.llm_engine.model_config.architecture
    if options["timed"]:
        figures["decode_ms"] = {str(batch): _decode_ms(llm, batch, options) for batch in options["batches"]}
        figures["prefill_ms"] = _prefill_ms(llm, options)
    if options["eager"]:
        figures["tokens"] = _generate(llm, mixed_prompts(TOKEN_CHECK_REQUESTS, 200), TOKEN_CHECK_TOKENS)
        figures["collectives"] = _collectives(llm, options)
    if options["links"]:
        figures["links"] = llm.collective_rpc("time_collectives", args=(tuple(options["link_sizes_bytes"]),))[0]
    llm.llm_engine.engine_core.shutdown()
    return figures


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's ``LLM``."""
    placement = options["placement"]
    return {
        "model": options["model"],
        "load_format": "dummy",
        "dtype": "float32" if options["device"] == "cpu" else "bfloat16",
        "tensor_parallel_size": options["ranks"],
        "enable_expert_parallel": options["expert_parallel"],
        "enforce_eager": options["eager"],
        "max_num_seqs": max(*options["batches"], TOKEN_CHECK_REQUESTS),
        "max_num_batched_tokens": options["prefill_tokens"],
        "max_model_len": max(options["prefill_tokens"], 1024) + 128,
        "kv_cache_memory_bytes": options["kv_cache_bytes"],
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "worker_extension_cls": "benchmarks.placed.worker.Observed",
        "additional_config": {"tokenspeed": {"placement": placement}} if placement else {},
        "seed": 0,
    }


def _generate(llm: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], greedy, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _seconds(llm: Any, prompts: list[list[int]], num_tokens: int) -> float:
    start = time.perf_counter()
    _generate(llm, prompts, num_tokens)
    return time.perf_counter() - start


def _decode_ms(llm: Any, batch: int, options: dict[str, Any]) -> float:
    """Milliseconds of a step that decodes ``batch`` requests: what long answers take more than short ones, by step."""
    few, many = 4, 4 + options["decode_steps"]
    _generate(llm, batch_of_prompts(0, batch, DECODE_PROMPT_TOKENS), many)
    found = []
    for rep in range(options["reps"]):
        prompts = batch_of_prompts(rep + 1, batch, DECODE_PROMPT_TOKENS)
        found.append((_seconds(llm, prompts, many) - _seconds(llm, prompts, few)) / (many - few) * 1e3)
    return median(found)


def _prefill_ms(llm: Any, options: dict[str, Any]) -> float:
    """Milliseconds from a prompt of ``prefill_tokens`` tokens to its first token."""
    prompts = [batch_of_prompts(900 + rep, 1, options["prefill_tokens"]) for rep in range(options["reps"] + 1)]
    _generate(llm, prompts[0], 1)
    return median(_seconds(llm, prompt, 1) for prompt in prompts[1:]) * 1e3


def _collectives(llm: Any, options: dict[str, Any]) -> dict[str, list[tuple[str, int, int]]]:
    """Collectives of one prefill step and of one decode step on the first rank: kind, bytes of the input, calls."""
    llm.collective_rpc("start_counting_collectives")
    prompt = batch_of_prompts(990, 1, options["prefill_tokens"] - 1)
    _generate(llm, prompt, 1)
    prefill = llm.collective_rpc("take_counted_collectives")[0]
    _generate(llm, prompt, 2)
    both = {(kind, size): times for kind, size, times in llm.collective_rpc("take_counted_collectives")[0]}
    for kind, size, times in prefill:
        both[kind, size] = both.get((kind, size), 0) - times
    decode = [(kind, size, times) for (kind, size), times in sorted(both.items()) if times > 0]
    return {"prefill": prefill, "decode": decode}


if __name__ == "__main__":
    main()
