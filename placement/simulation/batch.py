# SPDX-License-Identifier: Apache-2.0
"""The tokens of one simulated step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    """``num_sequences`` prompts of ``length_tokens`` each, one after the other; the last token of each gets logits."""

    num_sequences: int
    length_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return self.num_sequences * self.length_tokens
