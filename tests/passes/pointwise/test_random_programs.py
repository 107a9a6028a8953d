"""``fuse-pointwise`` on random programs: the child graphs compute every bit of eager, writes in place included."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from random_programs import RandomProgram, programs

from kimigraph.ir.launches import graph_launches
from kimigraph.ir.pointwise import lower
from kimigraph.ir.purity import dead_code, region_module
from kimigraph.passes import PassContext, Pipeline, run_pipeline
from kimigraph.passes.fuse_pointwise import FusePointwise


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=programs())
def test_fused_programs_keep_every_bit(
    program: RandomProgram, trace: Callable[..., Any], run: Any, context: PassContext
) -> None:
    tensors = program.tensors()
    captured = trace(program, *tensors)
    dead_code(captured.graph_module.graph)
    before = graph_launches(captured.graph_module.graph)
    [record] = run_pipeline(captured, Pipeline((FusePointwise(),)), context)
    found = run(captured, *tensors)
    eager = [tensor.clone() for tensor in tensors]
    wanted = program(*eager)
    for old, new in zip([*wanted, *eager], [*found[0], *found[1]], strict=True):
        assert old.dtype is new.dtype and old.stride() == new.stride()
        assert torch.equal(old, new) or torch.allclose(old, new, rtol=0, atol=0, equal_nan=True)
    after = graph_launches(captured.graph_module.graph)
    assert after == before - record.result.statistics.get("launches saved", 0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=programs())
def test_every_region_is_one_loop_nest(program: RandomProgram, trace: Callable[..., Any], context: PassContext) -> None:
    captured = trace(program, *program.tensors())
    run_pipeline(captured, Pipeline((FusePointwise(),)), context)
    for node in captured.graph_module.graph.nodes:
        child = region_module(node) if node.op == "call_module" else None
        if child is not None:
            inner = list(child.graph.nodes)
            results = inner[-1].args[0]
            members = [n for n in inner if n.op not in ("placeholder", "output")]
            assert lower(members, [results] if isinstance(results, torch.fx.Node) else results).stores
