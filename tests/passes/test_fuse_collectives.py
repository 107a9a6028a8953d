"""``fuse-collectives``: sums and gathers of one launch give what the library's collectives give."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.fake import infer
from kimigraph.ir.lock_step import run_ranks
from kimigraph.ir.mesh import COLLECTIVES, TP_GROUP
from kimigraph.ir.program import CapturedProgram, InputSpec, OutputSpec
from kimigraph.ir.remarks import PassResult
from kimigraph.ir.verifier import verify
from kimigraph.passes.base import PassContext
from kimigraph.passes.fuse_collectives import FuseCollectives

ATEN, C10D = torch.ops.aten, getattr(torch.ops, COLLECTIVES)


class Step:
    """A step of ``ways`` ranks over one input, built a node at a time."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, ways: int) -> None:
        self.graph, self.ways = Graph(), ways
        self.x = self.graph.placeholder("x")
        with FakeTensorMode():
            self.x.meta["val"] = torch.empty(shape, dtype=dtype)

    def make(self, target: Any, *args: Any) -> Node:
        node = self.graph.call_function(target, args)
        infer(node)
        return node

    def summed(self, x: Node, how: str = "sum") -> Node:
        return self.make(C10D.wait_tensor.default, self.make(C10D.all_reduce.default, x, how, TP_GROUP))

    def gathered(self, x: Node, dim: int = 0) -> Node:
        pending = self.make(C10D.all_gather_into_tensor.default, x, self.ways, TP_GROUP)
        whole, rows = self.make(C10D.wait_tensor.default, pending), x.meta["val"].shape[0]
        if dim == 0:
            return whole
        spans = [(rank * rows, (rank + 1) * rows) for rank in range(self.ways)]
        return self.make(ATEN.cat.default, [self.make(ATEN.slice.Tensor, whole, 0, *span) for span in spans], dim)

    def program(self, *outputs: Node) -> CapturedProgram:
        self.graph.output(outputs)
        value = self.x.meta["val"]
        spec = InputSpec("x", "input", "x", tuple(value.shape), value.stride(), str(value.dtype)[6:])
        names = tuple(OutputSpec(str(number), str(number)) for number in range(len(outputs)))
        module = GraphModule(torch.nn.Module(), self.graph)
        return CapturedProgram(module, (spec,), names, info={"mesh": {"tp": self.ways}})


def applied(program: CapturedProgram, target: str = "cuda:sm_90") -> PassResult:
    context = PassContext(CompileConfig(target=target, tp=program.info["mesh"]["tp"]))
    return FuseCollectives().apply(program, context)


def called(program: CapturedProgram) -> list[str]:
    return [str(node.target).split(".")[1] for node in program.graph_module.graph.nodes if node.op == "call_function"]


def run(program: CapturedProgram, seed: int = 0) -> list[tuple[torch.Tensor, ...]]:
    [spec] = program.inputs
    dtype, ways = getattr(torch, spec.dtype), program.info["mesh"]["tp"]
    torch.manual_seed(seed)
    given = [(torch.randn(spec.shape) * 8).to(dtype) for _ in range(ways)]
    return run_ranks(program.graph_module, [[x] for x in given], program.info["mesh"])


@pytest.mark.parametrize("ways", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_gathers_are_one_call_each(dtype: torch.dtype, ways: int) -> None:
    step = Step((4, 2, 8), dtype, ways)
    total = step.summed(step.x)
    program = step.program(total, step.gathered(total, 2), step.gathered(step.x, 1), step.gathered(step.x))
    wanted = run(program)
    result = applied(program)
    verify(program)
    assert result.statistics == {"fused": 4}
    assert called(program) == ["rank_sum", "rank_gather", "rank_gather", "rank_gather"]
    rounded = 0.0 if dtype == torch.float32 or ways == 2 else 2**-7  # a collective rounds between ranks
    for each, before in zip(run(program), wanted, strict=True):
        for a, b in zip(each, before, strict=True):
            torch.testing.assert_close(a, b, rtol=rounded, atol=rounded)


def test_what_is_written_behind_a_collectives_start_is_not_summed() -> None:
    step = Step((8,), torch.float32, 2)
    own = step.make(ATEN.clone.default, step.x)
    start = step.make(C10D.all_reduce.default, own, "sum", TP_GROUP)
    written = step.make(ATEN.mul_.Tensor, own, 0.0)
    program = step.program(step.make(C10D.wait_tensor.default, start), written)
    applied(program)
    assert called(program) == ["clone", "rank_sum", "mul_"]


def test_a_group_that_the_mesh_has_not_is_left_alone() -> None:
    step = Step((8,), torch.float32, 2)
    pending = step.make(C10D.all_reduce.default, step.x, "sum", "somebody's")
    program = step.program(step.make(C10D.wait_tensor.default, pending))
    [remark] = applied(program).remarks
    assert "no dim of the mesh" in remark.message and called(program) == ["all_reduce", "wait_tensor"]


def test_picks_are_gathered_and_not_summed() -> None:
    step = Step((4, 1, 8), torch.int32, 2)
    program = step.program(step.summed(step.x), step.gathered(step.x))
    result = applied(program)
    assert called(program) == ["all_reduce", "wait_tensor", "rank_gather"]
    [missed] = [remark for remark in result.remarks if remark.kind == "missed"]
    assert "no contiguous run of words" in missed.message and "library" in missed.remedy


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "told"),
    [
        ((1024,), torch.float32, {"most_summed": 0.001}, "each rank sends 0.0 MB, more than 0.001"),
        ((3,), torch.bfloat16, {}, "no contiguous run of words"),
    ],
)
def test_what_is_left_to_the_library_is_told(
    shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, float], told: str
) -> None:
    step = Step(shape, dtype, 2)
    program = step.program(step.summed(step.x))
    result = FuseCollectives(**options).apply(program, PassContext(CompileConfig(target="cuda:sm_90", tp=2)))
    assert not result.modified and called(program) == ["all_reduce", "wait_tensor"]
    assert [told in remark.message for remark in result.remarks] == [True]


def test_a_maximum_stays() -> None:
    step = Step((8,), torch.float32, 2)
    program = step.program(step.summed(step.x, "max"))
    assert not applied(program).modified


def test_rows_that_begin_between_words_of_16_bytes_stay() -> None:
    step = Step((9,), torch.float32, 2)
    program = step.program(step.summed(step.make(ATEN.slice.Tensor, step.x, 0, 1, 9)))
    assert not applied(program).modified


def test_half_words_that_stand_together_are_put_in_place_by_a_copy() -> None:
    """Three bf16 of each rank in a row: the gather is one launch, the copy remains."""
    step = Step((4, 3), torch.bfloat16, 2)
    program = step.program(step.gathered(step.x, 1))
    wanted = run(program)
    assert applied(program).statistics == {"fused": 1}
    assert called(program) == ["rank_gather", "slice", "slice", "cat"]
    assert all(torch.equal(a, b) for (a,), (b,) in zip(run(program), wanted, strict=True))


def test_cpus_have_no_memory_of_one_another() -> None:
    step = Step((8,), torch.float32, 2)
    assert not applied(step.program(step.summed(step.x)), "cpu:reference").remarks
