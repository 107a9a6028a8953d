"""Printed programs. ``python tests/ir/test_printer.py`` rewrites the expected text after a change that is meant."""

import math
import operator
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from kimigraph.ir.errors import CompileError
from kimigraph.ir.printer import format_argument, format_call, print_program
from kimigraph.ir.program import CapturedProgram, InputSpec, OutputSpec
from kimigraph.ir.regions import extract_region
from kimigraph.ir.script import main, make_inputs
from kimigraph.ir.seeded import checksum
from kimigraph.ir.spelling import variable_names
from kimigraph.ir.verifier import verify

ATEN = torch.ops.aten
EXPECTED = Path(__file__).with_name("printed_program.expected")
RUN_HERE = Path(__file__).resolve().parents[2]


def small_program() -> CapturedProgram:
    """Two modules, a written cache, a region, a constant, a semantic operator, and names that need care."""

    def function(keys, w, table, x, index):
        q = x @ w
        scaled = (q * table).relu() + -0.0
        written = keys.index_copy_(1, index, x)
        picks = torch.ops.kimigraph.lightning_indexer(scaled.unsqueeze(2), written, q[..., :1], k=2, scale=0.5)
        masked = torch.where(picks < 0, -math.inf, q[..., :2] + scaled[..., :2])
        values, _ = torch.topk(masked, 1)
        return picks, values, torch.ops.aten.arange.default(3, dtype=torch.int32, device=torch.device("cpu"))

    specs = (
        InputSpec("keys", "cache", "cache.0.index_key", (1, 4, 3), (12, 3, 1), "float32", mutated=True),
        InputSpec("w", "weight", "layers.0.w", (3, 3), (1, 3), "float32"),
        InputSpec("table", "constant", 'a "table"', (3,), (1,), "float32"),
        InputSpec("x", "input", "x", (1, 1, 3), (3, 3, 1), "float32"),
        InputSpec("index", "input", "index", (1,), (1,), "int64", value_range=(0, 4)),
    )
    tensors = [torch.empty_strided(spec.shape, spec.stride, dtype=getattr(torch, spec.dtype)).zero_() for spec in specs]
    graph_module = make_fx(function, tracing_mode="fake")(*tensors)
    graph = graph_module.graph
    for node, spec in zip(list(graph.nodes), specs, strict=False):
        node.name = spec.name
    nodes = {node.name: node for node in graph.nodes}
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta.pop("nn_module_stack", None)
    first = {"a": ("L['self'].layers.0.proj", torch.nn.Linear)}
    for name in ("mm", "mul", "relu", "add"):
        if name in nodes:
            nodes[name].meta["nn_module_stack"] = first
    nodes["lightning_indexer"].meta["nn_module_stack"] = {"a": ("layers.0", "some.package.Layer"), "b": ("", None)}
    nodes["lightning_indexer"].meta["replaces"] = ("matmul_1", "relu_1", "topk")
    nodes["lightning_indexer"].meta["selects"] = "topk"
    outputs = tuple(OutputSpec(name, name) for name in ("picks", "values", "steps"))
    output = nodes["output"]
    output.args = (tuple(output.args[0]),)
    nodes["relu"].name = "step"
    extract_region(graph_module, [nodes["mul"], nodes["relu"]], "region_0", "pointwise")
    graph_module.recompile()
    table = torch.tensor([1.5, -0.0, 1e-7])
    return CapturedProgram(graph_module, specs, outputs, {"table": table})


def checksums(program: CapturedProgram, seed: int = 0) -> dict[str, list[float]]:
    """Name and checksum of every result of the graph itself, on the same seeded tensors."""
    constants = {spec.source: program.tensors[spec.name] for spec in program.inputs if spec.kind == "constant"}
    tensors = make_inputs(program.inputs, constants, seed)
    results = program.graph_module(*tensors)
    sums = {spec.name: checksum(spec.name, value, seed) for spec, value in zip(program.outputs, results, strict=True)}
    pairs = zip(program.inputs, tensors, strict=True)
    return sums | {spec.source: checksum(spec.source, value, seed) for spec, value in pairs if spec.mutated}


def printed(text: str) -> dict[str, list[float]]:
    rows = (line.rsplit(" ", 3) for line in text.splitlines())
    return {name: [float(number) for number in numbers] for name, *numbers in rows}


def run_here(path: Path, capsys, *arguments: str) -> str:
    """What the script prints when this process runs it."""
    space = runpy.run_path(str(path), run_name="printed")
    main(space["step"], space["INPUTS"], space["OUTPUTS"], space["CONSTANTS"], arguments)
    return capsys.readouterr().out


