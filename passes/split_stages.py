"""``split-stages``: of the layers of a step one stage of a pipeline is kept, and what crosses is named.

What arrives from earlier stages becomes inputs, what later ones need becomes outputs. With Attention Residuals that is
the running sum and every finished block, each once; what a stage only hands on is not in its program.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from kimigraph.ir.fake import fake_mode
from kimigraph.ir.program import CapturedProgram, InputSpec, OutputSpec
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.ir.stages import BOUNDARY, Crossing, Stage, layer_of, layer_spans, layers_of
from kimigraph.passes.algebra.rewrite import replace
from kimigraph.passes.base import Pass, PassContext
from kimigraph.passes.staging.cut import Cut, Origin, erase_all_but


@dataclass(frozen=True)
class SplitStages(Pass):
    """Keeps stage ``stage`` of the ``pp`` stages of the compilation; with one it does nothing.

    UsageError for more stages than layers, CompileError for a cache or state that two stages would need.
    """

    name: ClassVar[str] = "split-stages"
    summary: ClassVar[str] = "of the layers one pipeline stage is kept, with what crosses its boundaries"
    changes_formats: ClassVar[bool] = True
    pattern: ClassVar[str] = "weights, caches and states by the layer that their names say, and what is made of them"
    constraints: ClassVar[tuple[str, ...]] = (
        "`--pp` is more than 1, and at most the number of layers",
        "no cache or state is used by two stages",
    )
    effect: ClassVar[str] = (
        "the nodes of one stage; `boundary.*` inputs and outputs, each value once; positions and masks in each stage"
    )

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Cut at the stage's first and last layer."""
        stages, number = context.config.pp, context.config.stage
        if stages == 1:
            return PassResult(False)
        spans = layer_spans(layers_of([spec.source for spec in program.inputs]), stages)
        graph, cut = program.graph_module.graph, _cut(program, spans)
        needs = cut.needs()

        def crossing(first: int, made_before: int) -> list[Node]:
            """What stages from ``first`` on need of what stages before ``made_before`` make, in order."""
            found = {node for need in needs[first:] for node in need.arriving}
            return [node for node in graph.nodes if node in found and cut.origins[node].stage < made_before]

        receives, leaving = crossing(number, number), crossing(number + 1, number + 1)
        kept = needs[number].kept
        arriving = [node for node in receives if node in needs[number].arriving]
        stage = Stage(number, stages, spans[number], _crossings(receives), _crossings(leaving))
        _return(program, [node for node in leaving if node not in receives], stage.is_last)
        _keep(program, kept, arriving)
        program.info["pipeline"] = stage.as_info()
        return _result(self.name, stage, len(graph.nodes))


def _cut(program: CapturedProgram, spans: list[tuple[int, int]]) -> Cut:
    """The cut; weights, caches and states are of the stage of their layer, what has no layer of any."""
    origins: dict[Node, Origin] = {}
    held: set[Node] = set()
    for spec, node in zip(program.inputs, program.placeholders.values(), strict=True):
        layer = layer_of(spec.source)
        stage = 0 if layer is None else next(i for i, (_, beyond) in enumerate(spans) if layer < beyond)
        state = spec.kind == "cache" and layer is not None
        origins[node] = Origin(stage, spec.kind == "weight", spec.kind in ("cache", "input"), state)
        if spec.mutated or state:
            held.add(node)
    return Cut(program.graph_module.graph, len(spans), origins, frozenset(held))


def _crossings(nodes: list[Node]) -> tuple[Crossing, ...]:
    return tuple(_crossing(node) for node in nodes)


def _crossing(node: Node) -> Crossing:
    value: torch.Tensor = node.meta["val"]
    return Crossing(BOUNDARY + node.name, tuple(value.shape), str(value.dtype).removeprefix("torch."))


def _return(program: CapturedProgram, leaving: list[Node], is_last: bool) -> None:
    """Let the program return what later stages need; the last one keeps the results of the model."""
    if is_last:
        return
    [*_, output] = program.graph_module.graph.nodes
    output.args = (tuple(leaving),)
    program.outputs = tuple(OutputSpec(BOUNDARY + node.name, BOUNDARY + node.name) for node in leaving)
    program.out_spec = None


def _keep(program: CapturedProgram, kept: set[Node], arriving: list[Node]) -> None:
    """Make what arrives inputs, and drop all that the stage does not need."""
    graph = program.graph_module.graph
    [*_, output] = graph.nodes
    last = list(program.placeholders.values())[-1]
    specs = {spec.name: spec for spec in program.inputs}
    for node in arriving:
        with graph.inserting_after(last):
            last = graph.placeholder(f"boundary_{node.name}")
        last.meta["val"] = _contiguous(node.meta["val"], graph)
        specs[last.name] = _input(last, _crossing(node))
        if last.meta["val"].stride() == node.meta["val"].stride():
            node.replace_all_uses_with(last, propagate_meta=False)
        else:
            replace(node, last)
        kept.add(last)
    erase_all_but(graph, {*kept, output})
    program.inputs = tuple(specs[node.name] for node in program.placeholders.values())
    names = {spec.name for spec in program.inputs}
    program.tensors = {name: tensor for name, tensor in program.tensors.items() if name in names}
    program.in_spec = None
    graph.lint()
    program.graph_module.recompile()


def _contiguous(value: Any, graph: Any) -> torch.Tensor:
    with fake_mode(graph):
        return torch.empty(tuple(value.shape), dtype=value.dtype, device=value.device)


def _input(node: Node, crossing: Crossing) -> InputSpec:
    value: torch.Tensor = node.meta["val"]
    whole = None if value.dtype.is_floating_point or value.dtype == torch.bool else (0, 1)
    return InputSpec(
        node.name,
        "input",
        crossing.name,
        crossing.shape,
        tuple(value.stride()),
        crossing.dtype,
        value_range=whole,
    )


def _result(name: str, stage: Stage, nodes: int) -> PassResult:
    arrives, goes, through = (
        sum(item.nbytes for item in items) for items in (stage.receives, stage.sends, stage.passes_on)
    )
    told = (
        f"stage {stage.number} of {stage.stages} has layers {stage.layers[0]} to {stage.layers[1] - 1}: "
        f"{len(stage.receives)} values ({arrives:,} bytes) arrive and {len(stage.sends)} ({goes:,} bytes) go on, "
        f"{len(stage.passes_on)} of them ({through:,} bytes) without being touched"
    )
    boundary = [f"boundary_{item.name.removeprefix(BOUNDARY)}" for item in stage.receives if item not in stage.sends]
    boundary += [item.name.removeprefix(BOUNDARY) for item in stage.sends if item not in stage.receives]
    counts = {"nodes": nodes, "receives": len(stage.receives), "sends": len(stage.sends)}
    counts |= {"bytes_received": arrives, "bytes_sent": goes}
    remark = Remark("passed", name, told, boundary[0] if boundary else "", nodes=tuple(boundary))
    return PassResult(True, (remark,), counts)
