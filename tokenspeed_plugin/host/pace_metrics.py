# SPDX-License-Identifier: Apache-2.0
"""Figures about rates per user on their way from the engine core to `/metrics`; they travel as those of the KV cache do."""

PREFIX = "tokenspeed_pace:"

# Classes of steps, in the core's order: rows of decodes, and prompt tokens.
DECODES = ("0", "1-8", "9-32", "33-128", "129+")
PROMPT_TOKENS = ("0", "1-512", "513-2048", "2049+")
# What is summed up for each class; times in microseconds.
OF_A_CLASS = ("steps", "predicted_us", "measured_us", "error_us")
# Counters, and gauges, by the core's name.
COUNTS = ("limited_steps", "held_admissions", "shed_requests", "refused_requests", "degraded_admissions")
CHUNK_TOKENS = "chunk_tokens"
USERS_BELOW = "users_below_target"


def class_entry(decodes: str, prompt_tokens: str, what: str) -> str:
    """The name of a sum over steps of one class."""
    return f"{decodes}:{prompt_tokens}:{what}"