def run_script(path: Path, *arguments: str) -> str:
    """What the script prints when a process of its own runs it."""
    program = (
        "import runpy, sys; sys.argv = sys.argv[1:]; sys.path.insert(0, '.');"
        " runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path), *arguments],
        cwd=RUN_HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def expected_text() -> str:
    return print_program(small_program(), title="A small program", note="Made by hand.")


def test_the_expected_text():
    assert expected_text() == EXPECTED.read_text(), f"run: python {Path(__file__).name} if the change is meant"


def test_the_text_depends_on_the_program_alone():
    program = small_program()
    assert print_program(program) == print_program(program.copy()) == print_program(small_program())


def test_the_script_prints_the_checksums_of_the_graph(tmp_path, capsys):
    program = small_program()
    verify(program)
    script = tmp_path / "000-capture.py"
    script.write_text(print_program(program))
    assert printed(run_script(script)) == checksums(program)
    assert printed(run_here(script, capsys, "--seed", "3")) == checksums(program, seed=3)
    assert checksums(program, seed=3) != checksums(program)
    assert checksums(program)["cache.0.index_key"][1] > 0


def test_weights_are_bound_by_their_source_names(tmp_path, capsys):
    program = small_program()
    script = tmp_path / "program.py"
    script.write_text(print_program(program))
    save_file({"layers.0.w": torch.full((3, 3), 0.25), "other": torch.ones(1)}, tmp_path / "model.safetensors")
    got = printed(run_here(script, capsys, "--weights", str(tmp_path)))
    assert got != checksums(program)
    tensors = make_inputs(program.inputs, {'a "table"': program.tensors["table"]}, 0)
    tensors[1].fill_(0.25)
    results = program.graph_module(*tensors)
    assert got["values"] == checksum("values", results[1])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "1 weights of the program are missing, layers.0.w among them"),
        ({"layers.0.w": torch.zeros(3, 4)}, r"layers.0.w is \[3, 4\], the program wants \[3, 3\]"),
    ],
)
def test_weights_that_do_not_fit(tmp_path, files, message):
    program = small_program()
    save_file({**files, "other": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(SystemExit, match=message):
        main(lambda *_: (), program.inputs, (), {'a "table"': program.tensors["table"]}, ["--weights", str(tmp_path)])


def test_a_constant_without_a_value_is_an_error():
    program = small_program()
    with pytest.raises(CompileError, match='constant a "table": the program holds no value for it'):
        print_program(replace(program, tensors={}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (9, 11)])
def test_constants_keep_their_bits(dtype, shape):
    """Small ones as lists, others as bytes; strides stay."""
    value = (torch.randn(shape) * 3).to(dtype)
    for tensor in (value, value.mT if value.dim() == 2 else value):
        graph = Graph()
        root = torch.nn.Module()
        root.register_buffer("table", tensor)
        node = graph.get_attr("table")
        node.meta["val"] = tensor
        graph.output((node,))
        program = CapturedProgram(torch.fx.GraphModule(root, graph), (), (OutputSpec("table", "table"),))
        space: dict[str, object] = {"__name__": "printed"}
        exec(print_program(program), space)
        (got,) = space["step"]()
        assert got.dtype == dtype and got.shape == tensor.shape
        assert tensor.numel() == 0 or got.stride() == tensor.stride()
        same = torch.equal(got.contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8))
        assert same or tensor.numel() == 0


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, -3, 2**70, 0.1, -0.0, 1e-45, math.inf, -math.inf, 1 + 2j, "it's \"\n", torch.float32,
        torch.device("cpu"), torch.device("cuda", 1), torch.contiguous_format, torch.strided, slice(None, 3, -1), ...,
        [1, [2.5, None]], (1,), (), [], {"a": (1, 2)}, (slice(0, 1), ...),
    ],
)  # fmt: skip
def test_literals_evaluate_to_the_value(value):
    text = format_argument(value, lambda node: node.name)
    again = eval(text, {"torch": torch})
    assert type(again) is type(value) and repr(again) == repr(value)


def test_nan_and_subclasses_of_numbers():
    class Odd(float):
        def __repr__(self):
            return "Odd()"

    assert math.isnan(eval(format_argument(math.nan, str)))
    assert format_argument(Odd(0.5), str) == "0.5"


def test_what_has_no_literal_is_named():
    graph = Graph()
    x = graph.placeholder("x")
    node = graph.call_function(ATEN.add.Tensor, (x, torch.zeros(1)))
    with pytest.raises(CompileError, match="node add_tensor: an argument of type Tensor"):
        format_call(node, lambda n: n.name)
    other = graph.call_function(torch.nn.functional.silu, (x,))
    with pytest.raises(CompileError, match=r"node silu: it calls .* which has no spelling"):
        format_call(other, lambda n: n.name)


@pytest.mark.parametrize(
    ("target", "arguments", "options", "text"),
    [
        (ATEN.add.Tensor, (1,), {"alpha": 2}, "torch.ops.aten.add.Tensor(x, 1, alpha=2)"),
        (ATEN.linear.default, (None,), {}, "torch.ops.aten.linear.default(x, None)"),
        (operator.getitem, (1,), {}, "x[1]"),
        (operator.getitem, (slice(1, None, None),), {}, "operator.getitem(x, slice(1, None, None))"),
        (operator.add, (1,), {}, "operator.add(x, 1)"),
        (math.floor, (), {}, "math.floor(x)"),
        (torch.sym_min, (2,), {}, "torch.sym_min(x, 2)"),
        (getattr(ATEN.random_, "from"), (0, 5), {}, 'getattr(torch.ops.aten.random_, "from")(x, 0, 5)'),
        (ATEN.random_.to, (), {"to": 5}, "torch.ops.aten.random_.to(x, to=5)"),
        (dict, (), {"from": 1}, None),
    ],
)
def test_calls(target, arguments, options, text):
    graph = Graph()
    node = graph.call_function(target, (graph.placeholder("x"), *arguments), options)
    if text is None:
        with pytest.raises(CompileError, match="no spelling"):
            format_call(node, lambda n: n.name)
    else:
        assert format_call(node, lambda n: n.name) == text


def test_variables_are_identifiers_of_their_own():
    graph = Graph()
    names = ("x", "step", "lambda", "step_", "2nd part", "x")
    nodes = [graph.placeholder("x") for _ in names]
    for node, name in zip(nodes, names, strict=True):
        node.name = name
    got = list(variable_names(nodes, frozenset({"step"})).values())
    assert got == ["x", "step_", "lambda_", "step__", "_2nd_part", "x_"]


def test_methods_are_spelled_on_their_tensor():
    graph = Graph()
    node = graph.call_method("copy_", (graph.placeholder("x"), graph.placeholder("y")))
    assert format_call(node, lambda n: n.name) == "x.copy_(y)"


if __name__ == "__main__":
    EXPECTED.write_text(expected_text())
