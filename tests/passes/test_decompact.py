"""Undoing compaction (``x[:, keep]``): only where the mask under the top-k makes it needless, else a remark."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kimigraph.ir.program import CapturedProgram
from kimigraph.passes import PassContext, Pipeline, run_pipeline
from kimigraph.passes.canonicalize import Canonicalize

ATEN = torch.ops.aten
B, S, P, D, K, W = 2, 3, 8, 5, 3, 4
"""Sequences, rows, pools, key width, pools picked, slots per pool."""


class Pools(torch.nn.Module):
    """Scores pools, picks some and marks their slots: the form that models compact, with one thing wrong on request."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, q: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor, visible: torch.Tensor) -> Any:
        keep = valid.any(0)
        slots = (torch.arange(P * W).view(1, P, W) + torch.zeros(B, 1, 1, dtype=torch.int64)).masked_fill(
            ~valid[..., None], -1
        )
        keys, slots, valid, visible = keys[:, keep], slots[:, keep], valid[:, keep], visible[:, keep]
        scores = torch.matmul(q, keys.transpose(-1, -2)).sigmoid() * 0.5  # no ReLU: zeros would tie
        candidates = visible[:, None] & valid[:, None].expand(B, S, -1)
        if self.wrong == "mask":
            candidates = visible[:, None].expand(B, S, -1)
        if self.wrong == "order":
            return scores.masked_fill(~candidates, -1e38).topk(min(K, scores.shape[-1]))[1].float()
        scores = scores.masked_fill(~candidates, -1.0 if self.wrong == "fill" else -1e38)
        if self.wrong == "sum":
            scores = scores - scores.sum(-1, keepdim=True)
        if self.wrong == "count":
            scores = scores * keys.shape[1]
        if self.wrong == "unmasked":
            scores = scores + 1
        k = {"half": scores.shape[-1] // 2}.get(self.wrong, min(K, scores.shape[-1]))
        top = scores.topk(k, dim=-1, largest=self.wrong != "smallest")
        picks = top.indices
        chosen = candidates.gather(-1, picks)
        slot = slots[torch.arange(B)[:, None, None], picks].flatten(-2)
        if self.wrong != "refused picks":
            slot = slot.masked_fill(~chosen[..., None].expand(B, S, -1, W).flatten(-2), -1)
        slot = torch.cat([slot, torch.full((B, S, 2), P * W - 1)], -1)
        slot = torch.nn.functional.pad(slot, (0, 20 - slot.shape[-1]), value=0 if self.wrong == "padding" else -1)
        if self.wrong == "cut":
            slot = slot[..., :6]
        if self.wrong == "weights":
            slot = slot.masked_fill(torch.arange(20) % 2 == 0, -1)
        inside = (slot >= 0).to(torch.float32 if self.wrong == "float sum" else torch.int32)
        base = torch.zeros(B, S, P * W, dtype=inside.dtype)
        marked = base.scatter_add(-1, slot.clamp(0), inside) != 0
        return (marked, top.values) if self.wrong == "values" else marked


def inputs(seed: int, density: float) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    valid = torch.rand(B, P, generator=generator) < density
    visible = torch.rand(B, P, generator=generator) < 0.7
    return torch.randn(B, S, D, generator=generator), torch.randn(B, P, D, generator=generator), valid, visible


@pytest.fixture
def export(program_of: Callable[..., CapturedProgram]) -> Callable[[torch.nn.Module], CapturedProgram]:
    def export_module(module: torch.nn.Module) -> CapturedProgram:
        with torch.no_grad():
            exported = torch.export.export(module, inputs(0, 0.5), strict=False).run_decompositions({})
        return program_of(exported.graph_module)

    return export_module


def symbolic(program: CapturedProgram) -> list[str]:
    return [node.name for node in program.graph_module.graph.nodes if "u0" in str(node.meta.get("val"))]


def test_compaction_under_a_mask_that_refuses_what_it_drops_goes(
    export: Any, run: Any, count: Any, context: PassContext
) -> None:
    model = Pools()
    program = export(model)
    assert len(symbolic(program)) > 20 and count(program.graph_module.graph, ATEN._assert_scalar.default) >= 2
    (record,) = run_pipeline(program, Pipeline((Canonicalize(),)), context)
    graph = program.graph_module.graph
    assert symbolic(program) == [] and count(graph, ATEN._assert_scalar.default) == 0
    assert count(graph, ATEN.sym_size.int) == 0
    assert [node.args[1] for node in graph.nodes if node.target is ATEN.topk.default] == [K]
    assert record.result.statistics["compactions-undone"] == 1
    assert [(r.kind, len(r.nodes)) for r in record.result.remarks] == [("passed", 4)]
    marked = 0
    for seed in range(12):
        tensors = inputs(seed, density=seed / 10)
        (found,), _ = run(program, *tensors)
        assert torch.equal(found, model(*tensors))
        marked += int(found.sum())
    assert marked > 200


REFUSALS = {
    "mask": "does not refuse what 'any_1' drops",
    "order": "output reads a compacted axis",
    "fill": "no mask",
    "sum": "has no rule here",
    "count": "no mask",
    "unmasked": "no mask",
    "half": "how many it picks",
    "smallest": "does not pick the largest",
    "refused picks": "missing ones are not masked",
    "padding": "pads with another value",
    "cut": "cuts the compacted axis",
    "weights": "position by position",
    "float sum": "may add to the sum",
    "values": "values of the top-k are used",
}


@pytest.mark.parametrize("wrong", REFUSALS)
def test_compaction_that_matters_stays_with_a_reason(
    wrong: str, export: Any, run: Any, count: Any, context: PassContext
) -> None:
    model = Pools(wrong)
    program = export(model)
    (record,) = run_pipeline(program, Pipeline((Canonicalize(),)), context)
    (remark,) = record.result.remarks
    assert remark.kind == "missed" and remark.node and remark.source
    assert REFUSALS[wrong] in remark.message
    assert symbolic(program) != []
    assert count(program.graph_module.graph, ATEN.index.Tensor) >= 3
    tensors = inputs(5, 0.6)
    expected = model(*tensors)
    outputs, _ = run(program, *tensors)
    for found, wanted in zip(outputs, expected if isinstance(expected, tuple) else (expected,), strict=True):
        assert torch.equal(found, wanted)


def test_it_can_be_turned_off(export: Any, context: PassContext) -> None:
    program = export(Pools())
    (record,) = run_pipeline(program, Pipeline.parse("canonicalize{decompact=false}"), context)
    assert symbolic(program) != [] and record.result.remarks == ()
