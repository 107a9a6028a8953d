"""An operator that nobody understands stays, runs, and is named in a remark."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kimigraph.passes import PassContext, Pipeline, run_pipeline
from kimigraph.passes.canonicalize import Canonicalize


@pytest.fixture
def outsider() -> Iterator[Any]:
    """``torch.ops.outsider.double``, registered for one test."""
    library = torch.library.Library("outsider", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake("outsider::double", torch.empty_like, lib=library)
    yield torch.ops.outsider.double.default
    library._destroy()


def test_it_stays_and_is_named_once(outsider: Any, trace: Callable[..., Any], run: Any, context: PassContext) -> None:
    x = torch.randn(3)
    program = trace(lambda value: outsider(outsider(value)) + 1, x)
    records = run_pipeline(program, Pipeline((Canonicalize(),)), context)
    calls = [node.name for node in program.graph_module.graph.nodes if node.target is outsider]
    (remark,) = records[0].result.remarks
    assert len(calls) == 2 and remark.kind == "note" and remark.nodes == tuple(calls)
    assert "outsider.double" in remark.message and "stays as it is" in remark.message
    outputs, _ = run(program, x)
    torch.testing.assert_close(outputs[0], x * 4 + 1)


def test_known_operators_are_not_remarked(trace: Callable[..., Any], context: PassContext) -> None:
    program = trace(lambda value: value.sin() + 1, torch.randn(3))
    assert run_pipeline(program, Pipeline((Canonicalize(),)), context)[0].result.remarks == ()
