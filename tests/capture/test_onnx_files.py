"""``.onnx`` files as sources: damaged and hostile ones are refused before anything of them is allocated."""

import os
import resource
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from kimigraph import load
from kimigraph.capture import load_source
from kimigraph.compiler import compile_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import KimigraphError, UsageError

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
Change = Callable[[Any], None]


def model(*nodes: Any, weights: Any = (), shape: Any = (2, 3), functions: Any = ()) -> Any:
    graph = helper.make_graph(
        list(nodes) or [helper.make_node("Relu", ["x"], ["y"], name="only")],
        "g",
        [helper.make_tensor_value_info("x", FLOAT, shape)],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        list(weights),
    )
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
    return helper.make_model(graph, opset_imports=imports, functions=list(functions), ir_version=10)


def saved(proto: Any, path: Path) -> str:
    path.write_bytes(proto.SerializeToString())
    return str(path)


def refusal(proto: Any, path: Path, *overrides: tuple[str, str], kind: type[Exception] = KimigraphError) -> str:
    with pytest.raises(kind) as caught:
        load_source(saved(proto, path / "m.onnx"), CompileConfig(overrides=overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def add_weight(**fields: Any) -> Any:
    """A model of which the second operand is a weight with these fields of the proto."""
    location = fields.pop("location", None)
    weight = TensorProto(**{"name": "w", "data_type": FLOAT, "dims": [3], **fields})
    if location is not None:
        weight.data_location = TensorProto.EXTERNAL
        entries = location if isinstance(location, dict) else {"location": location}
        for key, value in entries.items():
            weight.external_data.add(key=key, value=value)
    return model(helper.make_node("Add", ["x", "w"], ["y"], name="plus"), weights=[weight])


HUGE: list[tuple[str, Any, str]] = [
    ("declared", add_weight(dims=[2**40], raw_data=b"\0" * 12), "takes 4.4e+12 bytes"),
    ("overflowing", add_weight(dims=[2**62, 2**62], raw_data=b""), "takes 8.51e+37 bytes"),
    ("negative", add_weight(dims=[-3], raw_data=b""), "negative size"),
    ("too short", add_weight(dims=[2**20], raw_data=b"\0" * 12), "needs 4194304 bytes and has 12"),
    ("too long", add_weight(dims=[2], raw_data=b"\0" * 12), "needs 8 bytes and has 12"),
    ("axes", add_weight(dims=[1] * 40, raw_data=b"\0" * 4), "has 40 axes"),
    ("list", add_weight(float_data=[1.0]), "needs 12 bytes and has 4"),
    ("input", model(shape=(2**40, 2**10)), "input 'x' [1099511627776, 1024] takes 4.5e+15 bytes"),
    (
        "computed",
        model(
            helper.make_node("Constant", [], ["s"], value_ints=[2**20, 2**20]),
            helper.make_node("ConstantOfShape", ["s"], ["b"], name="bomb"),
            helper.make_node("Add", ["x", "b"], ["y"]),
        ),
        "node 'bomb' makes 4.4e+12 bytes",
    ),
]


@pytest.mark.parametrize(("name", "proto", "message"), HUGE, ids=[name for name, _, _ in HUGE])
def test_sizes_are_checked_before_memory_is_taken(name: str, proto: Any, message: str, tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**36, limit[1]))
    try:
        assert message in refusal(proto, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("/etc/passwd", "below the model's own folder alone"),
        ("../secret.bin", "below the model's own folder alone"),
        ("deep/../../secret.bin", "below the model's own folder alone"),
        ("C:\\secret.bin", "below the model's own folder alone"),
        ("file:secret.bin", "below the model's own folder alone"),
        ("link.bin", "a link that leads out of the model's folder"),
        ("folder_link/secret.bin", "a link that leads out of the model's folder"),
        ("absent.bin", "which is not there"),
        ("folder", "which is no regular file"),
        ("pipe", "which is no regular file"),
        ("", "without a location"),
        ({"location": "short.bin"}, "lies at 0 to 12 of 'short.bin', which has 4 bytes"),
        ({"location": "good.bin", "offset": "8"}, "lies at 8 to 20"),
        ({"location": "good.bin", "offset": "-4"}, "lies at -4 to 8"),
        ({"location": "good.bin", "length": "4"}, "needs 12 bytes and says that it has 4"),
        ({"location": "good.bin", "offset": "one"}, "no numbers"),
        ({"location": "good.bin", "basepath": "/"}, "unknown keys ['basepath']"),
    ],
)
def test_external_data_stays_below_the_models_folder(location: Any, message: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "folder").mkdir(parents=True)
    (tmp_path / "secret.bin").write_bytes(b"\0" * 12)
    (home / "link.bin").symlink_to(tmp_path / "secret.bin")
    (home / "folder_link").symlink_to(tmp_path)
    (home / "good.bin").write_bytes(b"\0" * 12)
    (home / "short.bin").write_bytes(b"\0" * 4)
    os.mkfifo(home / "pipe")
    assert message in refusal(add_weight(location=location), home)


