"""Generated kernel files: their text, shared by equal layers, and what sm_90's compiler makes of them."""

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from kimigraph.bench.pointwise_chains import CHAINS
from kimigraph.capture import capture, capture_module, load_source
from kimigraph.codegen import build_artifact
from kimigraph.codegen.kernel_writer import build_kernels
from kimigraph.codegen.pointwise import build_nodes
from kimigraph.codegen.pointwise.tiles import Tiles
from kimigraph.codegen.regions import region_key
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import CompileError
from kimigraph.ir.launches import graph_launches
from kimigraph.ir.program import CapturedProgram
from kimigraph.passes import PassContext, Pipeline, default_pipeline, run_pipeline

GOLDEN = Path(__file__).with_name("pointwise_kernels.py.expected")
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "k31_tiny")
REGISTERS = 64
"""What a thread of a generated kernel may use: four warps of each of eight programs fit on a multiprocessor."""
PRODUCT_REGISTERS = 128
"""What it may use where products are in the kernel: four such programs fit."""


def norm(linear: Tensor, weight: Tensor) -> Tensor:
    wide = linear.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.float()).to(linear.dtype)


def rope(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = q.view(2, 4, 16)
    return heads * cos + torch.cat([-heads[..., 8:], heads[..., :8]], -1) * sin


def routed(scores: Tensor, picks: Tensor) -> Tensor:
    weights = scores.gather(-1, picks)
    return weights / weights.sum(-1, keepdim=True)


def moved(state: Tensor, x: Tensor) -> Tensor:
    state.mul_(0.5)
    return state + torch.tanh(x)


def spread(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


BF16 = torch.bfloat16
KERNELS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], Tiles | None]] = {
    "norm": (norm, (torch.ones(3, 60, dtype=BF16), torch.ones(60, dtype=BF16)), None),
    "rope": (rope, (torch.ones(2, 64, dtype=BF16), torch.ones(16), torch.ones(16)), None),
    "routed": (routed, (torch.ones(3, 8), torch.ones(3, 2, dtype=torch.int64)), None),
    "moved": (moved, (torch.ones(4, 6).t(), torch.ones(6, 4)), None),
    "spread": (spread, (torch.ones(2, 5000),), Tiles(1, 4096, 8, held=False)),
}


def text_of(name: str) -> str:
    function, operands, tiles = KERNELS[name]
    nodes = list(make_fx(function, tracing_mode="fake")(*operands).graph.nodes)
    members = [node for node in nodes if node.op == "call_function"]
    return build_nodes(members, nodes[-1].args[0], [n for n in nodes if n.op == "placeholder"], tiles).text


def test_the_text_is_what_is_written_here(tmp_path: Path) -> None:
    found = "\n\n".join(f"# {name}\n\n{text_of(name)}" for name in KERNELS)
    new = tmp_path / GOLDEN.name
    new.write_text(found, encoding="utf-8")
    assert found == GOLDEN.read_text(encoding="utf-8"), f"accept it: cp {new} {GOLDEN}"


@pytest.mark.parametrize("name", KERNELS)
def test_the_text_is_plain_python_that_fits_the_line(name: str) -> None:
    text = text_of(name)
    tree = ast.parse(text)
    assert max(map(len, text.splitlines())) <= 120
    assert set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)) == {"os", "typing", "torch", "triton"}
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert functions[-2:] == ["pointwise", "launch"] and all(f"{name}(" in text for name in functions)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        keywords = {keyword.arg for keyword in call.keywords}
        assert ast.unparse(call.func) != "tl.load" or ("mask" in keywords) == ("other" in keywords)


def test_a_small_launch_starts_early_and_reads_past_the_l1_cache() -> None:
    """It waits before its first load. A long row that is read in steps is no such launch, nor one of many programs."""
    body = text_of("norm").partition("def pointwise(")[2]
    assert body.index("start_next_launch(") < body.index("await_earlier_launch(") < body.index("tl.load(")
    assert body.count("tl.load(") == body.count("cache_modifier='.cg'") and '"launch_pdl": True' in text_of("norm")
    assert "launch_pdl" not in text_of("spread") and ".cg" not in text_of("spread")
    many = list(make_fx(norm, tracing_mode="fake")(torch.ones(1024, 2048), torch.ones(2048)).graph.nodes)
    members = [node for node in many if node.op == "call_function"]
    text = build_nodes(members, many[-1].args[0], [n for n in many if n.op == "placeholder"]).text
    assert "launch_pdl" not in text and "await_earlier_launch" not in text


