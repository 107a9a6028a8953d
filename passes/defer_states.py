"""``defer-states``: a decode step writes recurrent states with every L-th token, and logs what it adds to them between.

Each ``kda_decode`` becomes a ``kda_decode_logged``: reading a state and a few records is about half the traffic of
reading and writing a state. How full the logs are is one number a sequence, an input that goes on with each step.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram, InputSpec
from kimigraph.ir.provenance import source_line
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.ir.schemas import bind
from kimigraph.passes.algebra.added_inputs import add_input
from kimigraph.passes.algebra.nodes import described, shape
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.rewrite import call, replace
from kimigraph.passes.base import Pass, PassContext

ATEN = torch.ops.aten
FILLED = "log.filled"
"""Outside name of the input that says how many records each sequence has."""
_DECODE = OPERATORS["kda_decode"].overload


@dataclass(frozen=True)
class DeferStates(Pass):
    """Defers the writes of recurrent states where ``state_log`` asks for logs of several tokens; else does nothing.

    A state that another node writes is written with each token, as before.
    """

    name: ClassVar[str] = "defer-states"
    summary: ClassVar[str] = "a decode step writes recurrent states with every L-th token and logs what is between"
    changes_formats: ClassVar[bool] = True
    pattern: ClassVar[str] = "`kda_decode` of one token a sequence"
    constraints: ClassVar[tuple[str, ...]] = (
        "the phase is `decode`, and `state_log` at least 2",
        "both states are inputs that nothing else reads or writes; no pool",
    )
    effect: ClassVar[str] = (
        "a `kda_decode_logged`, with inputs `log.<layer>.keys`, `.decays`, `.deltas`, and `log.filled`, which the step "
        "moves on"
    )

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Give each step that can have one a log."""
        length = context.config.state_log
        if context.config.phase != "decode" or length < 2:
            return PassResult(False)
        graph, remarks, filled = program.graph_module.graph, list[Remark](), None
        for node in graph.find_nodes(op="call_function", target=_DECODE):
            try:
                _require_own_state(node)
            except Refused as refusal:
                remarks.append(refusal.remark(self.name, node))
                continue
            filled = filled or _filled(program, shape(node)[0], length)
            remarks.append(self._passed(_rewritten(program, node, filled, length)))
        if filled is not None:
            _move_on(program, filled, length)
            graph.lint()
            program.graph_module.recompile()
        return PassResult(filled is not None, tuple(remarks), {"deferred": len(remarks) if filled is not None else 0})

    def _passed(self, node: Node) -> Remark:
        told = f"{node.name} writes its state with every token that fills its log"
        return Remark("passed", self.name, told, node.name, source_line(node), nodes=(node.name,))


def _require_own_state(node: Node) -> None:
    given = bind(node)
    if given["slots"] is not None or given["gate_weight"] is not None or shape(node)[1] != 1:
        raise Refused("it takes several tokens, a pool of states, or what its gate is made of", node)
    for name in ("state", "conv_state"):
        state = given[name]
        if state.op != "placeholder" or set(state.users) != {node}:
            raise Refused(f"{name} ({described(state)}) is no input of the step, or is used elsewhere", state)


def _rewritten(program: CapturedProgram, node: Node, filled: Node, length: int) -> Node:
    """Put the logged step in the node's place."""
    graph, given = program.graph_module.graph, bind(node)
    logged = call(
        graph,
        OPERATORS["kda_decode_logged"].overload,
        (
            *(
                given[name]
                for name in ("qkv", "conv_weight", "conv_state", "gate", "dt_bias", "a_log", "beta", "state")
            ),
            *_log(program, given["state"], (*shape(node)[:1], length), shape(node)[2:], given["state_layout"]),
            filled,
            *(given[name] for name in ("out_gate", "norm_weight")),
        ),
        {name: given[name] for name in ("scale", "l2_eps", "lower_bound", "norm_eps", "state_layout")},
        like=node,
        before=node,
    )
    logged.meta["replaces"] = node.meta.get("replaces", (node.name,))
    replace(node, logged)
    graph.erase_node(node)
    return logged


def _log(program: CapturedProgram, state: Node, rows: tuple[int, ...], own: tuple[int, ...], layout: str) -> list[Node]:
    """Inputs for the records of a layer, contiguous; ``own`` is [H, V]."""
    source = next(spec.source for spec in program.inputs if spec.name == state.name)
    heads, value_dim = own
    key_dim = shape(state)[2 if layout == "kv" else 3]
    widths = {"keys": key_dim, "decays": key_dim, "deltas": value_dim}
    return [
        _input(program, f"log.{source.split('.')[1]}.{part}", (*rows, heads, width), "float32")
        for part, width in widths.items()
    ]


def _filled(program: CapturedProgram, batch: int, length: int) -> Node:
    return _input(program, FILLED, (batch,), "int32", (0, length))


def _input(
    program: CapturedProgram, source: str, size: tuple[int, ...], dtype: str, bounds: tuple[int, int] | None = None
) -> Node:
    stride = tuple(torch.empty(size, device="meta").stride())
    name = source.replace(".", "_")
    return add_input(program, InputSpec(name, "cache", source, size, stride, dtype, True, bounds), "state_log")


def _move_on(program: CapturedProgram, filled: Node, length: int) -> None:
    """One record more behind the step; none when the state was written."""
    graph = program.graph_module.graph
    [output] = graph.find_nodes(op="output")
    one_more = call(graph, ATEN.add.Tensor, (filled, 1), like=filled, before=output)
    room = call(graph, ATEN.lt.Scalar, (filled, length - 1), like=filled, before=output)
    moved = call(graph, ATEN.mul.Tensor, (one_more, room), like=filled, before=output)
    call(graph, ATEN.copy_.default, (filled, moved), like=filled, before=output)
