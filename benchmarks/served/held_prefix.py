# SPDX-License-Identifier: Apache-2.0
"""A KV connector that holds the prefix of any prompt that asks for it: the pages are filled, nothing is computed.

Prefill of a million tokens is quadratic and takes minutes; decode on them does not. A request whose `kv_transfer_params` carry
`HELD` has all whole pages of its prompt but the last token's filled with latents that depend on layer and position alone. So
engines with different pages hold the same context, and a prompt that is the beginning of another finds its pages in
the prefix cache, with the same contents.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from benchmarks.served.measurements import HELD

LATENT_DIMS = 512
PERIOD_TOKENS = 8191
"""Latents repeat after so many positions: a prime, so that no page size divides it."""
ROPE_SCALE = 2.0
"""Rotary keys are not normalised; the benchmark's weights (uniform within 0.08 from 2048 dims) make them about so large."""
_CHUNK_PAGES = 1024


@dataclass
class Fill:
    """Pages of one request to fill, from a position on that is a multiple of the page."""

    pages: list[int]
    first_position: int


@dataclass
class Fills(KVConnectorMetadata):
    """What a step fills before its forward pass."""

    fills: list[Fill] = field(default_factory=list)


class HeldPrefix(KVConnectorBase_V1):
    """Both sides of the connector: the scheduler's claims whole pages, the worker's fills them."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._page_tokens: int = vllm_config.cache_config.block_size
        self._claims: dict[str, int] = {}
        self._caches: dict[str, torch.Tensor] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens beyond the local hit that are held; they are there before the step's forward pass."""
        if not (request.kv_transfer_params or {}).get(HELD):
            return 0, False
        return max(0, self._held_tokens(request.num_prompt_tokens) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ARG002 - vLLM's signature
        """Remember what was claimed, until the step is built."""
        if num_external_tokens:
            self._claims[request.request_id] = self._held_tokens(request.num_prompt_tokens) - num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> Fills:
        """The pages that this step has to fill."""
        fills = Fills()
        for new in scheduler_output.scheduled_new_reqs:
            first = self._claims.pop(new.req_id, None)
            if first is not None:
                last = self._held_tokens(len(new.prompt_token_ids))
                pages = new.block_ids[0][first // self._page_tokens : last // self._page_tokens]
                fills.fills.append(Fill(list(pages), first))
        return fills

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keep the layers' caches: [pages, page tokens, 576], with or without a dimension of one KV head."""
        self._caches = {name: cache.squeeze(1) if cache.dim() == 4 else cache for name, cache in kv_caches.items()}

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:  # noqa: ARG002 - vLLM's signature
        """Fill the pages on the stream of the model."""
        for fill in self._get_connector_metadata().fills:
            for layer, cache in enumerate(self._caches.values()):
                fill_pages(cache, fill, held_latents(layer, cache.shape[-1], cache.dtype, cache.device))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is under way once the forward pass runs."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **_: Any) -> None:
        """Nothing is kept."""

    def wait_for_save(self) -> None:
        """Nothing is kept."""

    def _held_tokens(self, num_prompt_tokens: int) -> int:
        return (num_prompt_tokens - 1) // self._page_tokens * self._page_tokens


def held_latents(layer: int, dims: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The latents of a layer over one period: [PERIOD_TOKENS, dims], of size 1 as after a norm, rotary dims wider."""
    generator = torch.Generator(device=device).manual_seed(1000 + layer)
    values = torch.randn(PERIOD_TOKENS, dims, generator=generator, device=device)
    values[:, LATENT_DIMS:] *= ROPE_SCALE
    # vLLM keeps e4m3 values as bytes; a layer without scales of its own has a scale of 1.
    return values.to(torch.float8_e4m3fn).view(torch.uint8) if dtype == torch.uint8 else values.to(dtype)


def fill_pages(cache: torch.Tensor, fill: Fill, latents: torch.Tensor) -> None:
    """Write the latents of each position into its page."""
    page_tokens = cache.shape[1]
    for start in range(0, len(fill.pages), _CHUNK_PAGES):
        pages = torch.tensor(fill.pages[start : start + _CHUNK_PAGES], device=cache.device)
        first = fill.first_position + start * page_tokens
        positions = torch.arange(first, first + len(pages) * page_tokens, device=cache.device) % len(latents)
        cache[pages] = latents[positions].view(len(pages), page_tokens, -1)
