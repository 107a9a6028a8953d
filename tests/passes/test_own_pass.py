"""A stranger's pass: written outside kimigraph, registered, named in a pipeline, run, dumped and required.

This is the worked example of writing a pass; read it from top to bottom.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import kimigraph.passes
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import RequiredFusionError, UsageError
from kimigraph.ir.fake import infer
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.provenance import source_line
from kimigraph.ir.purity import dead_code, mutation_between
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.passes import DumpPasses, Pass, PassContext, PassRegistry, Pipeline, default_pipeline, run_pipeline

ATEN = torch.ops.aten


@dataclass(frozen=True)
class FuseMultiplyAdd(Pass):
    """``x + a * b`` becomes ``addcmul(x, a, b)``, where nothing else reads the product.

    Options: ``limit``, the most rewrites in one run (none: all of them).
    """

    name: ClassVar[str] = "fuse-multiply-add"
    summary: ClassVar[str] = "x + a * b to one operator"
    fusion: ClassVar[bool] = True

    limit: int | None = None

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        graph = program.graph_module.graph
        remarks: list[Remark] = []
        for node in list(graph.nodes):
            if node.target is not ATEN.add.Tensor or self._done(remarks):
                continue
            addend, product = node.args
            if not isinstance(product, torch.fx.Node) or product.target is not ATEN.mul.Tensor:
                continue
            reason = self._refusal(graph, node, product)
            if reason:
                remarks.append(Remark("missed", self.name, reason, product.name, source_line(node), score=1))
                continue
            with graph.inserting_before(node):
                new = graph.call_function(ATEN.addcmul.default, (addend, *product.args))
            infer(new)
            new.meta["replaces"] = (product.name, node.name)
            node.replace_all_uses_with(new, propagate_meta=False)
            remarks.append(Remark("passed", self.name, "fused", new.name, source_line(node)))
        dead_code(graph)
        return PassResult(any(r.kind == "passed" for r in remarks), tuple(remarks))

    def _done(self, remarks: list[Remark]) -> bool:
        return self.limit is not None and sum(remark.kind == "passed" for remark in remarks) >= self.limit

    def _refusal(self, graph: torch.fx.Graph, node: torch.fx.Node, product: torch.fx.Node) -> str:
        if len(product.users) > 1:
            return f"the product is read by {len(product.users)} nodes"
        for factor in product.all_input_nodes:
            write = mutation_between(graph, factor, product, node)
            if write is not None:
                return f"'{write.name}' writes '{factor.name}' between product and sum"
        return ""


def model(x: torch.Tensor, a: torch.Tensor, state: torch.Tensor) -> Any:
    first = x + a * x
    shared = a * 3.0 * x
    second = first + shared
    product = state * x
    state.add_(1)
    return second + product, shared, x + a * state


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> PassRegistry:
    """The registry of this process, put back afterwards."""
    registry = kimigraph.passes.registry.default_registry()
    monkeypatch.setattr(registry, "sources", dict(registry.sources))
    return registry


@pytest.fixture
def inputs() -> list[torch.Tensor]:
    return [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def test_it_runs_under_its_name_with_its_options(
    registry: PassRegistry,
    inputs: list[torch.Tensor],
    trace: Callable[..., CapturedProgram],
    run: Callable[..., Any],
    count: Callable[..., int],
    tmp_path: Path,
) -> None:
    kimigraph.passes.register(FuseMultiplyAdd)
    config = CompileConfig(passes="canonicalize,fuse-multiply-add", required_fusions=("fuse-multiply-add",))
    pipeline = default_pipeline(config)
    assert pipeline.names == ["canonicalize", "fuse-multiply-add"] and str(pipeline) == config.passes

    program = trace(model, *inputs)
    expected, updated = run(program, *inputs)
    records = run_pipeline(program, pipeline, PassContext(config), [DumpPasses(tmp_path)])
    found, updated_after = run(program, *inputs)
    for old, new in zip([*expected, *updated], [*found, *updated_after], strict=True):
        torch.testing.assert_close(old, new)

    kimigraph.passes.check_required_fusions(records, config)
    (summary,) = kimigraph.passes.fusion_summary(records)
    assert (summary["rule"], summary["count"]) == ("fuse-multiply-add", 2)
    assert count(program.graph_module.graph, ATEN.addcmul.default) == 2
    reasons = [r.message for r in records[1].result.remarks if r.kind == "missed"]
    assert reasons == ["the product is read by 2 nodes", "'add_' writes 'state_1' between product and sum"]
    assert len((tmp_path / "002-fuse-multiply-add.diff").read_text()) > 0
    remarks = [json.loads(line) for line in (tmp_path / "remarks.jsonl").read_text().splitlines()]
    assert [remark["kind"] for remark in remarks].count("passed") == 2


def test_an_option_reaches_it(
    registry: PassRegistry, inputs: list[torch.Tensor], trace: Any, count: Any, context: PassContext
) -> None:
    registry.add(FuseMultiplyAdd.name, FuseMultiplyAdd)
    program = trace(model, *inputs)
    run_pipeline(program, Pipeline.parse("fuse-multiply-add{limit=1}"), context)
    assert count(program.graph_module.graph, ATEN.addcmul.default) == 1


def test_when_required_and_not_fired_its_reason_is_told(
    registry: PassRegistry, inputs: list[torch.Tensor], trace: Any
) -> None:
    registry.add(FuseMultiplyAdd.name, FuseMultiplyAdd)
    config = CompileConfig(passes="fuse-multiply-add{limit=0}", required_fusions=("fuse-multiply-add",))
    records = run_pipeline(trace(model, *inputs), default_pipeline(config), PassContext(config))
    with pytest.raises(RequiredFusionError, match="nothing in the graph resembles"):
        kimigraph.passes.check_required_fusions(records, config)


def test_the_name_of_a_built_in_pass_is_taken(registry: PassRegistry) -> None:
    @dataclass(frozen=True)
    class Canonicalize(Pass):
        """Not the built-in one."""

        name: ClassVar[str] = "canonicalize"
        summary: ClassVar[str] = "an impostor"

    with pytest.raises(UsageError, match="two passes are called 'canonicalize'"):
        kimigraph.passes.register(Canonicalize)


def test_a_pass_without_summary_is_not_registered(registry: PassRegistry) -> None:
    @dataclass(frozen=True)
    class Nameless(Pass):
        """Has a name and no summary."""

        name: ClassVar[str] = "nameless"

    with pytest.raises(UsageError, match="needs class attributes `name` and `summary`"):
        kimigraph.passes.register(Nameless)


def test_an_installed_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    import kimigraph.passes.registry as module

    entry = EntryPoint("fuse-multiply-add", f"{__name__}:FuseMultiplyAdd", "kimigraph.passes")
    monkeypatch.setattr(EntryPoint, "load", lambda self: FuseMultiplyAdd)
    monkeypatch.setattr(module, "entry_points", lambda group: [entry] if group == "kimigraph.passes" else [])
    fresh = module.default_registry.__wrapped__()
    assert Pipeline.parse("fuse-multiply-add{limit=2}", fresh) == Pipeline((FuseMultiplyAdd(2),))
    assert fresh.names[-1] == "fuse-multiply-add"


def test_the_pass_that_the_page_shows_does_what_it_says(
    tmp_path: Path, trace: Any, run: Any, count: Any, context: PassContext
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "writing_passes.md").read_text(encoding="utf-8")
    (tmp_path / "page.py").write_text(page.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    spec = spec_from_file_location("page", tmp_path / "page.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)

    def negated(x: torch.Tensor, state: torch.Tensor) -> Any:
        kept = -state
        state.add_(1)
        return torch.neg(-x) + 1, -kept

    inputs = torch.randn(3, 4), torch.randn(3, 4)
    program = trace(negated, *inputs)
    before = run(program, *inputs)
    pipeline = Pipeline((module.DropDoubleNegation(),))
    first, again = (run_pipeline(program, pipeline, context)[0].result for _ in range(2))
    torch.testing.assert_close(run(program, *inputs), before)
    assert (first.modified, again.modified, first.statistics["dropped"]) == (True, False, 1)
    assert [r.message for r in first.remarks if r.kind == "missed"] == ["add_ writes what neg negates"]
    assert count(program.graph_module.graph, ATEN.neg.default) == 2
