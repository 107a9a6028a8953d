"""Kernels of horizontal regions: their text, shared by equal layers, and what sm_90's compiler makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from kimigraph.bench.prolog import GROUPS
from kimigraph.capture import capture, load_source
from kimigraph.codegen import build_artifact
from kimigraph.codegen.cross_compile import compile_kernels
from kimigraph.codegen.horizontal import build_region
from kimigraph.codegen.kernel_writer import KernelFile, KernelSet, build_kernels
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import CompileError
from kimigraph.ir.program import CapturedProgram
from kimigraph.passes import PassContext, default_pipeline, run_pipeline

ATEN = torch.ops.aten
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "k31_tiny")
GOLDEN = Path(__file__).with_name("horizontal_kernel.py.expected")
REGISTERS = 128
"""What a thread may use: four warps of each of four programs fit on a multiprocessor."""


def products(rows: int, depth: int, columns: int, wide: int) -> GraphModule:
    """A region of a 16-bit product and, unless ``wide`` is 0, a 32-bit one of the same rows."""
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(rows, 1, depth, dtype=torch.bfloat16, device="meta")
    results = []
    for name, size, dtype in (("weight", columns, torch.bfloat16), ("router", wide, torch.float32)):
        if not size:
            continue
        weight, left = graph.placeholder(name), x
        weight.meta["val"] = torch.empty(size, depth, dtype=dtype, device="meta")
        if dtype != torch.bfloat16:
            left = graph.call_function(ATEN._to_copy.default, (x,), {"dtype": dtype})
            left.meta["val"] = x.meta["val"].to(dtype)
        product = graph.call_function(ATEN.linear.default, (left, weight))
        product.meta["val"] = torch.empty(rows, 1, size, dtype=dtype, device="meta")
        results.append(product)
    graph.output(tuple(results))
    return GraphModule(torch.nn.Module(), graph)


@pytest.fixture(scope="module")
def tiny() -> CapturedProgram:
    """A decode step of the example with all merging: three KDA layers and a DSA layer."""
    overrides = (("num_hidden_layers", "4"),)
    config = CompileConfig(target="cuda:sm_90", batch=2, context=64, dtype="bfloat16", cache="off", overrides=overrides)
    program = capture(load_source(EXAMPLE, config), config)
    run_pipeline(program, default_pipeline(config), PassContext(config))
    return program


def facts_of(directory: Path, begins: str) -> dict[str, dict[str, Any]]:
    found = {path.stem: json.loads(path.read_text()) for path in sorted(directory.glob(f"kernels/{begins}*.json"))}
    assert found
    return found


def test_the_text_of_a_kernel() -> None:
    """To accept a change that is meant: write ``build_region(...)``'s text into the golden file."""
    assert build_region(products(2, 64, 48, 8)).text == GOLDEN.read_text(encoding="utf-8")


def test_every_kernel_of_the_example_compiles_within_the_budget(
    tiny: CapturedProgram, artifact_directory: Path
) -> None:
    build_artifact(tiny, "cuda:sm_90", artifact_directory, self_test=False)
    for name, facts in facts_of(artifact_directory, "horizontal").items():
        assert facts["registers"] <= REGISTERS and facts["stack_bytes"] == 0, name


def test_equal_layers_share_a_kernel(tiny: CapturedProgram) -> None:
    files = [
        file for file in build_kernels(tiny.graph_module.graph, "cuda").files if file.name.startswith("horizontal")
    ]
    assert len(files) < 0.7 * sum(len(file.nodes) for file in files)


def test_products_at_the_widths_of_a_model_do_not_spill(artifact_directory: Path) -> None:
    (artifact_directory / "kernels").mkdir()
    shapes = {(rows, depth, sum(columns), wide) for depth, columns, wide in GROUPS.values() for rows in (1, 8)}
    files = [KernelFile(f"horizontal_{n}", build_region(products(*shape))) for n, shape in enumerate(sorted(shapes))]
    for file in files:
        (artifact_directory / file.path).write_text(file.module.text)
    compile_kernels(KernelSet("cuda:sm_90", [], files, {}), artifact_directory, 90, lambda _: None)
    found = facts_of(artifact_directory, "horizontal")
    assert len(found) == len(files)
    for name, facts in found.items():
        assert facts["registers"] <= REGISTERS and facts["stack_bytes"] == 0, name


def test_a_region_of_anything_else_is_refused() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 4, device="meta")
    turned = graph.call_function(ATEN.sin.default, (x,))
    turned.meta["val"] = x.meta["val"]
    graph.output(turned)
    with pytest.raises(CompileError, match="--disable-pass merge-horizontal"):
        build_region(GraphModule(torch.nn.Module(), graph))