def test_external_data_is_found_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "Ordner mit Ümläuten 模型"
    (home / "below").mkdir(parents=True)
    (home / "below" / "w.bin").write_bytes(b"\0" * 4 + torch.tensor([1.0, 2.0, 3.0]).numpy().tobytes())
    (home / "inside.bin").symlink_to(home / "below" / "w.bin")
    path = saved(add_weight(location={"location": "inside.bin", "offset": "4", "length": "12"}), home / "m.onnx")
    monkeypatch.chdir(tmp_path)
    module, args, _ = load_source(path, CompileConfig()).build()
    torch.testing.assert_close(module(*args)[0], args[0] + torch.tensor([1.0, 2.0, 3.0]))


def calls(name: str, *called: str) -> Any:
    """A function that calls others one after the other."""
    nodes, last = [], "a"
    for number, other in enumerate(called):
        nodes.append(helper.make_node(other, [last], [f"v{number}"], domain="mine"))
        last = f"v{number}"
    return helper.make_function("mine", name, ["a"], [last], nodes, [helper.make_opsetid("mine", 1)])


def relu(name: str) -> Any:
    imports = [helper.make_opsetid("", 20)]
    return helper.make_function("mine", name, ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])], imports)


BOMB = [relu("F0"), *(calls(f"F{n}", *[f"F{n - 1}"] * 10) for n in range(1, 8))]
STRUCTURES: list[tuple[str, Any, str]] = [
    (
        "a circle",
        model(
            helper.make_node("Add", ["x", "b"], ["a"], name="first"),
            helper.make_node("Relu", ["a"], ["b"], name="second"),
            helper.make_node("Relu", ["b"], ["y"], name="third"),
        ),
        "wait for one another in a circle: 'first' -> 'second' -> 'first'",
    ),
    ("a loop", model(helper.make_node("Add", ["x", "y"], ["y"], name="me")), "in a circle: 'me'"),
    ("nothing makes", model(helper.make_node("Relu", ["z"], ["y"], name="n")), "node 'n' in the graph reads 'z'"),
    (
        "made twice",
        model(helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["y"])),
        "'y' is made twice",
    ),
    ("input made", model(helper.make_node("Relu", ["y"], ["x"])), "'x' is made twice"),
    ("no output", model(helper.make_node("Relu", ["x"], ["z"])), "output 'y' is made by no node"),
    (
        "weights of one name",
        model(weights=[helper.make_tensor("w", FLOAT, [1], [0.0])] * 2),
        "two of its weights are called 'w'",
    ),
    (
        "functions in a circle",
        model(
            helper.make_node("F", ["x"], ["y"], domain="mine"),
            functions=[calls("F", "G"), calls("G", "F")],
        ),
        "functions call one another in a circle",
    ),
    ("a bomb of functions", model(helper.make_node("F7", ["x"], ["y"], domain="mine"), functions=BOMB), "1e+07 nodes"),
    ("a string", add_weight(data_type=TensorProto.STRING, string_data=[b"a", b"b", b"c"]), "of type STRING"),
    ("no type at all", add_weight(data_type=99, raw_data=b"\0" * 12), "of type type number 99"),
    ("complex numbers", add_weight(data_type=TensorProto.COMPLEX64, raw_data=b"\0" * 24), "of type COMPLEX64"),
]


