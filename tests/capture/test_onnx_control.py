"""Branches, loops and masks that pick in ONNX files: what the module computes is what onnxruntime computes."""

import copy
from pathlib import Path
from typing import Any

import numpy
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from kimigraph import load
from kimigraph.adapters.onnx_model import OnnxSession
from kimigraph.capture import load_source
from kimigraph.capture.onnx import builder, control, walk
from kimigraph.compiler import compile_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import CaptureError, KimigraphError, UsageError
from kimigraph.onnx_export import export_onnx

FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
X = numpy.linspace(-3, 3, 24, dtype=numpy.float32).reshape(2, 3, 4)


def ints(*values: int) -> Any:
    return numpy.array(values, dtype=numpy.int64)


def port(name: str, kind: int = FLOAT, shape: Any = None) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def node(kind: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    """Names apart by spaces; ``-`` is a name left out."""
    read = ["" if name == "-" else name for name in inputs.split()]
    return helper.make_node(kind, read, outputs.split(), name=f"{kind.lower()}_of_{outputs.split()[0]}", **attributes)


def graph(nodes: list[Any], inputs: list[Any], outputs: list[Any], **weights: Any) -> Any:
    held = [numpy_helper.from_array(numpy.asarray(value), name) for name, value in weights.items()]
    return helper.make_graph(nodes, "inner", inputs, outputs, held)


def model(nodes: list[Any], count: int = 1, inputs: list[Any] | None = None, **weights: Any) -> Any:
    outer = graph(
        nodes, inputs or [port("x", FLOAT, X.shape)], [onnx.ValueInfoProto(name=f"y{n}") for n in range(count)]
    )
    outer.initializer.extend(numpy_helper.from_array(numpy.asarray(value), name) for name, value in weights.items())
    proto = helper.make_model(outer, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return onnx.shape_inference.infer_shapes(proto)


def imported(proto: Any, path: Path, *overrides: tuple[str, str], **values: Any) -> list[torch.Tensor]:
    onnx.save_model(proto, str(path))
    module, args, _ = load_source(str(path), CompileConfig(overrides=overrides)).build()
    given = [torch.from_numpy(value.copy()) for value in values.values()] or [torch.from_numpy(X.copy())]
    assert [tuple(a.shape) for a in args] == [tuple(g.shape) for g in given]
    with torch.no_grad():
        return list(module(*given))


def check(proto: Any, path: Path, **values: Any) -> list[torch.Tensor]:
    got = imported(proto, path, **values)
    given = values or {"x": X}
    want = OnnxSession(path, 1).run({name: torch.from_numpy(value.copy()) for name, value in given.items()})
    for number, mine in enumerate(got):
        torch.testing.assert_close(mine, want[f"y{number}"], rtol=1e-5, atol=1e-5)
    return got


def refused(proto: Any, path: Path, *overrides: tuple[str, str], kind: type[Exception] = CaptureError) -> str:
    onnx.save_model(proto, str(path))
    with pytest.raises(kind) as caught:
        load_source(str(path), CompileConfig(overrides=overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def scan(**attributes: Any) -> Any:
    """A running sum over the tokens of ``x``, which also scales by a weight outside and adds one inside."""
    body = graph(
        [node("Mul", "row w", "scaled"), node("Add", "scaled bias", "shifted"), node("Add", "sum shifted", "next"),
         node("Relu", "next", "out")],
        [port("sum", FLOAT, [2, 4]), port("row", FLOAT, [2, 4])],
        [port("next", FLOAT, [2, 4]), port("out", FLOAT, [2, 4])],
        bias=numpy.full(4, 0.5, numpy.float32) * numpy.arange(4, dtype=numpy.float32),
    )  # fmt: skip
    return node("Scan", "start x", "y0 y1", body=body, num_scan_inputs=1, **attributes)


WEIGHTS = {"start": numpy.zeros((2, 4), numpy.float32), "w": numpy.arange(4, dtype=numpy.float32)}


@pytest.mark.parametrize(
    "attributes",
    [
        {"scan_input_axes": [1]},
        {"scan_input_axes": [1], "scan_input_directions": [1], "scan_output_axes": [-1]},
        {"scan_input_axes": [-2], "scan_output_directions": [1], "scan_output_axes": [1]},
    ],
)
def test_a_scan_turns_once_a_token(attributes: dict[str, Any], tmp_path: Path) -> None:
    check(model([scan(**attributes)], 2, **WEIGHTS), tmp_path / "m.onnx")


def loop(turns: str, going: str, last: Any) -> Any:
    """Adds ``x`` and the number of the turn to a sum, keeps each sum, and goes on while ``last`` says."""
    body = graph(
        [node("Cast", "turn", "number", to=FLOAT), node("Add", "sum x", "more"), node("Add", "more number", "next"),
         node("Identity", "next", "row"), last],
        [port("turn", INT, []), port("before", BOOL, []), port("sum", FLOAT, X.shape)],
        [port("after", BOOL, []), port("next", FLOAT, X.shape), port("row", FLOAT, X.shape)],
        limit=numpy.int64(2),
    )  # fmt: skip
    return node("Loop", f"{turns} {going} x", "y0 y1", body=body)


ALWAYS = node("Identity", "before", "after")
UNTIL = node("Less", "turn limit", "after")


@pytest.mark.parametrize(
    ("turns", "going", "last", "count"),
    [("n", "-", ALWAYS, 5), ("n", "go", ALWAYS, 5), ("-", "go", UNTIL, 3), ("n", "-", UNTIL, 3)],
)
def test_a_loop_turns_as_often_as_is_known(turns: str, going: str, last: Any, count: int, tmp_path: Path) -> None:
    proto = model([loop(turns, going, last)], 2, n=numpy.int64(5), go=numpy.bool_(True))
    assert check(proto, tmp_path / "m.onnx")[1].shape[0] == count


def test_a_loop_in_a_loop_reads_what_stands_around_both(tmp_path: Path) -> None:
    inner = graph(
        [node("Add", "s w", "s_next"), node("Identity", "b", "a")],
        [port("i", INT, []), port("b", BOOL, []), port("s", FLOAT, X.shape)],
        [port("a", BOOL, []), port("s_next", FLOAT, X.shape)],
    )
    outer = graph(
        [node("Loop", "three - t", "t_next", body=inner), node("Identity", "c", "d")],
        [port("j", INT, []), port("c", BOOL, []), port("t", FLOAT, X.shape)],
        [port("d", BOOL, []), port("t_next", FLOAT, X.shape)],
        three=numpy.int64(3),
    )
    proto = model([node("Loop", "two - x", "y0", body=outer)], two=numpy.int64(2), w=numpy.float32(0.25))
    torch.testing.assert_close(check(proto, tmp_path / "m.onnx")[0], torch.from_numpy(X) + 6 * 0.25)


def branch(condition: str, then: list[Any], otherwise: list[Any]) -> Any:
    graphs = {
        "then_branch": graph(then, [], [port(then[-1].output[0])], shift=numpy.float32(2)),
        "else_branch": graph(otherwise, [], [port(otherwise[-1].output[0])]),
    }
    return node("If", condition, "y0", **graphs)


ADDED, NEGATED = [node("Add", "x shift", "plus")], [node("Neg", "x", "minus")]


@pytest.mark.parametrize("truth", [True, False])
def test_a_branch_that_is_known_is_taken(truth: bool, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    check(model([branch("c", ADDED, NEGATED)], c=numpy.bool_(truth)), path)
    module, _, _ = load_source(str(path), CompileConfig()).build()
    assert sum(n.op == "call_function" for n in module.graph.nodes) == 1


@pytest.mark.parametrize("sign", [1, -1])
def test_a_branch_that_the_run_decides_is_a_choice(sign: int, tmp_path: Path) -> None:
    decided = [node("ReduceMax", "x", "m", keepdims=0), node("Greater", "m two", "c")]
    proto = model([*decided, branch("c", ADDED, NEGATED)], two=numpy.float32(2.9))
    check(proto, tmp_path / "m.onnx", x=X if sign == 1 else X * 0.5)


def test_an_input_that_decides_can_be_given(tmp_path: Path) -> None:
    longer = [node("Concat", "x x", "twice", axis=0)]
    inputs = [port("x", FLOAT, X.shape), port("use_cache_branch", BOOL, [1])]
    proto = model([branch("use_cache_branch", ADDED, longer)], inputs=inputs)
    text = refused(proto, tmp_path / "m.onnx")
    assert "node 'if_of_y0' (If) is decided in the run, and its result 'y0' is [2, 3, 4]" in text
    assert "--set 'value NAME=1'" in text
    for given, rows in (("1", 2), ("0", 4)):
        assert imported(proto, tmp_path / "m.onnx", ("value use_cache_branch", given))[0].shape[0] == rows
    assert "names no input" in refused(proto, tmp_path / "m.onnx", ("value nothing", "1"), kind=UsageError)
    assert "'yes' is no number" in refused(
        proto, tmp_path / "m.onnx", ("value use_cache_branch", "yes"), kind=UsageError
    )


RUN = [node("ReduceMax", "x", "m", keepdims=0), node("Greater", "m zero", "c"), node("Cast", "m", "k", to=INT)]
REFUSED = {
    "turns of the run": ([*RUN, loop("k", "-", ALWAYS)], "(Loop) turns as often as values of the run say"),
    "while": ([*RUN, loop("-", "c", ALWAYS)], "(Loop) goes on as long as values of the run say"),
    "for ever": ([loop("-", "go", ALWAYS)], "(Loop) turns 101 times over 5 nodes"),
    "often": ([loop("many", "-", ALWAYS)], "(Loop) turns 1000000000000 times over 5 nodes; programs have no loops"),
    "never": ([loop("none", "-", ALWAYS)], "turns not once"),
    "picks": ([*RUN, branch("c", [node("Gather", "x k", "row")], [node("Gather", "x zero_place", "first")])],
              "'gather_of_row' in a branch of it picks by values of the run"),
    "scan axes": ([scan(scan_input_axes=[5])], "(Scan) has axis 5"),
    "scan flags": ([scan(scan_input_axes=[0, 1])], "has 2 of scan_input_axes for 1 tensors"),
    "no body": ([node("Scan", "start x", "y0 y1", num_scan_inputs=1)], "(Scan) has no graph 'body'"),
    "inside": ([branch("go", [node("Det", "x", "det")], NEGATED)], "ai.onnx::Det: 'det_of_det' in if_of_y0"),
}  # fmt: skip


@pytest.fixture
def short_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """What many turns would do takes few."""
    for module in (control, walk):
        monkeypatch.setattr(module, "MOST_UNROLLED", 500)


@pytest.mark.usefixtures("short_loops")
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_program_can_be_names_its_node(name: str, tmp_path: Path) -> None:
    nodes, message = REFUSED[name]
    numbers = {"zero": numpy.float32(0), "go": numpy.bool_(True), "many": numpy.int64(10**12), "none": numpy.int64(0)}
    outer = graph(nodes, [port("x", FLOAT, X.shape)], [port("y0")], **WEIGHTS, **numbers, zero_place=numpy.int64(0))
    proto = helper.make_model(outer, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    assert message in refused(proto, tmp_path / "m.onnx")


def changed(proto: Any, change: Any) -> Any:
    proto = copy.deepcopy(proto)
    change(proto.graph.node[0].attribute)
    return proto


def body_of(attributes: Any) -> Any:
    return next(item.g for item in attributes if item.name == "body")


HOSTILE = {
    "huge": (lambda a: body_of(a).initializer[0].dims.__setitem__(0, 2**50), "weight 'bias' of body of node"),
    "outside": (lambda a: body_of(a).node[0].input.__setitem__(1, "nowhere"), "reads 'nowhere', which nothing makes"),
    "itself": (lambda a: body_of(a).node[0].input.__setitem__(1, "y0"), "in a circle: 'scan_of_y0'"),
    "twice": (lambda a: body_of(a).node[3].output.__setitem__(0, "next"), "'next' is made twice in body of node"),
    "unmade": (lambda a: body_of(a).output[0].__setattr__("name", "gone"), "output 'gone' is made by no node of body"),
    "circle": (lambda a: body_of(a).node[0].input.__setitem__(0, "shifted"), "of body of node 'scan_of_y0' wait for"),
    "string": (lambda a: body_of(a).initializer[0].__setattr__("data_type", TensorProto.STRING), "is of type STRING"),
    "sparse": (lambda a: body_of(a).sparse_initializer.add(), "holds 1 sparse weights"),
    "inputs": (lambda a: body_of(a).input.add(name="row"), "two inputs of body of node 'scan_of_y0' have one name"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_graph_inside_is_checked_as_the_graph_is(name: str, tmp_path: Path) -> None:
    change, message = HOSTILE[name]
    proto = changed(model([scan(scan_input_axes=[1])], 2, **WEIGHTS), change)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(UsageError) as caught:
        load_source(str(tmp_path / "m.onnx"), CompileConfig())
    assert message in str(caught.value)


@pytest.mark.usefixtures("short_loops")
def test_loops_in_loops_end_at_a_number_of_nodes(tmp_path: Path) -> None:
    """Loops of four turns, one in the other: the innermost would turn 10^20 times."""
    body = graph(
        [node("Identity", "b0", "a0"), node("Add", "s0 x", "t0")],
        [port("i0", INT, []), port("b0", BOOL, []), port("s0", FLOAT, X.shape)],
        [port("a0", BOOL, []), port("t0", FLOAT, X.shape)],
    )
    for depth in range(1, 17):
        body = graph(
            [node("Loop", f"n - s{depth}", f"t{depth}", body=body), node("Identity", f"b{depth}", f"a{depth}")],
            [port(f"i{depth}", INT, []), port(f"b{depth}", BOOL, []), port(f"s{depth}", FLOAT, X.shape)],
            [port(f"a{depth}", BOOL, []), port(f"t{depth}", FLOAT, X.shape)],
        )
    outer = graph([node("Loop", "n - x", "y0", body=body)], [port("x", FLOAT, X.shape)], [port("y0")], n=numpy.int64(4))
    proto = helper.make_model(outer, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    text = refused(proto, tmp_path / "m.onnx", kind=KimigraphError)
    assert "the loops become more than 500 nodes where they are unrolled, at '" in text


def test_what_turns_compute_beforehand_takes_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn would fill a megabyte that is known now."""
    monkeypatch.setattr(builder, "FOLDED_IN_ALL", 2**22)
    body = graph(
        [node("ConstantOfShape", "sides", "square"), node("ReduceSum", "square", "sum", keepdims=0),
         node("Add", "s sum", "t"), node("Identity", "b", "a")],
        [port("i", INT, []), port("b", BOOL, []), port("s", FLOAT, X.shape)],
        [port("a", BOOL, []), port("t", FLOAT, X.shape)],
        sides=ints(512, 512),
    )  # fmt: skip
    proto = model([node("Loop", "n - x", "y0", body=body)], n=numpy.int64(10))
    check(proto, tmp_path / "m.onnx")
    module, _, _ = load_source(str(tmp_path / "m.onnx"), CompileConfig()).build()
    assert 5 <= sum("full" in str(n.target) for n in module.graph.nodes) <= 7


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_places_that_a_mask_picks_are_as_many_as_it_picks(axis: int, tmp_path: Path) -> None:
    others = [place for place in range(3) if place != axis]
    nodes = [
        node("ReduceSum", "x others", "line", keepdims=0),
        node("Greater", "line zero", "mask"),
        node("NonZero", "mask", "places"),
        node("Squeeze", "places first", "place"),
        node("Gather", "x place", "picked", axis=axis),
        node("Shape", "picked", "sizes"),
        node("Gather", "sizes which", "size", axis=0),
        node("Min", "size two", "few"),
        node("Concat", "few minus", "form", axis=0),
        node("Transpose", "picked", "front", perm=[axis, *others]),
        node("Slice", "front zero_place few first", "cut"),
        node("Reshape", "cut form", "flat"),
        node("ReduceSum", "flat first", "y0", keepdims=1),
    ]
    numbers = {"others": others, "first": [0], "which": [axis], "two": [2], "minus": [-1], "zero_place": [0]}
    given = {name: numpy.array(value, numpy.int64) for name, value in numbers.items()}
    proto = model(nodes, zero=numpy.float32(0), **given)
    check(proto, tmp_path / "m.onnx")
    check(proto, tmp_path / "m.onnx", x=numpy.abs(X))


def test_a_program_and_a_file_of_sizes_that_the_run_knows(tmp_path: Path) -> None:
    """What no proof removes stays: the places are counted anew in each run."""
    nodes = [
        node("ReduceSum", "x others", "line", keepdims=0),
        node("Greater", "line zero", "mask"),
        node("NonZero", "mask", "places"),
        node("Squeeze", "places first", "place"),
        node("Gather", "x place", "picked", axis=2),
        node("Relu", "picked", "y0"),
    ]
    numbers = {"others": ints(0, 1), "first": ints(0), "zero": numpy.float32(0)}
    onnx.save_model(model(nodes, **numbers), str(tmp_path / "m.onnx"))
    compile_source(str(tmp_path / "m.onnx"), [CompileConfig(target="cpu:reference")], tmp_path / "a", lambda _: None)
    program = load(tmp_path / "a", weights=str(tmp_path / "m.onnx"))
    export_onnx(str(tmp_path / "m.onnx"), CompileConfig(), tmp_path / "again.onnx", lambda _: None)
    sessions = [OnnxSession(tmp_path / name, 1) for name in ("m.onnx", "again.onnx")]
    for x in (torch.from_numpy(X), torch.from_numpy(X).abs(), -torch.from_numpy(X).abs()):
        (got,) = program(x)
        for session in sessions:
            (want,) = session.run({"x": x}).values()
            torch.testing.assert_close(got, want)
