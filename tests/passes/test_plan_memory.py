"""The memory plan: against every pair of tensors by brute force, the bound, and values in an arena full of NaN."""

import operator
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph, GraphModule, Interpreter, Node

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.fake import infer_all
from kimigraph.ir.lifetimes import new_tensors
from kimigraph.ir.memory_plan import ALIGNMENT, arena_bytes, places, print_map
from kimigraph.ir.program import CapturedProgram, InputSpec, OutputSpec
from kimigraph.passes import PassContext
from kimigraph.passes.memory.offsets import place_all
from kimigraph.passes.plan_memory import PlanMemory

torch.set_num_threads(1)
ATEN = torch.ops.aten
CONTEXT = PassContext(CompileConfig(target="cpu:reference"))
VIEWS = (ATEN.view.default, ATEN.t.default)
ROWS, COLUMNS = 6, 40


def program(steps: list[tuple[str, int, int]]) -> CapturedProgram:
    """A graph in which every step takes one or two of the values before it; the last value is returned."""
    graph, values = Graph(), []
    with torch._subclasses.FakeTensorMode():
        given_values = [torch.empty(ROWS, COLUMNS) for _ in range(2)]
    for name, value in zip(("x", "y"), given_values, strict=True):
        values.append(graph.placeholder(name))
        values[-1].meta["val"] = value
    own: list[Node] = []  # what may be written in place
    for kind, first, second in steps:
        a, b = values[first % len(values)], values[second % len(values)]
        if kind == "add_" and own:
            target = own[first % len(own)]
            values.append(graph.call_function(ATEN.add_.Tensor, (target, b)))
        elif kind == "view":
            turned = graph.call_function(ATEN.view.default, (a, [COLUMNS, ROWS]))
            values.append(graph.call_function(ATEN.view.default, (turned, [ROWS, COLUMNS])))
        elif kind == "copy":  # reshape of a transposed matrix copies
            turned = graph.call_function(ATEN.t.default, (a,))
            values.append(graph.call_function(ATEN.reshape.default, (turned, [ROWS, COLUMNS])))
        elif kind == "sort":
            pair = graph.call_function(ATEN.sort.default, (a, -1))
            values.append(graph.call_function(operator.getitem, (pair, 0)))
        else:
            values.append(graph.call_function(ATEN.add.Tensor, (a, b)))
            own.append(values[-1])
    graph.output((graph.call_function(ATEN.neg.default, (values[-1],)),))
    module = GraphModule(torch.nn.Module(), graph)
    infer_all(module)
    inputs = tuple(InputSpec(n, "input", n, (ROWS, COLUMNS), (COLUMNS, 1), "float32") for n in ("x", "y"))
    return CapturedProgram(module, inputs, (OutputSpec("out", "out"),))


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "view", "copy", "sort", "add_"]), st.integers(0, 99), st.integers(0, 99)),
    min_size=1,
    max_size=25,
)