class Together(torch.nn.Module):
    """All chains of the benchmark, each over operands of its own."""

    def forward(self, *operands: Tensor) -> tuple[Any, ...]:
        results: list[Any] = []
        for chain in CHAINS:
            count = len(chain.shapes(1))
            results.append(chain.function(*operands[:count]))
            operands = operands[count:]
        return tuple(results)


def resources(directory: Path) -> dict[str, dict[str, Any]]:
    """What the compiler recorded of each generated kernel, by file name."""
    return {
        path.name: json.loads(path.read_text())
        for path in sorted((directory / "kernels").glob("*.json"))
        if path.name.startswith(("pointwise_", "rms_norm_"))
    }


def test_each_chain_is_one_kernel_without_spills(artifact_directory: Path) -> None:
    shapes = [shape for chain in CHAINS for shape in chain.shapes(64)]
    operands = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in shapes)
    config = CompileConfig(target="cuda:sm_90")
    program = capture_module(Together(), operands, {}, config)
    run_pipeline(program, Pipeline.parse("canonicalize,fuse-pointwise"), PassContext(config))
    assert graph_launches(program.graph_module.graph) == len(CHAINS)
    build_artifact(program, "cuda:sm_90", artifact_directory, self_test=False)
    found = resources(artifact_directory)
    assert len(found) == len(CHAINS)
    for name, facts in found.items():
        assert facts["registers"] <= REGISTERS and facts["stack_bytes"] == 0, name
        assert sorted(facts["divisible"]) == sorted(facts["arguments"]), name


def optimized(level: int, batch: int) -> CapturedProgram:
    """A decode step of the example, three KDA layers and a DSA layer, with regions; they stay apart."""
    overrides = (("num_hidden_layers", "4"),)
    config = CompileConfig(
        *("cuda:sm_90", level), batch=batch, context=64, dtype="bfloat16", cache="off", overrides=overrides
    )
    program = capture(load_source(EXAMPLE, config), config)
    run_pipeline(program, default_pipeline(config).without(("merge-regions",)), PassContext(config))
    return program


@pytest.fixture(scope="module")
def tiny() -> CapturedProgram:
    """As most compile it."""
    return optimized(2, 2)


@pytest.mark.parametrize(("level", "batch"), [(2, 2), (3, 1)])
def test_every_kernel_of_the_example_compiles_within_the_budget(
    level: int, batch: int, artifact_directory: Path
) -> None:
    build_artifact(optimized(level, batch), "cuda:sm_90", artifact_directory, self_test=False)
    found = resources(artifact_directory)
    assert len(found) > 6
    for name, facts in found.items():
        source = (artifact_directory / "kernels" / name.split(".")[0]).with_suffix(".py").read_text()
        most = PRODUCT_REGISTERS if "COLUMN_STEP" in source else REGISTERS
        assert facts["registers"] <= most and facts["stack_bytes"] == 0, name


def test_equal_layers_share_a_kernel(tiny: CapturedProgram) -> None:
    built = build_kernels(tiny.graph_module.graph, "cuda").files
    files = [file for file in built if file.name.startswith(("pointwise", "horizontal"))]
    shared = [file for file in files if len(file.nodes) > 1]
    assert len(files) < 0.8 * sum(len(file.nodes) for file in files)
    header = ast.get_docstring(ast.parse(shared[0].text())) or ""
    assert all(node.name in header for node in shared[0].nodes)
    assert all(name in header for name in shared[0].nodes[1].meta["replaces"])
    keys = {region_key(node) for node in tiny.graph_module.graph.nodes if node.op == "call_module"}
    assert len(keys) == len(files)  # each is built once


def test_what_cannot_be_one_kernel_is_refused_with_the_node() -> None:
    nodes = list(make_fx(lambda x: (x.sum(0), x.sum(1)), tracing_mode="fake")(torch.ones(3, 4)).graph.nodes)
    with pytest.raises(CompileError, match=r"differ in size \(node sum_2\).*--disable-pass fuse-pointwise"):
        build_nodes(nodes[1:3], nodes[1:3], nodes[:1])


def test_indices_past_31_bits_are_wide() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + y

    with FakeTensorMode():
        small, large = (torch.empty(rows, 40_000, dtype=BF16) for rows in (50_000, 60_000))
        row = torch.empty(40_000, dtype=BF16)
        texts: list[str] = []
        for x in (small, large):
            nodes = list(make_fx(function)(x, row).graph.nodes)
            texts.append(build_nodes(nodes[2:-1], nodes[-1].args[0], nodes[:2]).text)
    assert "tl.program_id(0).to(tl.int64)" not in texts[0] and "tl.program_id(0).to(tl.int64)" in texts[1]
