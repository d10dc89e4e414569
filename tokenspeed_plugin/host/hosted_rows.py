# SPDX-License-Identifier: Apache-2.0
"""The settings of vLLM that the flat KV manager refuses under vLLM's own scheduler: one row each.

What only the scheduler decides is vLLM's business here, so this list is shorter than that of `config_rows`. `docs/compatibility.md` has
this table, and a test compares them.
"""

from dataclasses import replace
from typing import Any

from tokenspeed_plugin.host import config_rows
from tokenspeed_plugin.host.config_rows import Refused, is_set, unsupported_kinds

WAY_OUT = "or leave out `--kv-manager flat`"
SUPPORTED_SPECS = frozenset({"FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec", "SlidingWindowMLASpec"})


def _kinds(groups: Any) -> str:
    return ", ".join(sorted(set(unsupported_kinds(groups, SUPPORTED_SPECS))))


def _shared(setting: str) -> Refused:
    """The row of the tokenspeed scheduler, which cannot do it either."""
    (row,) = (row for row in config_rows.REFUSED if row.setting == setting)
    return replace(row, way_out=WAY_OUT)


# fmt: off
REFUSED: tuple[Refused, ...] = (
    _shared("cache_config.prefix_match_unit"),
    _shared("cache_config.prefix_cache_retention_interval"),
    _shared("kv_transfer_config.kv_connector"),
    _shared("kv_transfer_config.kv_connector_extra_config"),
    _shared("attention_config.hisparse_config"),
    _shared("model_config.is_encoder_decoder"),
    _shared("model_config.is_diffusion"),
    Refused("model_config.is_hybrid", bool, "a model with state layers (Mamba, GDN, KDA)", "serve an attention model", WAY_OUT),
    _shared("num_prefill_lookahead_tokens"),
    _shared("aux_output_config.enable_return_routed_experts"),
)

# Known once the workers reported their layers.
KV_REFUSED: tuple[Refused, ...] = (
    Refused("kv_cache_groups", lambda v: bool(_kinds(v)), "this kind of KV cache group", "serve a model with full or sliding-window attention",
            WAY_OUT, _kinds),
    Refused("hisparse_host_num_blocks", is_set, "HiSparse", "leave it out of `--attention-config`", WAY_OUT),
)
# fmt: on
