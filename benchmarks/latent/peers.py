# SPDX-License-Identifier: Apache-2.0
"""MLA decode as stock vLLM 0.33 does it on Hopper, called the way its backends call it, planning left out."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.latent.timing import Inputs
from tokenspeed_plugin.kernels.graph_timing import time_us
from tokenspeed_plugin.kernels.mla.geometry import LATENT_DIMS
from tokenspeed_plugin.kernels.mla.solutions import SETTING

FA3_SPLITS = (0, 32, 132)


class PeerUnavailableError(RuntimeError):
    """An implementation of vLLM that this machine does not have; the message says what was tried."""


def _load(names: tuple[str, ...], folder: Path | None) -> None:
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    problems = []
    for name in names:
        try:
            importlib.import_module(name)
            return
        except ImportError as error:
            problems.append(f"{name}: {error}")
    raise PeerUnavailableError("; ".join(problems))


class FlashMla:
    """vLLM's `_flashmla_C`, dense decode."""

    name = "FlashMLA"

    def __init__(self, folder: Path | None) -> None:
        _load(("vllm._flashmla_C", "_flashmla_C"), folder)
        self._decode = torch.ops._flashmla_C.dense_decode_fwd

    def time_us(self, inputs: Inputs, replays: int = 9, settle_us: float = 0.0) -> tuple[float, torch.Tensor]:
        """Return microseconds and the output on the first part of the KV cache."""
        cell = inputs.cell
        q = inputs.q.view(cell.requests, cell.query_tokens, cell.heads, -1)
        cache = inputs.kv_cache.unsqueeze(-2)

        def launch(part: int, plan: torch.Tensor | None, splits: torch.Tensor | None) -> list[torch.Tensor]:
            table = inputs.block_tables[part]
            result: list[torch.Tensor] = self._decode(
                q, cache, LATENT_DIMS, inputs.seq_lens, table, inputs.scale, True, plan, splits, None
            )
            return result

        out, _, plan, splits = launch(0, None, None)
        return time_us(lambda call: void(launch(inputs.part(call), plan, splits)), replays, settle_us), out.flatten(
            0, 1
        )


class FlashMlaFp8:
    """vLLM's `_flashmla_extension_C`: dense decode from an e4m3 cache with e4m3 queries."""

    name = "FlashMLA, FP8"

    def __init__(self, folder: Path | None) -> None:
        _load(("vllm._flashmla_extension_C", "_flashmla_extension_C"), folder)
        self._ops = torch.ops._flashmla_extension_C

    def time_us(
        self, inputs: Inputs, scale: torch.Tensor, replays: int = 9, settle_us: float = 0.0
    ) -> tuple[float, torch.Tensor]:
        """Return microseconds and the output on the first part of the KV cache; `scale` is both operands' factor."""
        cell = inputs.cell
        q = inputs.q.view(cell.requests, cell.query_tokens, cell.heads, -1)
        cache = inputs.kv_cache.unsqueeze(-2)
        plan = self._ops.get_mla_decoding_metadata_dense_fp8(inputs.seq_lens, cell.query_tokens * cell.heads, 1)

        def launch(part: int) -> torch.Tensor:
            before = (q, cache, LATENT_DIMS, inputs.seq_lens, inputs.block_tables[part], inputs.scale, True)
            result: torch.Tensor = self._ops.fwd_kvcache_mla_fp8(*before, *plan, scale, scale)[0]
            return result

        return time_us(lambda call: void(launch(inputs.part(call))), replays, settle_us), launch(0).flatten(0, 1)


