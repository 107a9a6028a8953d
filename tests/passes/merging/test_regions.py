"""``merge-regions``: independent pointwise regions become one launch, with the same numbers."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimigraph.codegen.horizontal import build_region
from kimigraph.ir.launches import graph_launches
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.purity import mutated_arguments, region_module
from kimigraph.ir.verifier import verify
from kimigraph.passes import PassContext, Pipeline, run_pipeline

PIPELINE = "canonicalize,fuse-pointwise,merge-regions"


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1000 * len(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def run_passes(program: Any, context: PassContext, pipeline: str = PIPELINE) -> Any:
    records = run_pipeline(program, Pipeline.parse(pipeline), context)
    verify(program)
    return records[-1].result


def regions(program: Any, kind: str) -> list[Any]:
    return [node for node in program.graph_module.graph.nodes if node.meta.get("region") == kind]


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def same(run_all: Any, program: Any, inputs: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for old, new in zip(wanted, run_all(program, *inputs), strict=True):
        assert torch.equal(old, new)


def test_norms_of_different_widths_become_one_launch(weighted: Any, run_all: Any, context: PassContext) -> None:
    bf16 = torch.bfloat16
    inputs = [draw(2, 1, 48, dtype=bf16), draw(2, 1, 32, dtype=bf16), draw(2, 4), draw(48), draw(32)]

    def step(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        return norm(x, a, 1e-5), norm(y, b, 1e-6), z * 0.5

    program = weighted(step, *inputs, weights=2)
    wanted = run_all(program, *inputs)
    result = run_passes(program, context)
    assert result.statistics == {"merged": 1, "launches saved": 2}
    assert graph_launches(program.graph_module.graph) == 1
    [call] = regions(program, "horizontal")
    child = region_module(call)
    assert child is not None
    module = build_region(child)
    assert "1e-06" in module.text and "1e-05" in module.text  # each member keeps its own constants
    assert module.launches[0].options["launch_pdl"], "all members wait for the launches before"
    [remark] = result.remarks
    assert "us apart" in remark.message and "1 launch) together on NVIDIA H200" in remark.message
    same(run_all, program, inputs, wanted)


def test_small_products_of_different_sizes_become_one_launch(weighted: Any, run_all: Any, context: PassContext) -> None:
    """Each with rows, a depth and a number of columns of its own."""
    bf16 = torch.bfloat16
    inputs = [draw(2, 48, dtype=bf16), draw(1, 32, dtype=bf16), draw(24, 48, dtype=bf16), draw(40, 32, dtype=bf16)]

    def step(x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        linear = torch.nn.functional.linear
        return linear(x, a), linear(y, b) * 2

    program = weighted(step, *inputs, weights=2)
    wanted = run_all(program, *inputs)
    assert run_passes(program, context).statistics == {"merged": 1, "launches saved": 1}
    assert graph_launches(program.graph_module.graph) == 1
    same(run_all, program, inputs, wanted)


def test_chains_stay_in_order(weighted: Any, run_all: Any, context: PassContext) -> None:
    """A norm, a product, another norm: the second waits for the first."""
    inputs = [draw(2, 32), draw(32, 32), draw(32), draw(32)]

    def step(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return norm(torch.nn.functional.linear(norm(x, a), w), b)

    program = weighted(step, *inputs, weights=3)
    wanted = run_all(program, *inputs)
    assert not run_passes(program, context).modified
    same(run_all, program, inputs, wanted)


def test_a_write_between_two_regions_keeps_them_apart(weighted: Any, run_all: Any, context: PassContext) -> None:
    """Zero a buffer, write into it, read it: none of it may change places."""
    inputs = [draw(4, 8), torch.tensor([1, 3]), draw(2, 8), draw(8, 8)]

    def step(buffer: torch.Tensor, index: torch.Tensor, values: torch.Tensor, w: torch.Tensor) -> Any:
        before = torch.nn.functional.linear(buffer.sin(), w)
        buffer.zero_()
        buffer.index_put_((index,), values)
        return before, torch.nn.functional.linear(buffer.cos(), w)

    program = weighted(step, *inputs, weights=1)
    wanted = run_all(program, *inputs)
    run_passes(program, context)
    same(run_all, program, inputs, wanted)


WRITES = (OPERATORS["latent_write"].overload, OPERATORS["index_key_write"].overload)


def cache_inputs() -> list[torch.Tensor]:
    """Latents, their rope parts, index keys, rows for each, positions, a weight and what else is normed."""
    caches = [draw(2, 8, 12), draw(2, 8, 4), draw(2, 8, 6)]
    return [*caches, draw(2, 1, 12), draw(2, 1, 4), draw(2, 1, 6), torch.tensor([[3], [5]]), draw(12), draw(3, 12)]


def test_cache_writes_of_several_kinds_become_one_launch(weighted: Any, run_all: Any, context: PassContext) -> None:
    """With a norm that waits for neither, in the region of which they write what they wrote apart."""

    def step(a: Any, b: Any, c: Any, x: Any, y: Any, z: Any, place: Any, w: Any, other: Any) -> Any:
        WRITES[0](a, b, x, y, place, norm_weight=w)
        WRITES[1](c, z, place)
        return norm(other, w)

    inputs = cache_inputs()
    program = weighted(step, *inputs, weights=0)
    wanted = run_all(program, *inputs)
    assert not torch.equal(wanted[1], inputs[0]) and not torch.equal(wanted[3], inputs[2])
    assert run_passes(program, context).statistics == {"merged": 1, "launches saved": 2}
    [call] = regions(program, "horizontal")
    assert {node.name for node in mutated_arguments(call)} == {"a_1", "b_1", "c_1"}
    child = region_module(call)
    assert child is not None
    assert "launch_pdl" not in build_region(child).launches[0].options, "the writers wait for nothing themselves"
    assert graph_launches(program.graph_module.graph) == 1
    same(run_all, program, inputs, wanted)


def test_cache_writes_wait_for_what_reads_the_cache(weighted: Any, run_all: Any, context: PassContext) -> None:
    """Old keys are read after the latents are written, new ones after theirs: neither read may change places."""

    def step(a: Any, b: Any, c: Any, x: Any, y: Any, z: Any, place: Any, w: Any, other: Any) -> Any:
        WRITES[0](a, b, x, y, place, norm_weight=w)
        old = torch.nn.functional.linear(c, other[:, :6]) + a.sum()
        WRITES[1](c, z, place)
        return old, torch.nn.functional.linear(c, other[:, :6]), norm(other, w)

    inputs = cache_inputs()
    program = weighted(step, *inputs, weights=0)
    wanted = run_all(program, *inputs)
    run_passes(program, context)
    same(run_all, program, inputs, wanted)
    together = [call for call in regions(program, "horizontal") if len(mutated_arguments(call)) == 3]
    assert not together, "the old keys' sum reads the latents and comes before the keys are written"


def test_two_writes_of_one_cache_stay_in_order(weighted: Any, run_all: Any, context: PassContext) -> None:
    def step(a: Any, b: Any, c: Any, x: Any, y: Any, z: Any, place: Any, w: Any, other: Any) -> Any:
        WRITES[1](c, z, place)
        WRITES[1](c, z * 2, place)
        return (other.sin(),)

    inputs = cache_inputs()
    program = weighted(step, *inputs, weights=0)
    wanted = run_all(program, *inputs)
    run_passes(program, context)
    same(run_all, program, inputs, wanted)
    assert [len(mutated_arguments(call)) for call in regions(program, "horizontal")] == [1, 1]
    assert graph_launches(program.graph_module.graph) == 2


def test_large_regions_stay_apart(weighted: Any, context: PassContext) -> None:
    """Where a launch is little of the time, sharing a kernel is not worth its price."""
    inputs = [torch.empty(4096, 4096, dtype=torch.bfloat16), torch.empty(4096, 2048, dtype=torch.bfloat16)]
    program = weighted(lambda x, y: (x.sin(), y.cos()), *inputs, weights=0)
    assert not run_passes(program, context).modified


def test_at_most_so_many_members(weighted: Any, context: PassContext) -> None:
    inputs = [draw(8, 4 + number) for number in range(5)]
    program = weighted(lambda *xs: tuple(x.sin() for x in xs), *inputs, weights=0)
    run_passes(program, context, "merge-regions{most=2}")
    assert [len(call.meta["replaces"]) for call in regions(program, "horizontal")] == [2, 2]


STEPS = st.lists(
    st.tuples(st.sampled_from(("unary", "norm", "product", "write", "join", "view")), *[st.integers(0, 7)] * 2),
    min_size=2,
    max_size=9,
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_random_programs_keep_every_bit(
    steps: list[tuple[str, int, int]], weighted: Callable[..., Any], run_all: Any, context: PassContext
) -> None:
    inputs = [draw(3, 8), draw(3, 8) + 1, draw(3, 8) * 2, draw(8, 8), draw(8)]

    def step(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
        values = [x, y, z]
        for kind, left, right in steps:
            value, other = values[left % len(values)], values[right % len(values)]
            if kind == "unary":
                values.append(value.sin() * 2)
            elif kind == "norm":
                values.append(norm(value, v))
            elif kind == "product":
                values.append(torch.nn.functional.linear(value, w))
            elif kind == "write":
                value.mul_(1.5)
            elif kind == "join":
                values.append(value + other)
            else:
                values.append(value.flip(0) if right % 2 else value[:, torch.arange(7, -1, -1)])
        return tuple(value + 0.5 for value in values[3:]) or (x + 1,)

    program = weighted(step, *inputs, weights=2)
    wanted = run_all(program, *inputs)
    run_passes(program, context)
    same(run_all, program, inputs, wanted)
    for call in regions(program, "horizontal"):
        child = region_module(call)
        assert child is not None
        build_region(child)
