"""``log-states``: a step that verifies drafts leaves the recurrent states as they are and logs what would change them.

Of a prefill of a few tokens a sequence, convolution (marked, or as transformers spells it), delta rule and gated norm
of a KDA layer become one ``kda_verify``, and the writes of the layer's two states go. Its records are inputs that the
step fills; ``kda_replay`` folds those of the accepted tokens into the states, when it is known how many were accepted.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from kimigraph.ir import purity
from kimigraph.ir.descriptors import ConvDescriptor, StateDescriptor, parse_descriptor
from kimigraph.ir.errors import UsageError
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram, InputSpec
from kimigraph.ir.provenance import source_line
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.ir.schemas import bind
from kimigraph.passes.algebra.added_inputs import add_input
from kimigraph.passes.algebra.convolution import Convolution, convolution_over
from kimigraph.passes.algebra.frames import Frame, Occurrence, Operand, operand, require_layout
from kimigraph.passes.algebra.gated_norm import Neighbours, neighbours_of, returned_as
from kimigraph.passes.algebra.layout import peel
from kimigraph.passes.algebra.nodes import described, dtype, packet, shape
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.rewrite import build, call, replace
from kimigraph.passes.algebra.rule import require_unwritten
from kimigraph.passes.base import Pass, PassContext

ATEN = torch.ops.aten
PHASE = "verify"


@dataclass(frozen=True)
class Layer:
    """A checked layer: the delta rule with its arguments, the convolution and the node that it is known by, the writes
    of both states, norm and gate, the last node."""

    rule: Node
    arguments: dict[str, Any]
    convolution: Convolution
    mixing: Node
    writes: tuple[Node, Node]
    neighbours: Neighbours
    out: Node
    sizes: dict[str, int]


@dataclass(frozen=True)
class LogStates(Pass):
    """Logs every recurrent state where the compilation's phase is ``verify``; else it does nothing.

    UsageError for a state whose write is not that of a marked KDA layer: its drafts could not be taken back.
    """

    name: ClassVar[str] = "log-states"
    summary: ClassVar[str] = "a step that verifies drafts logs what it would do to recurrent states"
    changes_formats: ClassVar[bool] = True
    pattern: ClassVar[str] = (
        "`kda_prefill` behind a `short_conv`, or a padded convolution, of one layer, with the writes of both states"
    )
    constraints: ClassVar[tuple[str, ...]] = (
        "the phase is `verify`",
        "q, k and v are channels of one depthwise convolution with SiLU",
        "gate and strength lie inside `kda_prefill`, whose q and k are L2-normalised",
        "both states are inputs, read in this layer only and replaced once",
    )
    effect: ClassVar[str] = (
        "a `kda_verify`, which fills inputs `log.<layer>.keys`, `.decays`, `.deltas` and `.inputs` and writes no state"
    )

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Log all recurrent states or, where one cannot be, none."""
        if context.config.phase != PHASE:
            return PassResult(False)
        graph = program.graph_module.graph
        layers = [_checked(graph, node) for node in graph.find_nodes(op="call_function", target=_PREFILL)]
        _require_all(program, layers)
        remarks = [self._passed(_rewritten(program, layer), layer) for layer in layers]
        purity.dead_code(graph)
        graph.lint()
        program.graph_module.recompile()
        return PassResult(bool(layers), tuple(remarks), {"logged": len(layers)})

    def _passed(self, node: Node, layer: Layer) -> Remark:
        replaced = (layer.mixing.name, layer.rule.name)
        told = f"{', '.join(replaced)} became {node.name}, which writes no state"
        return Remark("passed", self.name, told, node.name, source_line(node), nodes=(*replaced, node.name), via="mark")


_PREFILL = OPERATORS["kda_prefill"].overload
_CONVOLUTION = OPERATORS["short_conv"].overload


def _checked(graph: Graph, rule: Node) -> Layer:
    """The layer of a delta rule; UsageError, with the reason, where it is none that can be logged."""
    try:
        return _layer(graph, rule)
    except Refused as refusal:
        raise UsageError(
            f"phase {PHASE}: {rule.name} ({described(rule)}) cannot be logged: {refusal.reason}; drafts need a layer "
            "of the form that kimi_k31 has"
        ) from refusal


