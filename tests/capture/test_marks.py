"""Marks stand in prefill graphs alone, give the same numbers, and leave no trace behind."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import GLM, KIMI, write_model
from torch.utils import _pytree as pytree

from kimigraph.capture import capture, load_source
from kimigraph.capture.marks import MARKS, marked
from kimigraph.capture.program import tensors_of
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.program import CapturedProgram

pytest.importorskip("transformers")

PREFILL = CompileConfig(batch=2, context=24, phase="prefill")


def marks_of(program: CapturedProgram) -> list[str]:
    nodes = [node for node in program.graph_module.graph.nodes if str(node.target).startswith("kimigraph.")]
    assert all(node.meta["via"] == "mark" for node in nodes)
    return [str(node.target).split(".")[1] for node in nodes]


@pytest.mark.parametrize(("document", "wanted"), [(GLM, ["kda_prefill"]), (KIMI, ["short_conv", "kda_prefill"])])
def test_prefill_is_marked(tmp_path: Path, document: dict[str, Any], wanted: list[str]) -> None:
    source = load_source(write_model(tmp_path, document), PREFILL)
    program = capture(source, PREFILL)
    assert marks_of(program) == wanted and not program.info["notes"]
    module, args, _ = source.build()
    ours = source.build()[1]
    want = module(*args)
    torch.testing.assert_close(program.graph_module(*tensors_of(program, ours, {}))[0], want, rtol=5e-5, atol=5e-5)
    for mine, eager in zip(pytree.tree_leaves(ours), pytree.tree_leaves(args), strict=True):
        torch.testing.assert_close(mine, eager, rtol=5e-5, atol=5e-5)


def test_unmarked_prefill_stays_aten(tmp_path: Path) -> None:
    config = replace(PREFILL, marks=False)
    source = load_source(write_model(tmp_path, KIMI), config)
    program = capture(source, config)
    assert marks_of(program) == []
    assert any("without marks" in note for note in program.info["notes"])
    module, args, _ = source.build()
    got = program.graph_module(*tensors_of(program, source.build()[1], {}))[0]
    torch.testing.assert_close(got, module(*args), rtol=1e-6, atol=1e-6)


def test_decode_is_not_marked(tmp_path: Path) -> None:
    config = CompileConfig(batch=2, context=24)
    assert marks_of(capture(load_source(write_model(tmp_path, KIMI), config), config)) == []


def test_originals_come_back_after_an_error() -> None:
    modules = [importlib.import_module(mark.module) for mark in MARKS]
    originals = [getattr(module, mark.function) for module, mark in zip(modules, MARKS, strict=True)]
    with pytest.raises(ZeroDivisionError), marked(PREFILL):
        assert [getattr(module, mark.function) for module, mark in zip(modules, MARKS, strict=True)] == [
            mark.replacement for mark in MARKS
        ]
        raise ZeroDivisionError
    assert [getattr(module, mark.function) for module, mark in zip(modules, MARKS, strict=True)] == originals
