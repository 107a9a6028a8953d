"""Calls in the model's own structure, from the structures that a capture records."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kimigraph.ir.manifest import Manifest
from kimigraph.runtime.calls import CallStructure
from kimigraph.runtime.executor import InputMismatchError


@pytest.fixture
def structure(built: Path) -> CallStructure:
    return CallStructure.of_manifest(Manifest.read(built))


def test_arguments_may_be_given_by_position_or_by_name(structure: CallStructure) -> None:
    x, cache = torch.ones(4, 4), {"cache.0.sum": torch.zeros(4)}
    spellings: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, cache), {}),
        ((x,), {"cache": cache}),
        ((), {"cache": cache, "x": x}),
    ]
    for args, kwargs in spellings:
        tensors = structure.tensors(args, kwargs)
        assert [tensor.data_ptr() for tensor in tensors] == [x.data_ptr(), cache["cache.0.sum"].data_ptr()]


def test_missing_and_extra_arguments_are_named(structure: CallStructure) -> None:
    x, cache = torch.ones(4, 4), {"cache.0.sum": torch.zeros(4)}
    with pytest.raises(InputMismatchError, match="takes the arguments x, cache; given were x"):
        structure.tensors((x,), {})
    with pytest.raises(InputMismatchError, match="given were x, cache, scale"):
        structure.tensors((x, cache), {"scale": 3.0})
    with pytest.raises(InputMismatchError, match="key"):
        structure.tensors((x, {"cache.1.sum": torch.zeros(4)}), {})


def test_results_come_back_in_the_models_structure(structure: CallStructure) -> None:
    y, positive = torch.zeros(2), torch.ones(2)
    result = structure.returned((y, positive))
    assert list(result) == ["y", "rest"]
    assert result["y"] is y
    assert isinstance(result["rest"], tuple)
    assert result["rest"][0] is positive
    assert result["rest"][1:] == (None, 7)


def test_plain_values_are_part_of_the_program() -> None:
    from torch.utils import _pytree as pytree

    tree = pytree.tree_structure(((0, 0), {}))
    structure = CallStructure.of_info(tree, None, {"argument_leaves": ["tensor", {"value": True}]})
    x = torch.ones(1)
    assert structure.tensors((x, True), {}) == [x]
    for other in (1, False, None):
        with pytest.raises(InputMismatchError, match="compiled for True"):
            structure.tensors((x, other), {})


def test_dicts_may_come_in_another_order() -> None:
    from torch.utils import _pytree as pytree

    first, second = torch.zeros(1), torch.ones(1)
    structure = CallStructure.of_info(pytree.tree_structure((({"a": 0, "b": 0},), {})), None, {})
    assert [t.item() for t in structure.tensors(({"b": second, "a": first},), {})] == [0.0, 1.0]


def test_a_manifest_keeps_the_structure(built: Path) -> None:
    document = json.loads((built / "manifest.json").read_text())
    assert document["info"]["parameters"] == ["x", "cache", "scale"]
    assert document["info"]["argument_leaves"] == ["tensor", "tensor"]
    assert document["info"]["result_leaves"] == ["tensor", "tensor", {"value": None}, {"value": 7}]
