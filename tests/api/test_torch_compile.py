"""``torch.compile(model, backend="kimigraph")``: values, caches in place, shapes, options, refusals."""

import copy
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kimigraph
from kimigraph import TorchBackend
from kimigraph.ir.errors import CaptureError, UsageError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.relu(self.project(x)))


class Step(nn.Module):
    """Two layers, a cache that is written, a counter among the buffers, and a plain value in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> dict[str, Any]:
        for block in self.blocks:
            x = block(x)
        cache["last"].copy_(x)
        self.steps.add_(1)
        return {"out": x + self.steps, "layers": 2}


class Halves(nn.Module):
    """Dynamo compiles one function for both halves, and breaks between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def compiled_by(backend: Any, model: nn.Module) -> Any:
    return torch.compile(model, backend=backend)


@torch.no_grad()
def test_a_compiled_model_gives_the_values_of_eager_and_updates_caches_and_buffers() -> None:
    model = Step().eval()
    eager, backend = copy.deepcopy(model), TorchBackend()
    step = compiled_by(backend, model)
    for size in (2, 2, 3, 5, 3):  # the third call has another shape, the fourth none that Dynamo compiles for
        x, mine, theirs = torch.randn(size, 8), {"last": torch.zeros(size, 8)}, {"last": torch.zeros(size, 8)}
        got, want = step(x, mine), eager(x, theirs)
        torch.testing.assert_close(got["out"], want["out"])
        torch.testing.assert_close(mine["last"], theirs["last"])
        torch.testing.assert_close(model.steps, eager.steps)
        assert got["layers"] == 2
    assert len(backend.graphs) == 2
    (spec,) = backend.graphs[0].programs[0][1].cache_spec
    assert (spec.source, spec.shape) == ("cache_last", (2, 8))
    report = backend.report()[0]
    assert report.target == "cpu:reference" and report.source == "Block"


@torch.no_grad()
def test_each_instance_of_a_layer_is_computed_with_its_own_parameters() -> None:
    layers, backend = [Block().eval() for _ in range(3)], TorchBackend()
    compiled = [torch.compile(layer, backend=backend) for layer in layers]
    x = torch.randn(4, 8)
    for layer, step in [*zip(layers, compiled, strict=True)] * 2:
        torch.testing.assert_close(step(x), layer(x))
    assert sum(len(graph.programs) for graph in backend.graphs) == 3


@torch.no_grad()
def test_a_parameter_that_changes_in_place_is_seen_and_so_is_one_that_is_replaced() -> None:
    model = Block().eval()
    compiled = compiled_by(TorchBackend(), model)
    x = torch.randn(4, 8)
    compiled(x)
    model.project.weight.copy_(torch.randn(8, 8))
    torch.testing.assert_close(compiled(x), model.forward(x))
    model.project.weight = nn.Parameter(torch.randn(8, 8))
    torch.testing.assert_close(compiled(x), model.forward(x))


@torch.no_grad()
def test_explain_names_graph_breaks_with_their_place_and_what_was_fused() -> None:
    model, backend = Halves().eval(), TorchBackend()
    x = torch.randn(2, 8)
    torch.testing.assert_close(compiled_by(backend, model)(x), model(x))
    text = backend.explain("fuse-pointwise")
    assert text.startswith("2 graphs, 1 graph breaks")
    assert "ends with a graph break" in text and "test_torch_compile.py:" in text
    assert "fused: fuse-pointwise" in text


def test_a_graph_with_gradients_is_refused_with_the_remedy() -> None:
    with pytest.raises(Exception, match=r"gradients flow through it.*torch\.no_grad\(\)") as caught:
        compiled_by("kimigraph", Block())(torch.randn(2, 8))
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), CaptureError)


def test_a_graph_with_gradients_may_run_eagerly_and_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    model, backend = Block(), TorchBackend(fallback="eager")
    with caplog.at_level(logging.WARNING, "kimigraph"):
        compiled_by(backend, model)(torch.randn(2, 8)).sum().backward()
    assert model.project.weight.grad is not None
    assert "runs eagerly: gradients flow through it" in caplog.text
    assert "runs eagerly: gradients flow through it" in backend.explain()
    assert backend.report() == []


