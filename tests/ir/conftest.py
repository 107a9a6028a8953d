"""Small programs to test on."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from kimigraph.ir.program import CapturedProgram, InputSpec, OutputSpec

import_module("kimigraph.ir.operators")  # registers the operators
sys.path.insert(0, str(Path(__file__).parent))

Build = Callable[..., CapturedProgram]
_ROUNDINGS = ("rceil", "floor")
_SCALES = ("power2", "amax")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def build() -> Build:
    """Trace a function of named tensors into a program; keywords say more about inputs (``x=dict(kind="weight")``)."""

    def build_program(
        function: Callable[..., Any], tensors: Mapping[str, torch.Tensor], **more: dict[str, Any]
    ) -> CapturedProgram:
        names = list(tensors)
        graph_module = make_fx(function, tracing_mode="fake")(*tensors.values())
        graph = graph_module.graph
        inputs = []
        for node, name in zip([n for n in graph.nodes if n.op == "placeholder"], names, strict=True):
            node.name = name
            value = tensors[name]
            spec = InputSpec(
                name, "input", name, tuple(value.shape), value.stride(), str(value.dtype).removeprefix("torch.")
            )
            inputs.append(replace(spec, **more.get(name, {})))
        output = next(iter(reversed(graph.nodes)))
        results = output.args[0]
        output.args = (tuple(results) if isinstance(results, list | tuple) else (results,),)
        outputs = tuple(OutputSpec(f"output_{i}", str(i)) for i in range(len(output.args[0])))
        graph_module.recompile()
        bound = {spec.name: tensors[spec.name] for spec in inputs if spec.bound}
        return CapturedProgram(graph_module, tuple(inputs), outputs, bound)

    return build_program


@pytest.fixture
def example() -> Callable[[str, int], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of a semantic operator at random shapes: ``example("short_conv", seed)``."""
    return _example