def _layer(graph: Graph, rule: Node) -> Layer:
    given = bind(rule)
    if given["a_log"] is None or not given["l2_norm"] or given["cu_seqlens"] is not None:
        raise Refused("its gate and norms are computed before it, or its sequences are packed", rule)
    sizes = dict(zip("bshk", shape(given["q"]), strict=True)) | {"v": shape(given["v"])[-1]}
    convolution, mixing = _convolution(graph, given, sizes)
    read_out, final = _result(rule, 0), _result(rule, 1)
    writes = (_write(given["initial_state"], final, rule), convolution.write)
    neighbours = neighbours_of(read_out, sizes)
    out = returned_as(neighbours.out if neighbours.path else read_out, dtype(convolution.x.node))
    for what in (neighbours.out_gate, neighbours.norm_weight):
        if what is not None:
            require_unwritten(graph, "what follows the read-out", what, out)
    return Layer(rule, given, convolution, mixing, writes, neighbours, out, sizes)


def _convolution(graph: Graph, given: dict[str, Any], sizes: dict[str, int]) -> tuple[Convolution, Node]:
    """The convolution that q, k and v are channels of, in this order, heads major; and the node that it is known by."""
    bases = [peel(given[name], casts="none")[0] for name in ("q", "k", "v")]
    source = bases[0].args[0] if bases[0].args else None
    if isinstance(source, Node) and source.target is _CONVOLUTION and bases[0].args[1] == 0:
        if not bind(source)["activation"]:
            raise Refused("q, k and v do not come from one convolution with SiLU", source)
        found, mixing = _marked(source), source
        columns, channel_stride = sizes["s"], 1
    elif packet(bases[0]) == "silu":
        found = convolution_over(bases[0])
        window, write = found.path[-2:]
        if set(found.state.users) != {window, write} or write.users:
            raise Refused(f"{found.state.name} is used elsewhere, or not replaced by {window.name}", found.state)
        columns = channel_stride = shape(bases[0])[-1]
        mixing = next(node for node in found.path if packet(node) in ("conv1d", "convolution"))
    else:
        raise Refused(f"q comes from {described(bases[0])}, not from a short_conv", bases[0])
    if not bases[0] is bases[1] is bases[2]:
        raise Refused("q, k and v do not come from one convolution with SiLU", bases[0])
    _require_channels(given, sizes, columns, channel_stride)
    for what in (found.x, found.weight):
        require_unwritten(graph, "the convolution's operands", what, mixing)
    return found, mixing


def _marked(convolution: Node) -> Convolution:
    """A ``short_conv`` in the form of one that was matched."""
    given = bind(convolution)
    write = _write(given["initial_state"], _result(convolution, 1), convolution)
    x, weight = (Operand(given[name], shape(given[name]), convolution) for name in ("x", "weight"))
    return Convolution(x, weight, given["initial_state"], write, (convolution,))


def _require_channels(given: dict[str, Any], sizes: dict[str, int], columns: int, channel_stride: int) -> None:
    """Refuse unless q, k and v are their channels of the last tokens, where a channel is ``channel_stride`` from the
    next: 1 in [B, S, C], the ``columns`` in [B, C, columns]."""
    key_width, width = sizes["h"] * sizes["k"], sizes["h"] * (2 * sizes["k"] + sizes["v"])
    token_stride = width if channel_stride == 1 else 1
    for name, start, axis in (("q", 0, "k"), ("k", key_width, "k"), ("v", 2 * key_width, "v")):
        base, chain = peel(given[name], casts="none")
        leaf = Occurrence(given[name], base, tuple(chain), Frame.of("bsh" + axis))
        strides = {
            "b": columns * width,
            "s": token_stride,
            "h": sizes[axis] * channel_stride,
            axis: channel_stride,
        }
        first = start * channel_stride + (columns - sizes["s"]) * token_stride
        require_layout(name, leaf, {one: stride if sizes[one] > 1 else 0 for one, stride in strides.items()}, first)


def _result(node: Node, number: int) -> Node:
    """The one node that takes a result of a call."""
    users = [user for user in node.users if user.args[1] == number]
    if len(users) != 1:
        raise Refused(f"result {number} of {node.name} is taken {len(users)} times", node)
    return users[0]


