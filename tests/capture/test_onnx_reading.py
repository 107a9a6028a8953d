"""Operators of ONNX that other exporters write: what the module computes is what onnxruntime computes."""

from pathlib import Path
from typing import Any

import numpy
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from kimigraph.adapters.onnx_model import OnnxSession
from kimigraph.capture import load_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import CaptureError

X = numpy.linspace(-3, 3, 24, dtype=numpy.float32).reshape(2, 3, 4)
TIES = numpy.array([[1, 3, 3, 0, 3, 1], [0, 0, 0, 0, 0, 0]], dtype=numpy.float32)
INT, BOOL = TensorProto.INT64, TensorProto.BOOL


def ints(*values: int) -> numpy.ndarray[Any, Any]:
    return numpy.array(values, dtype=numpy.int64)


def file(path: Path, nodes: list[Any], weights: dict[str, Any], x: Any = X, count: int = 1, producer: str = "") -> Path:
    """A model over ``x`` with outputs ``y0`` and so on."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)],
        [onnx.ValueInfoProto(name=f"y{n}") for n in range(count)],
        [numpy_helper.from_array(numpy.asarray(value), name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10, producer_name=producer)
    onnx.save_model(onnx.shape_inference.infer_shapes(model), str(path))
    return path


def imported(path: Path, x: Any) -> list[torch.Tensor]:
    module, args, _ = load_source(str(path), CompileConfig()).build()
    assert args[0].shape == x.shape
    with torch.no_grad():
        return list(module(torch.from_numpy(x.copy())))


def check(path: Path, nodes: list[Any], weights: dict[str, Any], x: Any = X, count: int = 1) -> list[torch.Tensor]:
    file(path, nodes, weights, x, count)
    got = imported(path, x)
    want = OnnxSession(path, 1).run({"x": torch.from_numpy(x.copy())})
    for name, mine in zip([f"y{n}" for n in range(count)], got, strict=True):
        torch.testing.assert_close(mine, want[name], rtol=1e-5, atol=1e-5)
    return got


def one(kind: str, *inputs: str, count: int = 1, **attributes: Any) -> list[Any]:
    return [helper.make_node(kind, ["x", *inputs], [f"y{n}" for n in range(count)], name="it", **attributes)]


CASES: dict[str, tuple[Any, ...]] = {
    "gemm": ([helper.make_node("Flatten", ["x"], ["f"]), helper.make_node("Gemm", ["f", "w", "b"], ["y0"], transB=1)],
             {"w": numpy.ones((5, 12), numpy.float32), "b": numpy.arange(5, dtype=numpy.float32)}),
    "gemm_scaled": ([helper.make_node("Flatten", ["x"], ["f"]),
                     helper.make_node("Gemm", ["f", "w", "b"], ["y0"], alpha=0.5, beta=2.0, transA=1)],
                    {"w": numpy.ones((2, 3), numpy.float32), "b": numpy.ones((1, 3), numpy.float32)}),
    "leaky": (one("LeakyRelu", alpha=0.2), {}),
    "clip_one_side": (one("Clip", "", "m"), {"m": numpy.float32(0.5)}),
    "sum_of_three": (one("Sum", "x", "w"), {"w": X[:1]}),
    "max_of_three": (one("Max", "w", "s"), {"w": X[::-1].copy(), "s": numpy.float32(-1)}),
    "mod_c": (one("Mod", "s", fmod=1), {"s": numpy.float32(0.7)}),
    "pow_left": ([helper.make_node("Pow", ["s", "x"], ["y0"])], {"s": numpy.float32(2)}),
    "one_hot": ([helper.make_node("ArgMax", ["x"], ["i"], axis=2, keepdims=0),
                 helper.make_node("OneHot", ["i", "d", "v"], ["y0"], axis=1)],
                {"d": numpy.int64(5), "v": numpy.array([0, 2], numpy.float32)}),
    "tile": (one("Tile", "r"), {"r": ints(1, 2, 3)}),
    "trilu": (one("Trilu", "k", upper=0), {"k": numpy.int64(-1)}),
    "reverse": (one("Slice", "s", "e", "a", "t"), {"s": ints(-1), "e": ints(-100), "a": ints(2), "t": ints(-2)}),
    "split_even": (one("Split", axis=2, num_outputs=3, count=3), {}, X, 3),
    "range": ([helper.make_node("Range", ["a", "b", "c"], ["r"]), helper.make_node("Mul", ["x", "r"], ["y0"])],
              {"a": numpy.float32(1), "b": numpy.float32(9), "c": numpy.float32(2)}),
    "shape": ([helper.make_node("Shape", ["x"], ["n"], start=1), helper.make_node("ConstantOfShape", ["n"], ["z"]),
               helper.make_node("Sub", ["x", "z"], ["y0"])], {}),
    "nonzero_known": ([helper.make_node("NonZero", ["w"], ["p"]), helper.make_node("Squeeze", ["p", "o"], ["q"]),
                       helper.make_node("Gather", ["x", "q"], ["y0"], axis=2)],
                      {"w": ints(0, 1, 0, 1), "o": ints(0)}),
    "logsumexp": (one("ReduceLogSumExp", "a", keepdims=0), {"a": ints(1)}),
    "l2": (one("ReduceL2", "a"), {"a": ints(-1)}),
    "prod": (one("ReduceProd", "a", keepdims=0), {"a": ints(0, 2)}),
    "noop": (one("ReduceSum", "a", noop_with_empty_axes=1), {"a": ints()}),
    "conv_pads": (one("Conv", "w", pads=[2, 0], group=3), {"w": numpy.ones((3, 1, 2), numpy.float32)}),
    "pad_axes": (one("Pad", "p", "", "a"), {"p": ints(1, 2), "a": ints(-1)}),
    "split_sequence": ([helper.make_node("SplitToSequence", ["x", "s"], ["q"], axis=2),
                        helper.make_node("SequenceAt", ["q", "i"], ["y0"])], {"s": ints(1, 3), "i": numpy.int64(-1)}),
    "scatter_nd_add": (one("ScatterND", "i", "u", reduction="add"),
                       {"i": ints(0, 1, 1, 2).reshape(2, 2), "u": numpy.ones((2, 4), numpy.float32)}),
    "cast_like": (one("CastLike", "w"), {"w": ints(1)}),
    "swapped_expand": (one("Expand", "n"), {"n": ints(5, 1, 3, 1)}),
    "is_inf": ([helper.make_node("Div", ["x", "z"], ["d"]),
                helper.make_node("IsInf", ["d"], ["y0"], detect_negative=0)],
               {"z": numpy.float32(0)}),
    "log_softmax": (one("LogSoftmax", axis=1), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_operator_computes_what_onnxruntime_computes(name: str, tmp_path: Path) -> None:
    check(tmp_path / "m.onnx", *CASES[name])


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("count", [3, 6])
def test_top_k_goes_by_place_where_values_are_equal(count: int, largest: int, tmp_path: Path) -> None:
    nodes = one("TopK", "k", count=2, largest=largest, sorted=1)
    _, places = check(tmp_path / "m.onnx", nodes, {"k": ints(count)}, TIES, 2)
    assert places.tolist()[1] == list(range(count))
    if largest:
        assert places.tolist()[0][:3] == [1, 2, 4]


def test_top_k_without_order_picks_the_same_set(tmp_path: Path) -> None:
    nodes = one("TopK", "k", count=2, sorted=0)
    for producer in ("", "pytorch"):
        path = file(tmp_path / "m.onnx", nodes, {"k": ints(3)}, TIES[:1], 2, producer)
        assert sorted(imported(path, TIES[:1])[1][0].tolist()) == [1, 2, 4]


@pytest.mark.parametrize("count", [7, -1])
def test_top_k_beyond_the_axis_names_the_node(count: int, tmp_path: Path) -> None:
    path = file(tmp_path / "m.onnx", one("TopK", "k", count=2), {"k": ints(count)}, TIES, 2)
    with pytest.raises(CaptureError, match=rf"node 'it' \(TopK\) picks \[{count}\] of an axis of 6"):
        load_source(str(path), CompileConfig())


def test_top_k_of_a_number_that_the_run_knows_names_the_node(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["m"], keepdims=0),
        helper.make_node("Cast", ["m"], ["c"], to=INT),
        helper.make_node("Unsqueeze", ["c", "zero"], ["k"]),
        *one("TopK", "k", count=2),
    ]
    path = file(tmp_path / "m.onnx", nodes, {"zero": ints(0)}, TIES, 2)
    with pytest.raises(CaptureError, match=r"node 'it' \(TopK\) takes sizes from values of the run \(operand 1\)"):
        load_source(str(path), CompileConfig())


@pytest.mark.parametrize(
    ("nodes", "weights", "message"),
    [
        (one("Reshape", "n"), {"n": ints(5, 5)}, "node 'it' cannot have operands of shapes"),
        (one("Concat", "w", axis=0), {"w": numpy.ones((2, 2), numpy.float32)}, "node 'it' cannot have operands"),
        (one("Gather", "i"), {"i": numpy.int64(9)}, "picks place 9 of an axis of 2"),
        (one("Transpose", perm=[0, 0, 1]), {}, "which is no order of 3 axes"),
        (one("Softmax", axis=7), {}, "has axis 7, its operand has 3 axes"),
        (
            [
                helper.make_node("NonZero", ["x"], ["p"]),
                helper.make_node("Shape", ["p"], ["s"]),
                helper.make_node("Cast", ["s"], ["y0"], name="it", to=TensorProto.FLOAT),
            ],
            {},
            "node 'it' (Cast) makes other numbers of sizes that the run alone knows",
        ),
        (one("Pad", "p", mode="reflect"), {"p": ints(0, 0, 0, 0, 0, 1)}, "pads by reflect"),
        (one("Slice", "s", "s", "s", "z"), {"s": ints(0), "z": ints(0)}, "has a step of 0"),
        (one("Cast", to=TensorProto.STRING), {}, "casts to element type 8"),
        (one("Clip"), {}, None),
    ],
)
def test_a_form_without_a_translation_names_its_node(
    nodes: list[Any], weights: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape)],
        [helper.make_tensor_value_info("y0", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(numpy.asarray(value), name) for name, value in weights.items()],
    )
    path = tmp_path / "m.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString())
    if message is None:
        torch.testing.assert_close(imported(path, X)[0], torch.from_numpy(X))
        return
    with pytest.raises(CaptureError) as caught:
        load_source(str(path), CompileConfig())
    assert message in str(caught.value)
