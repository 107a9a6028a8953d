"""Files and indices that cannot be, and tensors that do not fit the model: refused before anything is changed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from published import write, write_index
from torch import Tensor, nn

from kimigraph.ir.errors import UsageError
from kimigraph.weights import Checkpoint, Layout, load_module
from kimigraph.weights.checkpoint import weight_files

STATE = {"first.weight": torch.ones(4, 3), "first.bias": torch.ones(4), "second.weight": torch.ones(2, 4)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2, bias=False)
        self.register_buffer("count", torch.tensor([7]))
        for parameter in self.parameters():
            parameter.data.fill_(5.0)


def refused(directory: Path) -> str:
    model = Model()
    with pytest.raises(UsageError) as caught:
        load_module(model, directory, Layout())
    for parameter in model.parameters():
        assert (parameter == 5.0).all(), "a refused checkpoint must leave the model alone"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def complete(**changes: Tensor) -> dict[str, Tensor]:
    return {**STATE, "count": torch.tensor([3]), **{name.replace("_", "."): t for name, t in changes.items()}}


def raw(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path.parent


def record(begin: int, end: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    tensors = complete(first_weight=torch.ones(4, 4), extra_weight=torch.ones(2))
    tensors["first.bias"] = torch.ones(4, dtype=torch.int64)
    tensors["count"] = torch.tensor([3.0])
    del tensors["second.weight"]
    message = refused(write(tmp_path, tensors))
    for part in (
        "lacks 1 weight: second.weight",
        "has no use for 1 weight: extra.weight",
        "has misshapen 3 weights: ",
        "first.weight is (4, 4), the configuration asks for (4, 3)",
        "first.bias is I64, the model has torch.float32",
        "count is F32, the model has torch.int64",
        "--random-weights",
    ):
        assert part in message, message


def test_what_fits_is_read_whole(tmp_path: Path) -> None:
    for shards in (0, 3):
        model = Model()
        load_module(model, write(tmp_path / str(shards), complete(), shards), Layout())
        for name, tensor in complete().items():
            torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=0)


def test_long_lists_are_counted(tmp_path: Path) -> None:
    tensors = complete() | {f"layer.{number:02d}": torch.ones(1) for number in range(25)}
    assert re.search(r"no use for 25 weights: layer\.00, .*layer\.19 and 5 more", refused(write(tmp_path, tensors)))


def test_truncated_files(tmp_path: Path) -> None:
    path = write(tmp_path, complete()) / "model.safetensors"
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    for length, reason in (
        (len(whole) - 1, "it was cut short: .* ends at byte"),
        (8 + header, "it was cut short"),
        (8 + header - 1, "its header is longer than the file"),
        (20, "its header is longer than the file"),
        (3, "its header is longer than the file"),
        (0, "its header is longer than the file"),
    ):
        path.write_bytes(whole[:length])
        assert re.search(rf"model\.safetensors is no readable safetensors file \({reason}", refused(tmp_path))


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ([], "no JSON object"),
        (b"{", "Expecting"),
        (b"\xff\xfe{}", "decode"),
        (b"[" * 100_000, "recursion"),
        ({"a": 3}, "record of a is malformed"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "record of a is malformed"),
        ({"a": record(0, -4, [1])}, "record of a is malformed"),
        ({"a": record(8, 4, [1])}, "record of a is malformed"),
        ({"a": record(0, 4, [1.0])}, "record of a is malformed"),
        ({"a": record(0, 4, [True])}, "record of a is malformed"),
        ({"a": record(0, 4, [-1])}, "record of a is malformed"),
        ({"a": record(0, 4, [2])}, r"a has 4 bytes, which is not F32 \[2\]"),
        ({"a": record(0, 8, [2]), "b": record(4, 12, [2])}, "b shares bytes with a"),
        ({"a": record(0, 40, [10])}, "it was cut short: a"),
        (b'{"a": %s, "a": %s}' % ((json.dumps(record(0, 4, [1])).encode(),) * 2), "names a twice"),
    ],
)
def test_headers_that_cannot_be(tmp_path: Path, header: Any, reason: str) -> None:
    raw(tmp_path / "model.safetensors", header, bytes(12))
    with pytest.raises(UsageError, match=rf"no readable safetensors file \(.*{reason}"):
        Checkpoint.open(tmp_path)


def test_a_header_of_odd_length(tmp_path: Path) -> None:
    """No dtype lies on its boundary then; the values are right all the same."""
    values = torch.arange(6, dtype=torch.float32)
    text = json.dumps({"a": record(0, 24, [2, 3])}).encode()
    text += b" " * (1 - len(text) % 2)
    raw(tmp_path / "model.safetensors", text, values.numpy().tobytes())
    stored = Checkpoint.open(tmp_path).tensors["a"]
    assert stored.begin % 4
    torch.testing.assert_close(stored.read(), values.reshape(2, 3), rtol=0, atol=0)


def test_writing_to_what_was_read_changes_no_file(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, complete()))
    checkpoint.tensors["first.weight"].read().zero_()
    assert (checkpoint.tensors["first.weight"].read() == 1).all()


def test_missing_shards_are_all_named(tmp_path: Path) -> None:
    write(tmp_path, complete(), 4)
    for shard in (2, 3):
        (tmp_path / f"model-0000{shard}-of-00004.safetensors").unlink()
    message = refused(tmp_path)
    assert "lacks 2 of the 4 shards" in message
    assert "model-00002-of-00004.safetensors, model-00003-of-00004.safetensors" in message


@pytest.mark.parametrize(
    "place", ["../model.safetensors", "/etc/model.safetensors", "..", "sub/model.safetensors", "C:\\x.safetensors", ""]
)
def test_an_index_that_leaves_the_directory(tmp_path: Path, place: str) -> None:
    directory = write(tmp_path / "model", complete(), 2)
    write(tmp_path, complete())
    write(directory / "sub", complete())
    write_index(directory, dict.fromkeys(complete(), place))
    assert f"names files that are not beside it: {place!r}" in refused(directory)


def test_an_index_that_names_a_pickle(tmp_path: Path) -> None:
    torch.save(complete(), tmp_path / "pytorch_model.bin")
    write_index(tmp_path, dict.fromkeys(complete(), "pytorch_model.bin"))
    assert "end in .safetensors" in refused(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert "pickled *.bin files are not read" in refused(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": 3}']
)
def test_indices_that_are_none(tmp_path: Path, text: str) -> None:
    write(tmp_path, complete(), 2)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "is no index" in refused(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    write(tmp_path, complete(), 2)
    (tmp_path / "model.safetensors.index.json").unlink()
    write(tmp_path, {"first.bias": torch.ones(4)})
    (tmp_path / "model.safetensors").rename(tmp_path / "more.safetensors")
    assert re.search(
        r"first\.bias is in model-0000\d-of-00002\.safetensors and in more\.safetensors", refused(tmp_path)
    )


def test_other_files_beside_the_whole_model(tmp_path: Path) -> None:
    """A directory may hold adapters or recorded outputs beside ``model.safetensors``."""
    write(tmp_path, {"first.bias": torch.ones(4)})
    (tmp_path / "model.safetensors").rename(tmp_path / "steps.safetensors")
    write(tmp_path, complete())
    assert [path.name for path in weight_files(tmp_path)] == ["model.safetensors"]


def test_a_tensor_in_two_shards_of_an_index(tmp_path: Path) -> None:
    directory = write(tmp_path, complete(), 2)
    second = directory / "model-00002-of-00002.safetensors"
    second.write_bytes((directory / "model-00001-of-00002.safetensors").read_bytes())
    assert re.search(r"is in model-00001-of-00002\.safetensors and in model-00002-of-00002", refused(directory))


def test_an_index_of_other_files(tmp_path: Path) -> None:
    directory = write(tmp_path, complete(), 2)
    index = directory / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    write_index(directory, {**places, "third.weight": places["count"]})
    assert "disagree about 1 tensors, first third.weight" in refused(directory)
    del places["count"]
    write_index(directory, places)
    assert "disagree about 1 tensors, first count" in refused(directory)
    write(directory, complete())
    assert "has both model.safetensors and model.safetensors.index.json" in refused(directory)


def test_layers_behind_the_last_are_left_and_others_are_not(tmp_path: Path) -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2, bias=False)])
    tensors = {"layers.0.weight": torch.eye(2), "layers.1.weight": torch.ones(2, 2)}
    load_module(model, write(tmp_path, tensors), Layout())
    assert torch.equal(model.layers[0].weight, torch.eye(2))
    tensors["layers.0.scale"] = torch.ones(2)
    with pytest.raises(UsageError, match=r"no use for 1 weight: layers\.0\.scale"):
        load_module(model, write(tmp_path, tensors), Layout())