def _write(state: Any, value: Node, reader: Node) -> Node:
    """The copy that makes ``value`` the new state, when nothing else reads or writes either."""
    if not isinstance(state, Node) or state.op != "placeholder":
        raise Refused("a state is no input of the step", reader)
    writes = [user for user in state.users if user.target is ATEN.copy_.default and user.args[1] is value]
    if len(writes) != 1 or set(state.users) != {reader, writes[0]} or set(value.users) != {writes[0]}:
        raise Refused(f"{state.name} is used elsewhere, or not replaced by {value.name}", state)
    if writes[0].users:
        raise Refused(f"{state.name} is read behind its write", writes[0])
    return writes[0]


def _require_all(program: CapturedProgram, layers: list[Layer]) -> None:
    """UsageError where a recurrent state is written by anything but the layers."""
    known = {write for layer in layers for write in layer.writes}
    states = {
        spec.name
        for spec in program.inputs
        if spec.descriptor and isinstance(parse_descriptor(spec.descriptor), StateDescriptor | ConvDescriptor)
    }
    for node in program.graph_module.graph.nodes:
        for written in purity.mutated_arguments(node):
            if node not in known and purity.storage_root(written).name in states:
                raise UsageError(
                    f"phase {PHASE}: {node.name} ({described(node)}) writes the recurrent state {written.name}, which "
                    "then could not be taken back: capture with marks, and leave raise-kda in the pipeline"
                )


def _rewritten(program: CapturedProgram, layer: Layer) -> Node:
    """Put ``kda_verify`` in the layer's place, erase the writes of its states."""
    graph, place, given, after = program.graph_module.graph, layer.out, layer.arguments, layer.neighbours
    conv, sizes, state = layer.convolution, layer.sizes, given["initial_state"]
    gate = _flat_gate(graph, given["g"], sizes, place)
    node = call(
        graph,
        OPERATORS["kda_verify"].overload,
        (
            *(build(graph, conv.x, place), build(graph, conv.weight, place), conv.state),
            *(gate, given["dt_bias"], given["a_log"], given["beta"], state),
            *_log(program, state, conv.state, sizes),
            *(None if one is None else build(graph, one, place) for one in (after.out_gate, after.norm_weight)),
        ),
        {
            "scale": given["scale"],
            "l2_eps": given["l2_eps"],
            "lower_bound": given["lower_bound"],
            "norm_eps": 1e-5 if after.norm_eps is None else after.norm_eps,
            "state_layout": given["state_layout"],
        },
        like=layer.rule,
        before=place,
        replaces=(layer.mixing, layer.rule),
    )
    for write in layer.writes:
        graph.erase_node(write)
    kept = (state.name, conv.state.name)
    program.inputs = tuple(dataclasses.replace(x, mutated=False) if x.name in kept else x for x in program.inputs)
    result = node
    if shape(place) != shape(node):
        result = call(graph, ATEN.view.default, (node, list(shape(place))), like=node, before=place)
    replace(place, result)
    return node


def _flat_gate(graph: Graph, gate: Node, sizes: dict[str, int], place: Node) -> Node:
    """The gate's logits as [B, S, H * K] where they were made so, as [B, S, H, K] elsewhere."""
    base, chain = peel(gate, casts="none")
    leaf = Occurrence(gate, base, tuple(chain), Frame.of("bshk"))
    wanted = (sizes["b"], sizes["s"], sizes["h"] * sizes["k"])
    try:
        return build(graph, operand("the gate", leaf, "bshk", sizes, wanted), place)
    except Refused:
        return gate


def _log(program: CapturedProgram, state: Node, conv: Node, sizes: dict[str, int]) -> list[Node]:
    """Inputs for the records of a layer, contiguous."""
    sources = {spec.name: spec.source for spec in program.inputs}
    layer = sources[state.name].split(".")[1]
    kinds = {
        "keys": ("bshk", "float32"),
        "decays": ("bshk", "float32"),
        "deltas": ("bshv", "float32"),
        "inputs": ("bsc", str(dtype(conv)).removeprefix("torch.")),
    }
    sizes = sizes | {"c": shape(conv)[1]}
    made: list[Node] = []
    for part, (axes, kind) in kinds.items():
        extent = tuple(sizes[axis] for axis in axes)
        stride = tuple(torch.empty(extent, device="meta").stride())
        name = f"log_{layer}_{part}"
        spec = InputSpec(name, "cache", f"log.{layer}.{part}", extent, stride, kind, mutated=True)
        made.append(add_input(program, spec, f"phase {PHASE}"))
    return made