@pytest.mark.parametrize(("name", "proto", "message"), STRUCTURES, ids=[name for name, _, _ in STRUCTURES])
def test_structures_that_cannot_be_are_refused(name: str, proto: Any, message: str, tmp_path: Path) -> None:
    assert message in refusal(proto, tmp_path, kind=UsageError)


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    proto = add_weight(dims=[2**40], raw_data=b"")
    proto.graph.initializer.add(name="v", data_type=TensorProto.STRING)
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.COMPLEX64
    text = refusal(proto, tmp_path)
    assert all(part in text for part in ("weight 'w' [1099511627776]", "weight 'v' is of type STRING", "COMPLEX64"))


def test_what_is_no_onnx_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    for data in (b"", b"no onnx file at all", model().SerializeToString()[:-7]):
        path.write_bytes(data)
        with pytest.raises(UsageError, match="no ONNX file"):
            load_source(str(path), CompileConfig())
    path.unlink()
    path.mkdir()
    with pytest.raises(UsageError, match=r"config\.json"):
        load_source(str(path), CompileConfig())
    old = model()
    old.opset_import[0].version = 9
    assert "its opset is 9: convert it to one of 13 to 24" in refusal(old, tmp_path / "m.onnx")
    with pytest.raises(UsageError, match="--dtype does not apply"):
        load_source(saved(model(), tmp_path / "n.onnx"), CompileConfig(dtype="bfloat16"))


def test_operators_without_a_translation_are_listed_at_once(tmp_path: Path) -> None:
    inner = helper.make_function(
        "mine",
        "Inner",
        ["a"],
        ["b"],
        [helper.make_node("Det", ["a"], ["b"], name="deep")],
        [helper.make_opsetid("", 20)],
    )
    proto = model(
        helper.make_node("SequenceMap", ["x"], ["a"], name="again", body=helper.make_graph([], "b", [], [])),
        *(helper.make_node("FusedThing", ["a"], [f"f{n}"], name=f"fused{n}", domain="com.else") for n in range(6)),
        helper.make_node("Inner", ["f0"], ["d"], domain="mine"),
        helper.make_node("Add", ["d", "f5"], ["y"]),
        functions=[inner],
    )
    text = refusal(proto, tmp_path)
    assert "3 operators have no translation" in text
    assert "ai.onnx::Det: 'deep' in Inner" in text and "ai.onnx::SequenceMap: 'again'" in text
    assert "com.else::FusedThing: 'fused0', 'fused1', 'fused2', 'fused3' and 2 more" in text


def test_open_sizes_are_given_by_name(tmp_path: Path) -> None:
    proto = model(shape=("batch", "width"))
    assert "leaves sizes open: batch, width" in refusal(proto, tmp_path)
    source = load_source(str(tmp_path / "m.onnx"), CompileConfig(overrides=(("batch", "2"), ("width", "5"))))
    assert source.build()[1][0].shape == (2, 5)
    assert "at most" in refusal(proto, tmp_path, ("batch", str(2**40)), ("width", "4096"))


def test_a_program_of_open_sizes_takes_its_weights_from_the_file(tmp_path: Path) -> None:
    weight = helper.make_tensor("layer.w", FLOAT, [3, 4], list(map(float, range(12))))
    proto = model(helper.make_node("MatMul", ["x", "layer.w"], ["y"]), weights=[weight], shape=("batch", 3))
    path = saved(proto, tmp_path / "m.onnx")
    config = CompileConfig(target="cpu:reference", overrides=(("batch", "2"),))
    compile_source(path, [config], tmp_path / "artifact", lambda _: None)
    x = torch.ones(2, 3)
    (y,) = load(tmp_path / "artifact", weights=path)(x)
    torch.testing.assert_close(y, x @ torch.arange(12.0).reshape(3, 4))
    other = saved(model(helper.make_node("Relu", ["x"], ["y"])), tmp_path / "other.onnx")
    with pytest.raises(UsageError, match=r"is not what the program was compiled from: it has no layer\.w"):
        load(tmp_path / "artifact", weights=other)


