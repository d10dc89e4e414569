# SPDX-License-Identifier: Apache-2.0
"""Prompts given as embeddings: what their prefix keys must name, since such tokens have no ids."""

import hashlib
from typing import TYPE_CHECKING

from tokenspeed_plugin.host.names import tensor_data

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import Request

Span = tuple[int, int, str]


def embedding_spans(request: "Request", key_tokens: int) -> list[Span]:
    """One span of content for each key of a prompt of embeddings; none for a prompt of token ids.

    Cut at the keys, so that prompts which begin alike share their first blocks.

    Args:
        request: vLLM's request; its `prompt_embeds` has the shape (tokens, hidden).
        key_tokens: tokens per prefix key; 0 when prefix caching is off.

    Returns:
        (begin, end, SHA-256 of the bytes between, in hex), begin and end in tokens.
    """
    embeddings = request.prompt_embeds
    if embeddings is None or key_tokens == 0:
        return []
    num_tokens = int(embeddings.shape[0])
    spans = []
    for begin in range(0, num_tokens, key_tokens):
        end = min(begin + key_tokens, num_tokens)
        spans.append((begin, end, hashlib.sha256(tensor_data(embeddings[begin:end])).hexdigest()))
    return spans
