# SPDX-License-Identifier: Apache-2.0
"""Multimodal inputs for the exact worker: images whose embeddings count as tokens, and the encoder cache that holds them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from exact.memory import ExactError
from exact.reference import TOKEN_BITS

PLACEHOLDER_TOKEN = 1


@dataclass(frozen=True)
class Image:
    """One image of a prompt.

    Attributes:
        identifier: names the content.
        offset: first position of its place.
        mask: for each position of the place, whether it takes an embedding; the others keep their token.
    """

    identifier: str
    offset: int
    mask: tuple[bool, ...]

    @property
    def num_embeds(self) -> int:
        return sum(self.mask)

    @property
    def end(self) -> int:
        return self.offset + len(self.mask)

    def feature(self) -> MultiModalFeatureSpec:
        """The image as vLLM's requests carry it."""
        mask = None if all(self.mask) else torch.tensor(self.mask)
        place = PlaceholderRange(self.offset, len(self.mask), mask)
        return MultiModalFeatureSpec(
            data={"pixels": None}, modality="image", identifier=self.identifier, mm_position=place
        )


def embedding(identifier: str, index: int) -> int:
    """The embedding with this index of an image, as a token that no vocabulary has."""
    return zlib.crc32(f"{identifier}:{index}".encode()) >> (32 - TOKEN_BITS) | 1 << (TOKEN_BITS - 1)


def masks(features: Iterable[MultiModalFeatureSpec]) -> list[Image]:
    """vLLM's features as images."""
    images = []
    for feature in features:
        place = feature.mm_position
        mask = [True] * place.length if place.is_embed is None else place.is_embed.tolist()
        images.append(Image(feature.identifier, place.offset, tuple(mask)))
    return images


def spliced(tokens: Sequence[int], images: Sequence[Image], start: int = 0) -> list[int]:
    """Tokens of positions [start, ...) with embeddings in the places of images."""
    result = list(tokens)
    for image in images:
        if image.offset >= start + len(result) or image.end <= start:
            continue
        index = 0
        for position, takes in enumerate(image.mask, image.offset):
            if takes and start <= position < start + len(result):
                result[position - start] = embedding(image.identifier, index)
            index += takes
    return result


class EncoderMemory:
    """What a worker keeps of encoder outputs.

    Args:
        step_embeds: embeddings that one step may compute.
        cache_embeds: embeddings that fit.
        split_inputs: whether a chunk may end inside an image.
    """

    def __init__(self, step_embeds: int, cache_embeds: int, *, split_inputs: bool) -> None:
        self._step_embeds = step_embeds
        self._cache_embeds = cache_embeds
        self._split_inputs = split_inputs
        self.outputs: dict[str, int] = {}
        self.num_runs = 0
        self._given_up: dict[str, set[int]] = {}

    def reset(self) -> None:
        """New weights: nothing that was computed is worth anything."""
        self.outputs.clear()

    def prepare(self, plan: Any, rows: dict[str, Any]) -> list[ExactError]:
        """Drops what the plan frees, then runs the encoder; returns what was wrong."""
        faults = []
        self._take_updates(plan)
        for identifier in plan.free_encoder_mm_hashes:
            if self.outputs.pop(identifier, None) is None:
                faults.append(ExactError("encoder_free", f"{identifier} is freed and was not there"))
        num_embeds = 0
        for request_id, indexes in plan.scheduled_encoder_inputs.items():
            if request_id not in plan.num_scheduled_tokens:
                faults.append(ExactError("encoder_row", "encodes without a row", request_id=request_id))
                continue
            for index in indexes:
                image = rows[request_id].images[index]
                if index in self._given_up.get(request_id, ()):
                    faults.append(ExactError("encoder_data", f"input {index} was given up", request_id=request_id))
                self.outputs[image.identifier] = image.num_embeds
                num_embeds += image.num_embeds
                self.num_runs += 1
        if num_embeds > self._step_embeds:
            faults.append(ExactError("encoder_budget", f"{num_embeds} embeddings, at most {self._step_embeds}"))
        if sum(self.outputs.values()) > self._cache_embeds:
            faults.append(ExactError("encoder_cache", f"holds {self.outputs}, at most {self._cache_embeds}"))
        return faults

    def _take_updates(self, plan: Any) -> None:
        # A request that is sent as new comes with all its data.
        for new in plan.scheduled_new_reqs:
            self._given_up.pop(new.req_id, None)
        for request_id, updates in getattr(plan, "encoder_input_updates", {}).items():
            self._given_up.setdefault(request_id, set()).update(updates)

    def missing(self, images: Sequence[Image], start: int, end: int) -> list[ExactError]:
        """What positions [start, end) read and is not there, and images that they split though they must not."""
        faults = []
        for image in images:
            first, last = max(start, image.offset), min(end, image.end)
            if first >= last:
                continue
            reads = any(image.mask[first - image.offset : last - image.offset])
            if reads and image.identifier not in self.outputs:
                faults.append(ExactError("encoder_miss", f"{image.identifier} is not encoded", position=first))
            if not self._split_inputs and start <= image.offset < end < image.end:
                faults.append(ExactError("encoder_split", f"{image.identifier} is split", position=end))
        return faults
