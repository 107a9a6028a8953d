"""The safetensors reader and writer that artifacts carry, against the library."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from kimigraph.ir.tensor_file import read_tensors, write_tensors

TENSORS = {
    "b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
    "a": torch.tensor(2.5),
    "none": torch.empty(0, 4, dtype=torch.int32),
    "flags": torch.tensor([True, False, True]),
    "ключ": torch.tensor([1, 2**40]),
    "fp8": torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
}


def same(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left.float(), right.float())


def test_the_library_reads_what_is_written(tmp_path):
    path = tmp_path / "constants.bin"
    write_tensors(path, TENSORS)
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    assert all(same(found[name], value) for name, value in TENSORS.items())


def test_what_the_library_writes_is_read(tmp_path):
    path = tmp_path / "модель.safetensors"
    save_file({name: value.contiguous() for name, value in TENSORS.items()}, path, metadata={"format": "pt"})
    found = dict(read_tensors(path))
    assert found.keys() == TENSORS.keys()
    assert all(same(found[name], value) for name, value in TENSORS.items())
    assert list(dict(read_tensors(path, {"a"}))) == ["a"]


def test_equal_tensors_give_equal_files(tmp_path):
    write_tensors(tmp_path / "one", TENSORS)
    write_tensors(tmp_path / "two", dict(reversed(TENSORS.items())))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("keep", [4, 20, -1])
def test_a_truncated_file_is_an_error(tmp_path, keep):
    path = tmp_path / "cut"
    write_tensors(path, {"x": torch.ones(8)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"cut"):
        list(read_tensors(path))


def test_a_dtype_without_a_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match="complex64"):
        write_tensors(tmp_path / "x", {"x": torch.ones(2, dtype=torch.complex64)})


@pytest.mark.parametrize("kind", [name for name in dir(torch) if name.startswith("float8_")])
def test_a_file_calls_each_float8_type_by_its_own_name_or_refuses_it(tmp_path, kind):
    """G14: fnuz bytes under the tag of fn would be read at half their values."""
    dtype, path = getattr(torch, kind), tmp_path / "float8"
    bits = torch.tensor([0x00, 0x01, 0x38, 0x7E], dtype=torch.uint8)
    known = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"}
    if kind not in known:
        with pytest.raises(ValueError, match=f"x: a safetensors file cannot hold torch.{kind}"):
            write_tensors(path, {"x": bits.view(dtype)})
        return
    write_tensors(path, {"x": bits.view(dtype)})
    assert f'"dtype":"{known[kind]}"' in path.read_bytes().decode("latin1")
    [(_, found)] = read_tensors(path)
    assert found.dtype is dtype and torch.equal(found.view(torch.uint8), bits)