@torch.no_grad()
def test_a_graph_that_cannot_be_captured_is_refused_or_runs_eagerly() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).train()
    x = torch.randn(2, 8)
    with pytest.raises(CaptureError, match="random"):
        compiled_by("kimigraph", model)(x)
    torch._dynamo.reset()
    backend = TorchBackend(fallback="eager")
    assert compiled_by(backend, model)(x).shape == (2, 8)
    assert "random" in backend.explain()


def graphs_made(backend: Any, sizes: Sequence[int]) -> list[int]:
    """How many graphs there are after each of these calls."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled, counts = torch.compile(Step().eval(), backend=backend), list[int]()
    for size in sizes:
        compiled(torch.randn(size, 8), {"last": torch.zeros(size, 8)})
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return counts


@torch.no_grad()
@pytest.mark.parametrize(
    "other",
    [
        "eager",
        pytest.param("inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++")),
    ],
)
def test_dynamo_compiles_no_more_graphs_than_for_another_backend(other: str) -> None:
    sizes = (2, 3, 4, 7, 2, 3, 4, 7)
    assert graphs_made("kimigraph", sizes) == graphs_made(other, sizes) == [1, 2, 2, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("mode", "level", "cuda_graph"),
    [
        (None, 2, False),
        ("default", 2, False),
        ("reduce-overhead", 2, True),
        ("max-autotune", 3, True),
        ("max-autotune-no-cudagraphs", 3, False),
    ],
)
def test_modes_are_levels(mode: str | None, level: int, cuda_graph: bool) -> None:
    config = TorchBackend(mode)._config
    assert (config.opt_level, config.cuda_graph) == (level, cuda_graph)
    assert TorchBackend(mode, opt_level=1)._config.opt_level == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opt_lvel": 1}, "did you mean 'opt_level'"),
        ({"batch": 4}, "describes the model"),
        ({"policy": "article"}, "describes the model"),
        ({"fallback": "maybe"}, "'refuse' or 'eager'"),
    ],
)
def test_unknown_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TorchBackend(**options)


@torch.no_grad()
def test_options_reach_the_compilation(tmp_path: Path) -> None:
    options = {"opt_level": 0, "dump_passes": str(tmp_path / "dumps"), "target": "cpu:reference", "cache": "off"}
    model, x = Halves().eval(), torch.randn(2, 8)
    torch.testing.assert_close(torch.compile(model, backend="kimigraph", options=options)(x), model(x))
    assert sorted(path.name for path in (tmp_path / "dumps").iterdir()) == ["graph-1", "graph-2"]
    assert (tmp_path / "dumps" / "graph-1" / "000-capture.py").is_file()


@torch.no_grad()
def test_the_compile_cache_is_shared_with_optimize() -> None:
    model, x = Block().eval(), torch.randn(2, 8)
    for status in ("miss", "hit"):
        torch._dynamo.reset()
        backend = TorchBackend()
        compiled_by(backend, model)(x)
        assert backend.report()[0].cache["status"] == status


@pytest.mark.parametrize(
    "first", ["import kimigraph, torch", "import torch, torch._dynamo; torch._dynamo.list_backends(); import kimigraph"]
)
def test_importing_a_source_tree_offers_the_backend_once(first: str) -> None:
    code = f"{first}; print(torch._dynamo.list_backends().count('kimigraph'))"
    code += "; print(torch.compile(torch.nn.ReLU(), backend='kimigraph')(-torch.ones(2)).tolist())"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_LOGS": "+kimigraph"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd="/")
    assert done.stdout.split("\n")[:2] == ["1", "[0.0, 0.0]"], done.stderr
    assert "graph 1 is of" in done.stderr and "compiling" in done.stderr


def test_the_backend_is_public() -> None:
    assert "TorchBackend" in kimigraph.__all__
