"""Cache writes around which something else happens: what is written and every input end as the model has them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.descriptors import IndexKeyDescriptor, LatentDescriptor
from kimigraph.ir.program import CapturedProgram, InputSpec, OutputSpec
from kimigraph.ir.purity import mutated_arguments, storage_root
from kimigraph.passes import PassContext, Pipeline, run_pipeline
from kimigraph.passes.raise_cache_writes import RaiseCacheWrites

B, T, D, ROPE = 2, 12, 8, 4
PLACE = torch.tensor([3])
LATENT = str(LatentDescriptor("contiguous", "float32", D, ROPE))
BF16 = torch.bfloat16
Step = Callable[..., Tensor]


def raised(step: Step, tensors: list[Tensor], descriptors: dict[int, str]) -> list[str]:
    """Raise the writes of a step, hold outputs and inputs to those before; the remarks of the pass."""
    copies = [tensor.clone() for tensor in tensors]
    with torch.no_grad():
        traced = make_fx(lambda *given: (step(*given),), tracing_mode="fake", pre_dispatch=True)(*copies)
    written = {storage_root(found) for node in traced.graph.nodes for found in mutated_arguments(node)}
    inputs: list[InputSpec] = []
    for number, (node, tensor) in enumerate(zip(traced.graph.find_nodes(op="placeholder"), tensors, strict=True)):
        dtype = str(tensor.dtype).removeprefix("torch.")
        kind = "cache" if number in descriptors else "input"
        spec = InputSpec(node.name, kind, f"argument.{node.name}", tuple(tensor.shape), tensor.stride(), dtype)
        inputs.append(replace(spec, mutated=node in written, descriptor=descriptors.get(number, "")))
    program = CapturedProgram(traced, tuple(inputs), (OutputSpec("out", "[0]"),))
    eager, ours = ([tensor.clone() for tensor in tensors] for _ in range(2))
    wanted = step(*eager)
    [record] = run_pipeline(program, Pipeline((RaiseCacheWrites(),)), PassContext(CompileConfig()))
    found = program.graph_module(*ours)
    for new, old in zip([*found, *ours], [wanted, *eager], strict=True):
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-5)
    return [f"{remark.kind}: {remark.message}" for remark in record.result.remarks]


def put(cache: Tensor, values: Tensor, place: Tensor) -> Tensor:
    return cache.index_copy_(1, place, values).sum()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def cast_then_cleared(cache: Tensor, x: Tensor, place: Tensor, *rest: Tensor) -> Tensor:
    wide = x.bfloat16().float() if x.dtype is torch.float32 else x.float()
    x.zero_()
    return put(cache, wide, place)


def normed_then_cleared(cache: Tensor, x: Tensor, place: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    new = F.layer_norm(x, (D,), weight, bias)
    x.zero_()
    return put(cache, new, place)


def normed_then_weight_written(cache: Tensor, x: Tensor, place: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    new = F.layer_norm(x, (D,), weight, bias)
    weight.mul_(2)
    return put(cache, new, place)


def turned_then_cleared(cache: Tensor, x: Tensor, place: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    new = turned(x, cos, sin)
    x.zero_()
    return put(cache, new, place)


def turned_then_angles_written(cache: Tensor, x: Tensor, place: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    new = turned(x, cos, sin)
    cos.zero_()
    return put(cache, new, place)


def own_rows(cache: Tensor, x: Tensor, place: Tensor, *rest: Tensor) -> Tensor:
    return put(cache, cache[:, 5:6], place) + x.sum()


@pytest.mark.parametrize(
    ("step", "others"),
    [
        (cast_then_cleared, ()),
        (normed_then_cleared, ((D,), (D,))),
        (normed_then_weight_written, ((D,), (D,))),
        (turned_then_cleared, ((B, 1, D // 2), (B, 1, D // 2))),
        (turned_then_angles_written, ((B, 1, D // 2), (B, 1, D // 2))),
        (own_rows, ()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_operands_that_change_before_the_write(step: Step, others: tuple[tuple[int, ...], ...]) -> None:
    dtype = BF16 if step is cast_then_cleared else torch.float32
    tensors = [torch.randn(B, T, D), torch.randn(B, 1, D).to(dtype), PLACE.clone(), *map(torch.randn, others)]
    remarks = raised(step, tensors, {0: str(IndexKeyDescriptor("contiguous", "float32", D))})
    assert remarks and all(remark.startswith("missed") for remark in remarks)
    assert "is written between" in remarks[0] or "is read from the cache" in remarks[0]


def test_one_angle_for_all_pairs() -> None:
    """It is written as computed: the operator wants an angle a pair."""
    tensors = [torch.randn(B, T, D), torch.randn(B, 1, D), PLACE, torch.randn(B, 1, 1), torch.randn(B, 1, 1)]
    remarks = raised(
        lambda cache, x, place, cos, sin: put(cache, turned(x, cos, sin), place),
        tensors,
        {0: str(IndexKeyDescriptor("contiguous", "float32", D))},
    )
    assert remarks[0].startswith("passed")


@pytest.mark.parametrize("kind", ["index key", "latent"])
def test_a_rounding_that_the_cache_does_not_do_itself_stays(kind: str) -> None:
    """bf16 values in a float32 cache: the cast down is no cast to the cache's type."""
    if kind == "index key":
        descriptors = {0: str(IndexKeyDescriptor("contiguous", "float32", D))}
        tensors = [torch.randn(B, T, D), torch.randn(B, 1, D), PLACE]
        remarks = raised(lambda cache, x, place: put(cache, x.bfloat16().float(), place), tensors, descriptors)
    else:
        tensors = [torch.randn(B, T, D), torch.randn(B, T, ROPE), torch.randn(B, 1, D), torch.randn(B, 1, ROPE), PLACE]
        remarks = raised(
            lambda a, b, x, y, place: put(a, x.bfloat16().float(), place) + put(b, y.half().float(), place),
            tensors,
            {0: LATENT, 1: LATENT},
        )
    assert kind == "latent" or remarks[0].startswith("passed")


def test_a_rope_part_out_of_the_latent_part_just_written() -> None:
    def step(latent: Tensor, rope: Tensor, x: Tensor, place: Tensor) -> Tensor:
        latent.index_copy_(1, place, x)
        return put(rope, latent[:, 3:4, :ROPE], place)

    tensors = [torch.randn(B, T, D), torch.randn(B, T, ROPE), torch.randn(B, 1, D), PLACE]
    remarks = raised(step, tensors, {0: LATENT, 1: LATENT})
    assert not any(remark.startswith("passed") for remark in remarks)


def test_a_position_without_dims() -> None:
    tensors = [torch.randn(B, T, D), torch.randn(B, 1, D), torch.tensor(3)]
    remarks = raised(
        lambda cache, x, place: put(cache, x, place), tensors, {0: str(IndexKeyDescriptor("contiguous", "float32", D))}
    )
    assert len(remarks) == 1 and remarks[0].startswith("missed")
