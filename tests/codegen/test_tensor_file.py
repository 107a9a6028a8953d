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
