"""The program that folds accepted tokens into the recurrent states of a model: one launch for all layers."""

import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from kimigraph.codegen import build_artifact
from kimigraph.ir.fake import infer
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram, InputSpec
from kimigraph.runtime.executor import Executor
from kimigraph.runtime.graphs import GraphMode
from kimigraph.runtime.speculation import ReplayLog, StateShape

NAMES = ("state", "conv_state", "keys", "decays", "deltas", "inputs", "accepted")


def replay_program(tensors: tuple[Tensor, ...], layout: str) -> CapturedProgram:
    """``kda_replay`` over tensors like these, in the operator's order; states change in place, there is no result."""
    graph, inputs = Graph(), list[InputSpec]()
    with FakeTensorMode():
        values = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in tensors]
    for name, value in zip(NAMES, values, strict=True):
        graph.placeholder(name).meta["val"] = value
        kind = "input" if name == "accepted" else "cache"
        dtype = str(value.dtype).removeprefix("torch.")
        bounds = (0, tensors[2].shape[2] + 1) if kind == "input" else None
        mutated = name in ("state", "conv_state")
        spec = InputSpec(name, kind, name, tuple(value.shape), value.stride(), dtype, mutated, bounds)
        inputs.append(spec)
    arguments = tuple(graph.find_nodes(op="placeholder"))
    infer(graph.call_function(OPERATORS["kda_replay"].overload, arguments, {"state_layout": layout}))
    graph.output(())
    module = GraphModule(torch.nn.Module(), graph)
    return CapturedProgram(
        module, tuple(inputs), (), info={"model": "replay", "phase": "replay", "shape_key": "replay"}
    )


def new_replay_log(
    shape: StateShape,
    rows: int,
    tokens: int,
    target: str,
    device: torch.device,
    directory: Path,
    graphs: GraphMode | None,
) -> ReplayLog:
    """A log for ``rows`` sequences whose fold is compiled for ``target``, into a folder of its own in ``directory``."""
    holder: list[Executor] = []

    def fold(*tensors: Tensor) -> None:
        if not holder:
            own = Path(tempfile.mkdtemp(prefix="replay-", dir=directory))
            build_artifact(replay_program(tensors, shape.state.layout), target, own, self_test=False)
            holder.append(Executor(own, {}))
            if graphs is not None:
                graphs.adopt(holder[0])
        holder[0](*tensors)

    return ReplayLog(shape, rows, tokens, fold, device)
