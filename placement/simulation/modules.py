# SPDX-License-Identifier: Apache-2.0
"""What each kind of module computes, on the part of its parameters and inputs that one rank holds.

Written for clarity, not speed, from the published definitions of the layers. Positions do not enter: rotary embedding
acts inside a head and has no bearing on placement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from tokenspeed_plugin.placement.module_spec import ModuleKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tokenspeed_plugin.placement.layout import Interval
    from tokenspeed_plugin.placement.simulation.batch import Batch

EPSILON = 1e-6
SWIGLU_LIMIT = 7.0
SWIGLU_ALPHA = 1.702


@dataclass(frozen=True)
class Local:
    """One rank's view of a module: its parameters, the first index held per dimension, and its tokens and rows."""

    options: Mapping[str, Any]
    params: Mapping[str, torch.Tensor]
    first: Mapping[str, int]
    tokens: Interval
    rows: Interval
    batch: Batch

    def linear(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """``values`` times a parameter over its last dimension, plus its bias if there is one."""
        weight = self.params[f"{name}.weight"]
        result: torch.Tensor = torch.tensordot(values, weight, dims=([-1], [-1]))
        bias = self.params.get(f"{name}.bias")
        return result if bias is None else result + bias


def embedding(local: Local, ids: torch.Tensor) -> torch.Tensor:
    """Rows of the held part of the table; zeros for tokens that another rank holds."""
    weight = local.params["weight"]
    index = ids - local.first["vocab"]
    held = (index >= 0) & (index < len(weight))
    return torch.where(held[:, None], weight[index.clamp(0, len(weight) - 1)], weight.new_zeros(()))


def norm(local: Local, values: torch.Tensor) -> torch.Tensor:
    """RMS norm."""
    return rms_norm(values, local.params["weight"] + (1 if local.options.get("unit_offset") else 0))


def rms_norm(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``values`` over the root of their mean square, times ``weight``."""
    normalised: torch.Tensor = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + EPSILON) * weight
    return normalised


def attention(local: Local, values: torch.Tensor) -> torch.Tensor:
    """Causal grouped-query attention with optional biases, sinks, head norms and window; ``[tokens, hidden]``."""
    query, key, value = (local.linear(values, f"{p}_proj") for p in "qkv")
    if "q_norm.weight" in local.params:
        query, key = rms_norm(query, local.params["q_norm.weight"]), rms_norm(key, local.params["k_norm.weight"])
    heads = torch.arange(query.shape[1]) + local.first["heads"]
    kv_heads = heads // local.options["group"] - local.first["kv_heads"]
    mixed = attend(local, query, key[:, kv_heads], value[:, kv_heads])
    return project_heads(local, mixed)


def latent_attention(local: Local, values: torch.Tensor) -> torch.Tensor:
    """Multi-head latent attention; the shared rotary part of the key is taken as it is."""
    query_input, name = values, "q_proj"
    if "q_a_proj.weight" in local.params:
        query_input = rms_norm(local.linear(values, "q_a_proj"), local.params["q_a_layernorm.weight"])
        name = "q_b_proj"
    query = local.linear(query_input, name)
    latent_length = len(local.params["kv_a_layernorm.weight"])
    down = local.linear(values, "kv_a_proj")
    latent, shared_key = down[:, :latent_length], down[:, latent_length:]
    expanded = local.linear(rms_norm(latent, local.params["kv_a_layernorm.weight"]), "kv_b_proj")
    own_length = query.shape[-1] - shared_key.shape[-1]
    key, value = expanded[..., :own_length], expanded[..., own_length:]
    whole_key = torch.cat([key, shared_key[:, None].expand(-1, key.shape[1], -1)], dim=-1)
    return project_heads(local, attend(local, query, whole_key, value))


def attend(local: Local, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Softmax attention inside each sequence, ``[tokens, heads, head_dim]``."""
    position = torch.arange(local.tokens[0], local.tokens[1])
    distance = position[:, None] - position[None, :]
    sequence = position // local.batch.length_tokens
    visible = (distance >= 0) & (sequence[:, None] == sequence[None, :])
    if local.options.get("window") is not None:
        visible &= distance < local.options["window"]
    scores = torch.einsum("thd,shd->hts", query, key) / query.shape[-1] ** 0.5
    scores = scores.masked_fill(~visible, float("-inf"))
    if "sinks" in local.params:
        sinks = local.params["sinks"][:, None, None].expand(-1, len(position), 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hts,shd->thd", weights, value)


def project_heads(local: Local, mixed: torch.Tensor) -> torch.Tensor:
    """Output projection over the held heads."""
    result: torch.Tensor = torch.tensordot(mixed, local.params["o_proj.weight"], dims=([1, 2], [1, 2]))
    return result + local.params["o_proj.bias"] if "o_proj.bias" in local.params else result


def mlp(local: Local, values: torch.Tensor) -> torch.Tensor:
    """Gated MLP, optionally multiplied by a sigmoid of the token."""
    inner = activate(local, local.linear(values, "gate_proj"), local.linear(values, "up_proj"))
    result = local.linear(inner, "down_proj")
    gate = local.params.get("output_gate.weight")
    return result if gate is None else result * torch.sigmoid(values @ gate)[:, None]


def activate(local: Local, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The gated activation that the module names."""
    name = local.options["activation"]
    if name == "silu":
        return functional.silu(gate) * up
    if name == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)


def experts(local: Local, values: torch.Tensor) -> torch.Tensor:
    """Sum over the held experts of their weighted outputs; the router sees all experts."""
    weights = route(local, local.linear(values, "router"))
    result: torch.Tensor = torch.zeros_like(values)
    for index in range(len(local.params["gate_proj.weight"])):
        expert = {name: p[index] for name, p in local.params.items() if not name.startswith("router")}
        inside = Local(local.options, expert, local.first, local.tokens, local.rows, local.batch)
        inner = activate(inside, inside.linear(values, "gate_proj"), inside.linear(values, "up_proj"))
        result = result + weights[:, local.first["experts"] + index, None] * inside.linear(inner, "down_proj")
    factor: float = local.options["factor"]
    return result * factor


def route(local: Local, logits: torch.Tensor) -> torch.Tensor:
    """Weight of every expert for every token, zero for those not chosen."""
    options = local.options
    scores = torch.sigmoid(logits) if options["scoring"] == "sigmoid" else logits.softmax(-1)
    ranking = scores + local.params["router.correction"] if "router.correction" in local.params else scores
    groups = ranking.reshape(len(ranking), options["num_groups"], ranking.shape[-1] // options["num_groups"])
    best_groups = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1).topk(options["top_groups"], -1).indices
    allowed = torch.zeros(groups.shape[:-1], dtype=torch.bool).scatter(-1, best_groups, value=True)
    ranking = groups.masked_fill(~allowed[..., None], float("-inf")).flatten(-2)
    chosen = ranking.topk(options["top_k"], -1).indices
    weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
    if options["scoring"] == "softmax-of-chosen":
        return torch.zeros_like(scores).scatter(-1, chosen, logits.gather(-1, chosen).softmax(-1))
    return weights / weights.sum(-1, keepdim=True) if options["renormalise"] else weights


def rows(local: Local, values: torch.Tensor) -> torch.Tensor:
    """The last token of each held sequence."""
    last = torch.arange(local.rows[0], local.rows[1]) * local.batch.length_tokens + local.batch.length_tokens - 1
    return values[last - local.tokens[0]]


def linear(local: Local, values: torch.Tensor) -> torch.Tensor:
    """One matrix ``[out, in]``."""
    return values @ local.params["weight"].T


COMPUTE: dict[ModuleKind, Callable[..., torch.Tensor]] = {
    ModuleKind.EMBEDDING: embedding,
    ModuleKind.NORM: norm,
    ModuleKind.ADD: lambda _local, left, right: left + right,
    ModuleKind.SCALE: lambda local, values: values * local.options["factor"],
    ModuleKind.ATTENTION: attention,
    ModuleKind.MLA: latent_attention,
    ModuleKind.MLP: mlp,
    ModuleKind.MOE: experts,
    ModuleKind.LINEAR: linear,
    ModuleKind.ROWS: rows,
    ModuleKind.LM_HEAD: linear,
    ModuleKind.SINK: lambda _local, values: values,
}
