"""Descriptors of caches: what the operators on them say, else by their flat names,
``cache.<layer>.latent|rope|index_key``, and shapes."""

import re
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from kimigraph.capture.hints import CaptureHints, InputHint
from kimigraph.capture.signature import call_leaves, unique
from kimigraph.capture.weights import dtype_name
from kimigraph.ir import purity
from kimigraph.ir.descriptors import Descriptor, IndexKeyDescriptor, LatentDescriptor
from kimigraph.ir.operators import operator_of
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.schemas import bind

_NAME = re.compile(r"(cache\.\d+)\.(latent|rope|index_key)")
_SIZES = (3, 4)


def named_cache_hints(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CaptureHints:
    """Hints for the contiguous caches among the arguments, [B, T, D] or [B, 1, T, D], that have such names."""
    leaves = call_leaves(module, args, kwargs)
    leaves = [leaf for leaf in leaves if isinstance(leaf.value, torch.Tensor)]
    named = dict(zip(unique(leaf.name for leaf in leaves), (leaf.value for leaf in leaves), strict=True))
    found = {name: _descriptor(name, named) for name in named}
    return CaptureHints({name: InputHint("cache", descriptor=str(form)) for name, form in found.items() if form})


def _descriptor(name: str, named: dict[str, torch.Tensor]) -> Descriptor | None:
    match, tensor = _NAME.fullmatch(name), named[name]
    if match is None or tensor.dim() not in _SIZES or not tensor.dtype.is_floating_point:
        return None
    dtype = dtype_name(tensor.dtype)
    if match[2] == "index_key":
        return IndexKeyDescriptor("contiguous", dtype, tensor.shape[-1])
    latent, rope = named.get(f"{match[1]}.latent"), named.get(f"{match[1]}.rope")
    if latent is None or (rope is not None and rope.dtype != latent.dtype):
        return None
    return LatentDescriptor("contiguous", dtype, latent.shape[-1], 0 if rope is None else rope.shape[-1])


def described_by_operators(program: CapturedProgram) -> None:
    """Give the inputs that a model's own cache operators describe (``keys``, ``latent``, ``rope``) those descriptors.

    What an operator says goes before what ``named_cache_hints`` read off a shape; pages look like sequences there.
    """
    said: dict[str, str] = {}
    for node in program.graph_module.graph.nodes:
        if operator_of(node) is None:
            continue
        operands = bind(node)
        for name in ("keys", "latent", "rope"):
            cache, text = operands.get(name), operands.get("descriptor")
            if isinstance(cache, Node) and text:
                said[purity.storage_root(cache).name] = str(text)
    program.inputs = tuple(
        replace(spec, kind="cache", descriptor=said[spec.name]) if spec.name in said else spec
        for spec in program.inputs
    )