def _example(name: str, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(seed)
    batch, tokens, heads, width, rope, total, k, taps, value = (
        int(torch.randint(1, top, ())) for top in (4, 4, 4, 9, 5, 12, 9, 5, 9)
    )
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    paged = seed % 3 == 0

    def new(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape).to(dtype)

    def cache(size: int) -> torch.Tensor:
        return new(batch * 3, total, size) if paged else new(batch, total, size)

    pages: dict[str, Any] = {}
    if paged:
        pages["block_table"] = torch.randperm(batch * 3).view(batch, 3).to(torch.int32)
    positions = torch.stack([torch.randperm(total + 4)[:tokens] - 4 for _ in range(batch)])
    if name == "lightning_indexer":
        lengths = torch.randint(0, total + 1, (batch,), dtype=torch.int32) if seed % 4 else None
        mask = torch.rand(batch, 1, total * (3 if paged else 1)) < 0.5 if seed % 5 == 0 else None
        operands = (new(batch, tokens, heads, width), cache(width), new(batch, tokens, heads), lengths, mask)
        return operands, {"k": k, "scale": 0.25, **pages}
    if name == "index_scores":
        picks = torch.randint(-1, total, (batch, tokens, k), dtype=torch.int32)
        operands = (new(batch, tokens, heads, width), cache(width), new(batch, tokens, heads), picks)
        return operands, {"scale": 0.25, **pages}
    if name == "exchange_picks":
        places = torch.arange(k, dtype=torch.int32).expand(batch, tokens, k).contiguous()
        sizes = {"k": k + seed % 3, "ways": 1, "run": 1 + seed % 4, "group": "nobody's", "pruned": seed % 2 == 0}
        return (new(batch, tokens, k, dtype=torch.float32), places - places.eq(k - 1) * k), sizes
    if name in ("rank_sum", "rank_gather"):
        part = new(batch, tokens, width, dtype=(torch.float32, torch.bfloat16)[seed % 2])
        along = {"dim": seed % 3} if name == "rank_gather" else {}
        return (part,), {**along, "ways": 1, "group": "nobody's"}
    if name == "sparse_attention":
        q_rope, rope_cache = (new(batch, tokens, heads, rope), cache(rope)) if seed % 2 else (None, None)
        picks = torch.randint(-1, total, (batch, tokens, k), dtype=torch.int32)
        sinks = {"sink": new(heads)} if seed % 5 == 0 else {}
        operands = (new(batch, tokens, heads, width), q_rope, cache(width), rope_cache, picks)
        return operands, {"scale": 0.25, **pages, **sinks}
    if name == "latent_attention":
        q_rope, rope_cache = (new(batch, tokens, heads, rope), cache(rope)) if seed % 2 else (None, None)
        lengths = torch.randint(0, total + 1, (batch,) if seed % 3 else (), dtype=torch.int32) if seed % 4 else None
        sinks = {"sink": new(heads)} if seed % 5 == 0 else {}
        operands = (new(batch, tokens, heads, width), q_rope, cache(width), rope_cache, lengths)
        return operands, {"scale": 0.25, **pages, **sinks}
    if name in ("latent_write", "index_key_write"):
        rows = new(batch, tokens, width, dtype=torch.float32)
        if name == "index_key_write":
            return (cache(width), rows, positions), pages
        rope_cache, rope_rows = (cache(rope), new(batch, tokens, rope)) if seed % 2 else (None, None)
        return (cache(width), rope_cache, rows, rope_rows, positions), pages
    if name == "moe_experts":
        return _experts_example(new, seed)
    if name == "rms_norm":
        x, residual = new(batch, tokens, width), new(batch, tokens, width) if seed % 3 else None
        return (x, new(width) if seed % 4 else None, residual), {"eps": 1e-3, "rounds_first": seed % 5 == 0}
    if name == "mxfp8_quantize":
        return (new(batch, tokens, heads, width),), {
            "group": (32, width, 3)[seed % 3],
            "rounding": _ROUNDINGS[seed % 2],
        }
    if name == "fp8_quantize":
        return (new(batch, tokens, heads, width),), {"tile": (32, width, 3)[seed % 3], "scales": _SCALES[seed % 2]}
    if name == "mxfp4_quantize":
        return (new(batch, heads, 32 * tokens),), {}
    if name == "hadamard_rows":
        return (new(8 * heads, width),), {"width": (8, 4, 1)[seed % 3]}
    if name == "short_conv":
        state = new(batch, width, taps - 1 + seed % 2) if seed % 4 else None
        weight = new(width, 1, taps) if seed % 2 else new(width, taps)
        return (new(batch, tokens, width), weight, state), {"activation": seed % 2 == 0}
    if name.startswith("attention_residual"):
        return _residual_example(name, seed, (batch, tokens, heads * width), dtype)
    layout = ("kv", "vk")[seed % 2]
    state = new(batch, heads, width, value, dtype=torch.float32)
    state = state if layout == "kv" else state.transpose(-1, -2).contiguous()
    if name in ("kda_prefill", "kda_prefill_deltas"):
        q, key, g = (new(batch, tokens, heads, width) for _ in range(3))
        operands = (q, key, new(batch, tokens, heads, value), -g.float().abs(), new(batch, tokens, heads).sigmoid())
        return (*operands, state if seed % 3 else None), {
            "scale": 0.5,
            "l2_norm": seed % 2 == 0,
            "state_layout": layout,
        }
    channels = heads * (2 * width + value)
    if name == "kda_replay":
        layers, columns = 1 + seed % 2, taps - 1 + seed % 2
        records = [new(layers, batch, tokens, heads, size) for size in (width, width, value)]
        states = (new(layers, *state.shape), new(layers, batch, channels, columns))
        accepted = torch.arange(batch, dtype=torch.int32) % (tokens + 1)
        return (*states, *records, new(layers, batch, tokens, channels), accepted), {"state_layout": layout}
    gate = new(batch, tokens, heads, width) if seed % 2 else new(batch, tokens, heads * width)
    last = (new(batch, tokens, heads, value), new(value)) if seed % 3 else (None, None)
    if seed % 4 == 3:
        gate, last = new(batch, tokens, 5), (*last, None, new(heads * width, 5))
    operands = (new(batch, tokens, channels), new(channels, taps), new(batch, channels, taps - 1 + seed % 2), gate)
    gates = (new(heads * width), torch.rand(1, 1, heads, 1), new(batch, tokens, heads))
    bound = -5.0 if seed % 2 else None
    if name == "kda_decode_logged":
        operands = (new(batch, 1, channels), *operands[1:3], new(batch, 1, heads * width))
        gates = (*gates[:2], new(batch, 1, heads))
        records = [new(batch, tokens, heads, size, dtype=torch.float32) for size in (width, width, value)]
        filled = torch.arange(batch, dtype=torch.int32) % tokens
        last = (*records, filled, *((new(batch, 1, heads, value), new(value)) if seed % 3 else (None, None)))
    elif name != "kda_decode":
        operands, last = (*operands[:3], new(batch, tokens, heads * width)), last[:2]
        records = [new(batch, tokens, heads, size) for size in (width, width, value)]
        if name == "kda_verify_states":
            records = [new(batch, tokens, *state.shape[1:])]
        last = (*records, new(batch, tokens, channels), *last)
    return (*operands, *gates, state, *last), {"scale": 0.5, "lower_bound": bound, "state_layout": layout}


def _experts_example(new: Callable[..., torch.Tensor], seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Every optional operand given and left out, one group of experts and several."""
    tokens, width, inner, outer, experts = 1 + seed % 3, 6, 4 + seed % 2, 10, (6, 8)[seed % 2]
    logits, bias = new(tokens, experts, dtype=torch.float32), new(experts, dtype=torch.float32)
    operands = [new(tokens, width), logits, bias if seed % 3 else None]
    operands += [new(experts, 2 * inner, width), new(experts, width, inner)]
    latent = seed % 4 != 0
    operands += [new(width) if latent and seed % 5 else None, new(outer, width) if latent else None]
    if seed % 3 != 1:
        operands += [new(tokens, 7), new(tokens, 7), new(outer if latent else width, 7)]
        operands += [new(tokens, outer if latent else width)] if seed % 4 else []
    groups = {"groups": 2, "group_picks": 1} if seed % 2 else {}
    activation = {"activation": "situ", "beta": 4.0, "linear_beta": 25.0} if seed % 2 else {"limit": 2.0}
    return tuple(operands), {"picks": 2, "renormalize": seed % 3 > 0, "scale": 1.5, **groups, **activation}


def _residual_example(
    name: str, seed: int, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the operators of attention residuals: sources of ``shape``, weights of its last size."""
    width = shape[-1]
    sources = [torch.randn(shape).to(dtype) for _ in range(1 + seed % 4)]
    query, norm_weight = torch.randn(1, width) if seed % 2 else torch.randn(width), torch.randn(width)
    out_norm_weight = torch.randn(width) if seed % 3 else None
    if name == "attention_residual_history":
        count = 1 + seed % 3
        return (sources, [query] * count, [norm_weight] * count if seed % 4 else []), {"eps": 1e-5}
    weights = (query, norm_weight if seed % 4 else None, out_norm_weight)
    if name == "attention_residual_merge":
        return (torch.randn(shape), torch.randn(shape[:-1]), sources[0], *weights), {"eps": 1e-5}
    return (sources, *weights), {"eps": 1e-5, "out_eps": 1e-6}
