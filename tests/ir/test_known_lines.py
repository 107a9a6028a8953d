"""A program printed after every change with what is known of it is the program printed afresh."""

import pytest
import torch
from torch.fx import Node

from kimigraph.capture import capture_module
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.known_lines import KnownLines
from kimigraph.ir.printer import print_program
from kimigraph.ir.program import CapturedProgram

ATEN = torch.ops.aten


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        y = (x * 2 + 1).relu()
        state.add_(y.sum(0))
        return torch.cat([y, y * 3.0], -1) + state.sum()


@pytest.fixture
def program() -> CapturedProgram:
    return capture_module(Model(), (torch.ones(2, 4), torch.zeros(4)), {}, CompileConfig())


def node_of(program: CapturedProgram, name: str) -> Node:
    return next(node for node in program.graph_module.graph.nodes if node.name == name)


def test_every_change_shows(program: CapturedProgram) -> None:
    known = KnownLines()
    text = ""

    def printed() -> str:
        nonlocal text
        before, text = text, print_program(program, known=known)
        assert text == print_program(program) != before
        return text

    printed()
    graph = program.graph_module.graph
    mul, relu = node_of(program, "mul"), node_of(program, "relu")
    mul.args = (mul.args[0], 2.0)  # equal to 2, and another literal
    assert "2.0" in printed()
    relu.meta["stream"] = 1
    assert "stream 1" in printed()
    relu.meta["waits"] = ("mul",)
    assert "waits for mul" in printed()
    relu.meta["val"] = relu.meta["val"].double()
    assert "float64[2, 4]" in printed()
    relu.target = ATEN.gelu.default
    assert "gelu" in printed()
    relu.name = "renamed"
    assert "renamed = " in printed()
    with graph.inserting_before(relu):
        extra = graph.call_function(ATEN.neg.default, (mul,))
    extra.meta["val"] = mul.meta["val"]
    assert "aten.neg" in printed()
    relu.replace_input_with(next(iter(relu.all_input_nodes)), extra)
    printed()
    unused = next(node for node in graph.nodes if node.target is ATEN.add.Tensor and node.args[1] == 1)
    graph.erase_node(unused)
    printed()


def test_what_is_known_is_not_made_again(program: CapturedProgram) -> None:
    known, made = KnownLines(), []
    (relu,) = (node for node in program.graph_module.graph.nodes if node.name == "relu")
    for _ in range(3):
        assert known.line(relu, [], lambda: made.append(1) or "text") == "text"
    assert len(made) == 1
    (writer,) = (node for node in program.graph_module.graph.nodes if node.target is ATEN.add_.Tensor)
    for _ in range(2):
        known.line(writer, [], lambda: made.append(1) or "text")
    assert len(made) == 3  # a write tells which storage it changes, which may lie far away