class FlashAttention3:
    """vLLM's `_vllm_fa3_C` with the latent as value and query, the best of its split settings."""

    name = "FlashAttention 3"

    def __init__(self, folder: Path | None) -> None:
        _load(("vllm.vllm_flash_attn._vllm_fa3_C", "_vllm_fa3_C"), folder)
        self._ops = torch.ops._vllm_fa3_C

    def time_us(self, inputs: Inputs, replays: int = 9, settle_us: float = 0.0) -> tuple[float, torch.Tensor]:
        """Return microseconds at the best setting, and the output on the first part of the KV cache."""
        times_us, out = self.settings_us(inputs, replays, settle_us)
        return min(times_us.values()), out

    def settings_us(self, inputs: Inputs, replays: int, settle_us: float) -> tuple[dict[str, float], torch.Tensor]:
        """Return microseconds of each split setting by name, and the output of the last one."""
        times_us = {}
        for splits in FA3_SPLITS:
            launch = self.prepared(inputs, splits)
            timed = time_us(lambda call, launch=launch: void(launch(inputs.part(call))), replays, settle_us)
            times_us[f"{self.name}{SETTING}{splits}"] = timed
            out = launch(0)
        return times_us, out

    def prepared(self, inputs: Inputs, splits: int) -> Callable[[int], torch.Tensor]:
        """Plan for a number of splits; what is returned decodes a part of the KV cache."""
        cell = inputs.cell
        plan = self._ops.get_scheduler_metadata(
            cell.requests,
            cell.query_tokens,
            cell.context_tokens,
            cell.heads,
            1,
            64,
            LATENT_DIMS,
            torch.bfloat16,
            inputs.seq_lens,
            inputs.query_starts,
            *(None,) * 4,
            inputs.page_tokens,
            0,
            True,
            -1,
            -1,
            False,
            splits,
            None,
            0,
        )
        q_nope, q_rope = inputs.q[..., :LATENT_DIMS].contiguous(), inputs.q[..., LATENT_DIMS:].contiguous()
        latent, rope = (part.unsqueeze(-2) for part in inputs.kv_cache.split((LATENT_DIMS, 64), dim=-1))

        def launch(part: int) -> torch.Tensor:
            before = (q_rope, rope, latent, None, None, q_nope, None, inputs.query_starts, None, None, None)
            lengths = (inputs.seq_lens, cell.query_tokens, cell.context_tokens, inputs.block_tables[part])
            after = (inputs.scale, True, -1, -1, 0.0, True, plan, splits, None, 0, None, 1, 0, None)
            result: torch.Tensor = self._ops.fwd(*before, *lengths, *(None,) * 8, *after)[0]
            return result

        return launch


class TritonMla:
    """vLLM's Triton kernel, for single query tokens."""

    name = "Triton (vLLM)"

    def __init__(self, folder: Path | None) -> None:
        _load(("vllm.v1.attention.ops.triton_decode_attention",), folder)
        self._module = sys.modules["vllm.v1.attention.ops.triton_decode_attention"]

    def time_us(self, inputs: Inputs, replays: int = 9, settle_us: float = 0.0) -> tuple[float, torch.Tensor]:
        """Return microseconds and the output on the first part of the KV cache."""
        cell = inputs.cell
        if cell.query_tokens != 1:
            raise PeerUnavailableError("one query token per request only")
        device = inputs.q.device
        splits = 1 << max(0, (cell.context_tokens // 512 - 1).bit_length())
        splits = min(splits, 2 * torch.cuda.get_device_properties(device).multi_processor_count)
        cache = inputs.kv_cache.unsqueeze(2)
        out = torch.empty(cell.requests, cell.heads, LATENT_DIMS, dtype=torch.bfloat16, device=device)
        lse = torch.empty(cell.requests, cell.heads, dtype=torch.bfloat16, device=device)
        logits = torch.empty(cell.requests, cell.heads, splits, LATENT_DIMS + 1, dtype=torch.float32, device=device)
        one = torch.ones((), dtype=torch.float32, device=device)

        def launch(part: int) -> None:
            self._module.decode_attention_fwd(
                inputs.q,
                cache,
                cache[..., :LATENT_DIMS],
                out,
                lse,
                inputs.block_tables[part],
                inputs.seq_lens,
                logits,
                splits,
                inputs.scale,
                inputs.page_tokens,
                k_scale=one,
                v_scale=one,
                is_mla=True,
            )

        timed = time_us(lambda call: launch(inputs.part(call)), replays, settle_us)
        launch(0)
        return timed, out


def void(_: object) -> None:
    """Drops a result, so that a launch can stand where nothing may be returned."""


Peer = FlashMla | FlashAttention3 | TritonMla
PEERS: tuple[type[Peer], ...] = (FlashMla, FlashAttention3, TritonMla)