def test_states_are_found_by_properties_and_names(tmp_path: Path) -> None:
    proto = model(helper.make_node("Add", ["x", "s"], ["y"]), helper.make_node("Identity", ["y"], ["after"]))
    proto.graph.input.append(helper.make_tensor_value_info("s", FLOAT, [2, 3]))
    proto.graph.output.append(helper.make_tensor_value_info("after", FLOAT, [2, 3]))
    path = saved(proto, tmp_path / "m.onnx")
    assert len(load_source(path, CompileConfig()).build()[1]) == 2
    source = load_source(path, CompileConfig(overrides=(("state s", "after"),)))
    module, (x, states), _ = source.build()
    before = states["s"].clone()
    (y,) = module(x, states)
    torch.testing.assert_close(states["s"], x + before)
    torch.testing.assert_close(y, x + before)
    assert "names what the file does not have" in refusal(proto, tmp_path, ("state s", "nowhere"))


def test_a_damaged_file_is_an_error_of_ours_whatever_was_changed(tmp_path: Path) -> None:
    names = ["x", "w", "i", "r", "g", "s", "t", ""]
    kinds = (
        "Add MatMul Gather Slice Reshape TopK Concat ScatterND Split Where Cast Softmax Conv Gemm CumSum Pad".split()
    )
    random, taken = Random(0), 0
    for _ in range(120):
        proto = model(
            helper.make_node("Reshape", ["x", "i"], ["r"], allowzero=0),
            helper.make_node("Gather", ["r", "i"], ["g"], axis=0),
            helper.make_node("Softmax", ["g"], ["s"], axis=-1),
            helper.make_node("Transpose", ["s"], ["t"], perm=[1, 0]),
            helper.make_node("MatMul", ["t", "w"], ["y"]),
            weights=[
                helper.make_tensor("w", FLOAT, [2, 3], [0.5] * 6),
                helper.make_tensor("i", INT64, [2], [1, 0]),
            ],
            shape=(1, 0),
        )
        node = random.choice(proto.graph.node)
        match random.randrange(5):
            case 0:
                node.op_type = random.choice(kinds)
            case 1:
                del node.input[random.randrange(len(node.input)) :]
            case 2:
                node.input[random.randrange(len(node.input))] = random.choice(names)
            case 3 if node.attribute:
                node.attribute[0].i = random.choice([-(2**63), 2**62, 7])
                node.attribute[0].ints[:] = [random.choice([-5, 9, 2**40])]
            case _:
                weight = random.choice(proto.graph.initializer)
                weight.dims[:] = [random.choice([0, 1, 2, 3, 2**40])]
        try:
            load_source(saved(proto, tmp_path / "m.onnx"), CompileConfig())
            taken += 1
        except KimigraphError as error:
            assert "m.onnx" in str(error) or "node '" in str(error)
    assert taken < 60


def test_nodes_in_any_order_and_inputs_with_defaults(tmp_path: Path) -> None:
    proto = model(
        helper.make_node("Add", ["a", "w"], ["y"]),
        helper.make_node("Relu", ["x"], ["a"]),
        weights=[helper.make_tensor("w", FLOAT, [3], [1.0, 2.0, 3.0])],
    )
    proto.graph.input.append(helper.make_tensor_value_info("w", FLOAT, [3]))
    module, args, _ = load_source(saved(proto, tmp_path / "m.onnx"), CompileConfig()).build()
    assert len(args) == 1
    torch.testing.assert_close(module(*args)[0], args[0].relu() + torch.tensor([1.0, 2.0, 3.0]))
    assert onnx.checker is not None
