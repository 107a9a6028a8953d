"""Programs for several ranks: what they call, and the files beside them."""

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from kimigraph.codegen import build_artifact
from kimigraph.ir.errors import UsageError
from kimigraph.ir.fake import infer
from kimigraph.ir.lock_step import run_ranks
from kimigraph.ir.mesh import COLLECTIVES, TP_GROUP, DeviceMesh
from kimigraph.ir.own_rows import OWN_ROWS
from kimigraph.ir.program import CapturedProgram, InputSpec, OutputSpec
from kimigraph.ir.ranks import rows_of
from kimigraph.runtime.executor import Executor
from kimigraph.runtime.parallel import join_ranks


def summed_rows() -> CapturedProgram:
    """A step that sums x over two ranks and returns each rank's rows."""
    collectives = getattr(torch.ops, COLLECTIVES)
    graph = Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(4, 8)
    pending = graph.call_function(collectives.all_reduce.default, (x, "sum", TP_GROUP))
    whole = graph.call_function(collectives.wait_tensor.default, (pending,))
    rows = graph.call_function(OWN_ROWS, (whole, 2, TP_GROUP))
    out = graph.call_function(torch.ops.aten.clone.default, (rows,))
    graph.output((out,))
    for node in (pending, whole, rows, out):
        infer(node)
    spec = InputSpec("x", "input", "x", (4, 8), (8, 1), "float32")
    module = GraphModule(torch.nn.Module(), graph)
    return CapturedProgram(module, (spec,), (OutputSpec("out", "out"),), info={"mesh": {"tp": 2}})


@pytest.mark.parametrize(("rows", "width", "aligned"), [(2, 1, False), (2, 4, True), (6, 1, False), (6, 2, True)])
def test_rows_of_a_rank_are_aligned_where_those_of_all_ranks_are(rows: int, width: int, aligned: bool) -> None:
    """Rows of the first rank always are; a kernel compiled for that would refuse, or misread, those of another."""
    ways = rows // (2 if rows > 2 else 1)
    with FakeTensorMode():
        own = OWN_ROWS(torch.empty(rows, width, dtype=torch.int32), ways, TP_GROUP)
    assert own.shape == (rows // ways, width)
    assert (own.storage_offset() * own.element_size() % 16 == 0) is aligned


def test_ranks_in_lock_step() -> None:
    program, parts = summed_rows(), [torch.randn(4, 8), torch.randn(4, 8)]
    results = run_ranks(program.graph_module, [[part] for part in parts])
    for rank, (rows,) in enumerate(results):
        assert torch.equal(rows, (parts[0] + parts[1])[2 * rank : 2 * rank + 2])


@pytest.mark.parametrize("target", ["cpu:reference", "cuda"])
def test_what_a_program_needs_of_ranks_lies_beside_it(target: str, tmp_path: Path) -> None:
    manifest = build_artifact(summed_rows(), target, tmp_path)
    text = (tmp_path / "program.py").read_text()
    assert manifest.ways == 2 and "torch.ops.kimigraph" not in text and "ranks.own_rows(" in text
    assert "_c10d_functional.all_reduce" in text
    listed = {record.path for record in manifest.files}
    assert {"support/ranks.py", "support/shares.py"} <= listed
    assert "out" in manifest.checksums


def test_a_process_that_has_joined_no_ranks_cannot_bind_such_a_program(tmp_path: Path) -> None:
    build_artifact(summed_rows(), "cpu:reference", tmp_path)
    with pytest.raises(UsageError, match="for 2 ranks, and this process has not joined them"):
        Executor(tmp_path, {})
    with pytest.raises(UsageError, match="torchrun --nproc-per-node 2"):
        join_ranks(DeviceMesh(tp=2), "cpu:reference")


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="2 ranks do not divide 3 rows"):
        rows_of(torch.zeros(3), 2, 0)
