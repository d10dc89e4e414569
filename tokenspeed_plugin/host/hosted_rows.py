# SPDX-License-Identifier: Apache-2.0
"""The settings of vLLM that the flat KV manager refuses under vLLM's own scheduler: one row each.

What only the scheduler decides is vLLM's business here, so this list is shorter than that of `config_rows`. `docs/compatibility.md` has
this table, and a test compares them.
"""

from typing import Any

from tokenspeed_plugin.host.config_rows import Refused, unsupported_kinds
from tokenspeed_plugin.host.connectors import has_refused_child, is_refused

WAY_OUT = "or leave out `--kv-manager flat`"
SUPPORTED_SPECS = frozenset({"FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec", "SlidingWindowMLASpec"})


def _is_set(value: Any) -> bool:
    return value is not None


def _kinds(groups: Any) -> str:
    return ", ".join(sorted(set(unsupported_kinds(groups, SUPPORTED_SPECS))))


def _row(setting: str, is_asked: Any, what: str, way_on: str, **others: Any) -> Refused:
    return Refused(setting, is_asked, what, way_on, way_out=WAY_OUT, **others)


# fmt: off
REFUSED: tuple[Refused, ...] = (
    _row("cache_config.prefix_match_unit", _is_set, "a match unit of its own", "leave out `--prefix-match-unit`"),
    _row("cache_config.prefix_cache_retention_interval", lambda v: v != 0, "a retention interval", "leave it out"),
    _row("kv_transfer_config.kv_connector", is_refused, "this KV connector", "choose another in `--kv-transfer-config`"),
    _row("kv_transfer_config.kv_connector_extra_config", has_refused_child, "one of these KV connectors", "choose others"),
    _row("attention_config.hisparse_config", _is_set, "HiSparse", "leave it out of `--attention-config`"),
    _row("model_config.is_encoder_decoder", bool, "an encoder-decoder model", "serve a decoder-only model"),
    _row("model_config.is_diffusion", bool, "a diffusion model", "serve an autoregressive model"),
    _row("model_config.is_hybrid", bool, "a model with state layers (Mamba, GDN, KDA)", "serve an attention model"),
    _row("num_prefill_lookahead_tokens", lambda v: bool(v) and v > 1, "a drafter of several MTP modules", "lower `num_speculative_tokens`"),
    _row("aux_output_config.enable_return_routed_experts", bool, "auxiliary output", "leave out `--enable-return-routed-experts`"),
)

# Known once the workers reported their layers.
KV_REFUSED: tuple[Refused, ...] = (
    _row("kv_cache_groups", lambda v: bool(_kinds(v)), "this kind of KV cache group", "serve a model with full or sliding-window attention",
         show=_kinds),
    _row("hisparse_host_num_blocks", _is_set, "HiSparse", "leave it out of `--attention-config`"),
)
# fmt: on