class InArena(Interpreter):
    """Runs a graph with every planned tensor in its bytes, which hold NaN until it is made."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.arena = torch.full((arena_bytes(module.graph),), 0xFF, dtype=torch.uint8)

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        found = places(n) if n.target is not operator.getitem else ()
        if not found:
            return result
        items = list(result) if isinstance(result, tuple | list) else [result]
        laid = [item if place is None else self._lay(item, place) for item, place in zip(items, found, strict=True)]
        return tuple(laid) if isinstance(result, tuple | list) else laid[0]

    def _lay(self, value: torch.Tensor, place: tuple[int, int]) -> torch.Tensor:
        offset, nbytes = place
        self.arena[offset : offset + nbytes] = 0xFF
        typed = self.arena[offset : offset + nbytes].view(value.dtype)
        return torch.as_strided(typed, value.shape, value.stride(), typed.storage_offset()).copy_(value)


@given(STEPS)
@settings(max_examples=60, deadline=None)
def test_values_in_the_arena_are_those_of_the_graph(steps: list[tuple[str, int, int]]) -> None:
    made = program(steps)
    PlanMemory().apply(made, CONTEXT)
    x, y = torch.randn(ROWS, COLUMNS), torch.randn(ROWS, COLUMNS)
    [wanted] = made.graph_module(x.clone(), y.clone())
    [got] = InArena(made.graph_module).run(x.clone(), y.clone())
    assert torch.equal(got, wanted)


@given(STEPS)
@settings(max_examples=60, deadline=None)
def test_tensors_that_overlap_are_never_in_use_together(steps: list[tuple[str, int, int]]) -> None:
    made = program(steps)
    graph = made.graph_module.graph
    result = PlanMemory().apply(made, CONTEXT)
    position = {node: index for index, node in enumerate(graph.nodes)}
    spans = []
    for tensor in new_tensors(graph):
        found = places(tensor.maker)
        if tensor.kept or not found:
            assert tensor.kept and not found
            continue
        offset, nbytes = found[tensor.index or 0]
        assert offset % ALIGNMENT == 0
        # Independent of the plan's own lifetimes; a view alone touches no bytes, whoever reads it does.
        of = {tensor.maker, *tensor.names}
        working = [node for node in graph.nodes if node.target not in (*VIEWS, operator.getitem)]
        users = [node for node in working for argument in node.all_input_nodes if _comes_from(argument, of)]
        spans.append(
            (position[tensor.maker], max(map(position.get, users), default=position[tensor.maker]), offset, nbytes)
        )
    for one in spans:
        for other in spans:
            if one is not other and one[2] < other[2] + other[3] and other[2] < one[2] + one[3]:
                assert one[1] < other[0] or other[1] < one[0]
    assert (
        result.statistics["lower bound"] <= result.statistics["arena bytes"] <= 1.1 * result.statistics["lower bound"]
    )


def _comes_from(node: Node, makers: set[Node]) -> bool:
    """Whether the node is a maker or a view of what one made; a reshape of a transposed matrix is a copy."""
    while node not in makers:
        if node.target in (*VIEWS, ATEN.add_.Tensor):
            node = node.args[0]
        else:
            return False
    return True


def test_side_streams_share_only_behind_an_event() -> None:
    steps = [("add", 0, 1), ("add", 2, 0), ("add", 2, 1), ("add", 3, 4)]  # A -> (B, C) -> D
    made = program(steps)
    nodes = [node for node in made.graph_module.graph.nodes if node.target is ATEN.add.Tensor]
    nodes[1].meta["stream"], nodes[1].meta["waits"] = 1, (nodes[0].name,)
    nodes[3].meta["waits"] = (nodes[1].name,)
    PlanMemory().apply(made, CONTEXT)
    b, c = nodes[1].meta["buffer"], nodes[2].meta["buffer"]
    assert b[0] != c[0] and nodes[0].meta["buffer"][0] not in (b[0], c[0])


def test_place_all_reaches_the_bound_where_one_order_fails() -> None:
    sizes, spans = [256, 256, 512, 256], [(0, 1), (1, 2), (2, 3), (3, 4)]

    conflicts = [
        [b for b in range(4) if a != b and spans[a][1] >= spans[b][0] and spans[b][1] >= spans[a][0]] for a in range(4)
    ]
    offsets = place_all(sizes, conflicts, 768)
    assert max(o + s for o, s in zip(offsets, sizes, strict=True)) == 768


def test_the_map_names_tensors_and_the_bound() -> None:
    made = program([("add", 0, 1), ("sort", 2, 0), ("add", 3, 2)])
    PlanMemory().apply(made, CONTEXT)
    text = print_map(made.graph_module.graph)
    assert "arena: " in text and "in use at once: " in text and "sort_default[1]" in text


def test_planning_again_gives_the_same_plan() -> None:
    made = program([("add", 0, 1), ("copy", 2, 0), ("add", 3, 2)])
    plans = []
    for _ in range(2):
        PlanMemory().apply(made, CONTEXT)
        plans.append([node.meta.get("buffer") for node in made.graph_module.graph.nodes])
    assert plans[0] == plans[-1] and any(plans[0])
