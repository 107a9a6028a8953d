"""The delta rule of a prompt as an ONNX Scan: one step of the recurrence, however many tokens there are."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from kimigraph.codegen.onnx.scope import Port, Scope, Subgraph
from kimigraph.codegen.onnx.translation import Handler, Translation, arguments, tensor_of
from kimigraph.ir.errors import CompileError

_LIBRARY = torch.library.Library("kimigraph_onnx", "DEF")
_LIBRARY.define(
    "delta_scan(Tensor memory, Tensor query, Tensor key, Tensor value, Tensor strength, Tensor decay)"
    " -> (Tensor, Tensor)"
)


def _fake(
    memory: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(memory), torch.empty_like(value)


torch.library.register_fake("kimigraph_onnx::delta_scan", _fake, lib=_LIBRARY)


def scanned_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    a_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    scale: float,
    l2_norm: bool,
    l2_eps: float = 1e-6,
    lower_bound: float | None = None,
    state_layout: str = "kv",
) -> tuple[Tensor, Tensor]:
    """``kimigraph::kda_prefill`` around a scan over tokens. Packed sequences are refused: their ends are values."""
    if cu_seqlens is not None:
        raise CompileError(
            "kimigraph::kda_prefill over packed sequences (cu_seqlens) has no ONNX form: give sequences as a batch"
        )
    query, key, heads = q.float(), k.float(), q.shape[2]
    if l2_norm:
        query = query * torch.rsqrt(query.square().sum(-1, keepdim=True) + l2_eps)
        key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + l2_eps)
    gate, strength = g.float(), beta.float()
    if a_log is not None and dt_bias is not None:
        rate, logit = a_log.float().exp().reshape(heads, 1), gate + dt_bias.float().reshape(heads, -1)
        gate = -rate * F.softplus(logit) if lower_bound is None else lower_bound * torch.sigmoid(rate * logit)
        strength = torch.sigmoid(strength)
    memory = torch.zeros(q.shape[0], heads, q.shape[-1], v.shape[-1])
    if initial_state is not None:
        memory = initial_state.float().transpose(-1, -2) if state_layout == "vk" else initial_state.float()
    by_token = [
        x.transpose(0, 1) for x in ((query * scale).unsqueeze(-1), key.unsqueeze(-1), v.float(), strength.unsqueeze(-1))
    ]
    decay = gate.exp().unsqueeze(-1).transpose(0, 1)
    memory, out = torch.ops.kimigraph_onnx.delta_scan(memory, *by_token, decay)
    return out.transpose(0, 1).to(v.dtype), memory.transpose(-1, -2) if state_layout == "vk" else memory


def _delta_scan(t: Translation, node: Node) -> Any:
    a = arguments(node)
    memory, out = node.meta["val"]
    rows = {name: tensor_of(a[name]).shape[1:] for name in ("query", "key", "value", "strength", "decay")}
    names = {"memory": memory.shape, **rows}
    body = _step(t.scope.inner(), {name: tuple(shape) for name, shape in names.items()}, tuple(out.shape[1:]))
    return t.scope.add("Scan", [t.name(a[name]) for name in names], 2, body=body, num_scan_inputs=len(rows))


def _step(s: Scope, shapes: dict[str, tuple[int, ...]], out: tuple[int, ...]) -> Subgraph:
    """One token: decay, read what the key finds, write the corrected value, read with the query."""
    names = [s.unused(name) for name in shapes]
    memory, query, key, value, strength, decay = names
    axis = s.integers([-2])
    kept = s.op("Mul", memory, decay)
    found = s.op("ReduceSum", s.op("Mul", kept, key), axis, keepdims=0)
    update = s.op("Mul", strength, s.op("Sub", value, found))
    written = s.add("Add", (kept, s.op("Mul", key, s.op("Unsqueeze", update, axis))), (s.unused("memory_next"),))
    read = s.add("ReduceSum", (s.op("Mul", written[0], query), axis), (s.unused("out"),), keepdims=0)
    inputs = tuple(Port(name, torch.float32, shape) for name, shape in zip(names, shapes.values(), strict=True))
    outputs = (Port(written[0], torch.float32, shapes["memory"]), Port(read[0], torch.float32, out))
    return Subgraph("delta_rule_step", inputs, outputs, s.ops)


RECURRENCE: dict[str, Handler] = {"delta_scan": _delta_scan}
"""Translations by the bare name of the operator."""
