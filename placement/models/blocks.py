# SPDX-License-Identifier: Apache-2.0
"""Declarations of the modules that decoder models are made of. Placements only: the compiler adds all communication."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tokenspeed_plugin.placement.algebra import PARTIAL, REPLICATE, TOKENS, Placement, Shard
from tokenspeed_plugin.placement.module_spec import Freedom, ModuleKind, ModuleSpec, Param, Port

if TYPE_CHECKING:
    from collections.abc import Mapping

HIDDEN: Final = ("tokens", "hidden")
SEQUENCES: Final[Mapping[str, Placement]] = {"dp": TOKENS}
HEADS_IN: Final[Mapping[str, Placement]] = {"attn_tp": REPLICATE, **SEQUENCES}
HEADS_OUT: Final[Mapping[str, Placement]] = {"attn_tp": PARTIAL, **SEQUENCES}


def embedding(name: str = "embed_tokens") -> ModuleSpec:
    """Vocabulary-parallel embedding over the attention group."""
    weight = Param("weight", ("vocab", "hidden"), {"attn_tp": Shard(0)})
    return ModuleSpec(name, ModuleKind.EMBEDDING, (Port(("tokens",), HEADS_IN),), Port(HIDDEN, HEADS_OUT), (weight,))


def norm(name: str, *, unit_offset: bool = False) -> ModuleSpec:
    """RMS norm of every token; ``unit_offset`` scales by ``1 + weight`` (Gemma)."""
    options = {"unit_offset": unit_offset}
    weight = Param("weight", ("hidden",))
    return ModuleSpec(name, ModuleKind.NORM, (Port(HIDDEN),), Port(HIDDEN), (weight,), Freedom.TOKENS, options)


def add(name: str) -> ModuleSpec:
    """Sum of two values of the same shape."""
    return ModuleSpec(name, ModuleKind.ADD, (Port(HIDDEN), Port(HIDDEN)), Port(HIDDEN), (), Freedom.LINEAR)


def scale(name: str, factor: float) -> ModuleSpec:
    """Multiplication by a constant."""
    return ModuleSpec(name, ModuleKind.SCALE, (Port(HIDDEN),), Port(HIDDEN), (), Freedom.LINEAR, {"factor": factor})


def attention(
    name: str,
    group: int,
    *,
    bias: bool = False,
    output_bias: bool = False,
    sinks: bool = False,
    head_norms: bool = False,
    window: int | None = None,
    wire_bytes: float | None = None,
) -> ModuleSpec:
    """Grouped-query attention with its projections; heads over ``attn_tp``, sequences over ``dp``.

    ``group`` is the number of query heads per key-value head.
    """
    by_head: Mapping[str, Placement] = {"attn_tp": Shard(0)}
    shared = {"kv_heads": ("heads", group)}
    params = [
        Param("q_proj.weight", ("heads", "head_dim", "hidden"), by_head),
        Param("k_proj.weight", ("kv_heads", "head_dim", "hidden"), by_head, shared),
        Param("v_proj.weight", ("kv_heads", "head_dim", "hidden"), by_head, shared),
        Param("o_proj.weight", ("hidden", "heads", "head_dim"), {"attn_tp": Shard(1)}),
    ]
    if bias:
        params.append(Param("q_proj.bias", ("heads", "head_dim"), by_head))
        params += [Param(f"{p}_proj.bias", ("kv_heads", "head_dim"), by_head, shared) for p in "kv"]
    if output_bias:
        params.append(Param("o_proj.bias", ("hidden",), {"attn_tp": PARTIAL}, additive=True))
    if sinks:
        params.append(Param("sinks", ("heads",), by_head))
    if head_norms:
        params += [Param(f"{p}_norm.weight", ("head_dim",)) for p in "qk"]
    options = {"group": group, "window": window}
    entry = Port(HIDDEN, HEADS_IN, wire_bytes)
    return ModuleSpec(name, ModuleKind.ATTENTION, (entry,), Port(HIDDEN, HEADS_OUT), tuple(params), options=options)


def latent_attention(name: str, *, query_rank: bool, wire_bytes: float | None = None) -> ModuleSpec:
    """Multi-head latent attention: the down-projections are small and replicated, the heads are sharded."""
    by_head: Mapping[str, Placement] = {"attn_tp": Shard(0)}
    query_input = "q_lora" if query_rank else "hidden"
    params = [
        Param("q_b_proj.weight" if query_rank else "q_proj.weight", ("heads", "qk_dim", query_input), by_head),
        Param("kv_a_proj.weight", ("latent", "hidden")),
        Param("kv_a_layernorm.weight", ("kv_lora",)),
        Param("kv_b_proj.weight", ("heads", "kv_dim", "kv_lora"), by_head),
        Param("o_proj.weight", ("hidden", "heads", "v_dim"), {"attn_tp": Shard(1)}),
    ]
    if query_rank:
        params += [Param("q_a_proj.weight", ("q_lora", "hidden")), Param("q_a_layernorm.weight", ("q_lora",))]
    entry = Port(HIDDEN, HEADS_IN, wire_bytes)
    return ModuleSpec(name, ModuleKind.MLA, (entry,), Port(HIDDEN, HEADS_OUT), tuple(params))


def mlp(
    name: str,
    ffn: str = "ffn",
    *,
    activation: str = "silu",
    bias: bool = False,
    output_gate: bool = False,
    wire_bytes: float | None = None,
) -> ModuleSpec:
    """Gated MLP over ``dense_tp``; ``output_gate`` multiplies by a sigmoid of each token (Qwen's shared expert)."""
    rows: Mapping[str, Placement] = {"dense_tp": Shard(0)}
    params = [
        Param("gate_proj.weight", (ffn, "hidden"), rows),
        Param("up_proj.weight", (ffn, "hidden"), rows),
        Param("down_proj.weight", ("hidden", ffn), {"dense_tp": Shard(1)}),
    ]
    if bias:
        params += [Param("gate_proj.bias", (ffn,), rows), Param("up_proj.bias", (ffn,), rows)]
        params.append(Param("down_proj.bias", ("hidden",), {"dense_tp": PARTIAL}, additive=True))
    if output_gate:
        params.append(Param("output_gate.weight", ("hidden",)))
    entry = Port(HIDDEN, {"dense_tp": REPLICATE}, wire_bytes)
    leave = Port(HIDDEN, {"dense_tp": PARTIAL})
    return ModuleSpec(name, ModuleKind.MLP, (entry,), leave, tuple(params), Freedom.TOKENS, {"activation": activation})


def experts(
    name: str,
    num_experts: int,
    top_k: int,
    *,
    bias: bool = False,
    scoring: str = "softmax",
    renormalise: bool = True,
    activation: str = "silu",
    factor: float = 1.0,
    correction: bool = False,
    num_groups: int = 1,
    top_groups: int = 1,
) -> ModuleSpec:
    """Router and routed experts: experts over ``ep``, each expert's inner dimension over ``moe_tp``."""
    both: Mapping[str, Placement] = {"ep": Shard(0), "moe_tp": Shard(1)}
    params = [
        Param("router.weight", ("all_experts", "hidden")),
        Param("gate_proj.weight", ("experts", "expert_ffn", "hidden"), both),
        Param("up_proj.weight", ("experts", "expert_ffn", "hidden"), both),
        Param("down_proj.weight", ("experts", "hidden", "expert_ffn"), {"ep": Shard(0), "moe_tp": Shard(2)}),
    ]
    if bias:
        params += [
            Param("router.bias", ("all_experts",)),
            Param("gate_proj.bias", ("experts", "expert_ffn"), both),
            Param("up_proj.bias", ("experts", "expert_ffn"), both),
            Param("down_proj.bias", ("experts", "hidden"), {"ep": Shard(0), "moe_tp": PARTIAL}, additive=True),
        ]
    if correction:
        params.append(Param("router.correction", ("all_experts",)))
    options = {
        "top_k": top_k,
        "scoring": scoring,
        "renormalise": renormalise,
        "activation": activation,
        "factor": factor,
        "num_groups": num_groups,
        "top_groups": top_groups,
    }
    return ModuleSpec(
        name,
        ModuleKind.MOE,
        (Port(HIDDEN, {"ep": REPLICATE, "moe_tp": REPLICATE}),),
        Port(HIDDEN, {"ep": PARTIAL, "moe_tp": PARTIAL}),
        tuple(params),
        Freedom.TOKENS,
        options,
        active_fraction=top_k / num_experts,
    )


def rows(name: str = "rows") -> ModuleSpec:
    """Picks the tokens that get logits."""
    return ModuleSpec(name, ModuleKind.ROWS, (Port(HIDDEN, HEADS_IN),), Port(("rows", "hidden"), HEADS_IN))


def lm_head(name: str = "lm_head") -> ModuleSpec:
    """Logits, sharded by vocabulary over the attention group."""
    weight = Param("weight", ("vocab", "hidden"), {"attn_tp": Shard(0)})
    leave = Port(("rows", "vocab"), {"attn_tp": Shard(1), **SEQUENCES})
    return ModuleSpec(name, ModuleKind.LM_HEAD, (Port(("rows", "hidden"), HEADS_IN),), leave, (weight,))


def sink(name: str, dims: tuple[str, ...] = HIDDEN) -> ModuleSpec:
    """Hands a value, whole on every rank of the attention group, to something outside the model."""
    return ModuleSpec(name, ModuleKind.SINK, (Port(dims, HEADS_IN),), Port(dims, HEADS_IN))
