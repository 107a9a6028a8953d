"""Inputs that a pass adds to a step: the caller hands them over as further entries of its dict of caches."""

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from kimigraph.ir.errors import UsageError
from kimigraph.ir.fake import fake_mode
from kimigraph.ir.program import CapturedProgram, InputSpec


def add_input(program: CapturedProgram, spec: InputSpec, reason: str) -> Node:
    """The placeholder of ``spec``, contiguous, behind all others; the call's form is extended by it.

    UsageError, beginning with ``reason``, where the step's last argument is no dict.
    """
    graph = program.graph_module.graph
    _extend_call(program, spec.source, reason)
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        added = graph.placeholder(spec.name)
    with fake_mode(graph):
        dtype = getattr(torch, spec.dtype)
        added.meta["val"] = torch.empty(spec.shape, dtype=dtype, device=last.meta["val"].device)
    program.inputs = (*program.inputs, spec)
    return added


def _extend_call(program: CapturedProgram, name: str, reason: str) -> None:
    leaves = "argument_leaves"
    if leaves in program.info:
        program.info[leaves] = [*program.info[leaves], "tensor"]
    if program.in_spec is None:
        return
    count = program.in_spec.num_leaves
    args, kwargs = pytree.tree_unflatten(list(range(count)), program.in_spec)
    last = args[-1] if args and not kwargs else None
    if not isinstance(last, dict):
        raise UsageError(f"{reason}: the step's last argument is no dict of caches, which gets {name}")
    last[name] = count
    program.in_spec = pytree.tree_structure((args, kwargs))
