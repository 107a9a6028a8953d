"""The kernels of attention residuals against their references: one pass, and both phases, which equal it."""

import pytest
import torch

from kimigraph.codegen.specialize import attention_residual as builder
from kimigraph.codegen.specialize import residual_phases
from kimigraph.ir.errors import CompileError
from kimigraph.ir.reference.attention_residual import attention_residual
from kimigraph.ir.reference.attention_residual_history import attention_residual_history

EPS, OUT_EPS = 1e-5, 1e-4


def operands_of(seed, sources=3, shape=(2, 3), width=40, dtype=torch.float32, normed=True, out=True):
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator)

    return {
        "sources": [(normal(*shape, width) * (1 + number)).to(dtype) for number in range(sources)],
        "query": normal(width),
        "norm_weight": normal(width) if normed else None,
        "out_norm_weight": normal(width) if out else None,
    }


def flat(operands):
    """As the compiler sees them: each source of the list by a name of its own."""
    lists = {
        f"{name}_{number}": item
        for name, value in operands.items()
        if isinstance(value, list)
        for number, item in enumerate(value)
    }
    return lists | {name: value for name, value in operands.items() if not isinstance(value, list)}


def placed(operands, device):
    def move(value):
        return None if value is None else value.to(device)

    return {k: [move(x) for x in v] if isinstance(v, list) else move(v) for k, v in operands.items()}


def close(found, wanted):
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    tolerance = 2e-5 if wanted.dtype == torch.float32 else 1e-2
    tolerance *= max(1.0, float(wanted.float().abs().max()))
    torch.testing.assert_close(found.cpu(), wanted, rtol=tolerance, atol=tolerance)


def check(kernel, device, operands, **options):
    there = placed(operands, device)
    module = kernel("attention_residual", flat(there), {"eps": EPS, "out_eps": OUT_EPS}, **options)
    close(module.launch(*there.values()), attention_residual(**operands, eps=EPS, out_eps=OUT_EPS))
    return module


@pytest.mark.parametrize("sources", range(1, 10))
def test_any_number_of_sources(kernel, device, sources):
    check(kernel, device, operands_of(1, sources=sources))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("normed", "out"), [(True, True), (True, False), (False, True), (False, False)])
def test_dtypes_and_absent_weights(kernel, device, dtype, normed, out):
    check(kernel, device, operands_of(2, dtype=dtype, normed=normed, out=out))


@pytest.mark.parametrize("width", [1, 7, 64, 100, 513])
def test_widths(kernel, device, width):
    check(kernel, device, operands_of(3, sources=5, width=width, dtype=torch.bfloat16))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_sources_need_one_reduction(kernel, device, normed, dtype):
    module = check(kernel, device, operands_of(8, sources=2, width=300, normed=normed, dtype=dtype))
    assert "mix_pair" in module.CONSTANTS
    wide = check(kernel, device, operands_of(8, sources=2, width=300))
    assert "mix_pair" not in wide.CONSTANTS, "32 bits may cancel out further than products of sources tell"


@pytest.mark.parametrize("sources", [2, 5, 9])
def test_many_tokens_take_another_schedule(kernel, device, sources, monkeypatch):
    monkeypatch.setattr(builder, "FEW_TOKENS", 2)
    module = check(kernel, device, operands_of(4, sources=sources, shape=(3,), dtype=torch.bfloat16))
    assert not module.CONSTANTS["mix"]["FEW"]


def test_a_row_stride_that_is_not_the_width(kernel, device):
    operands = operands_of(5, shape=(4,), width=24)
    operands["sources"] = [torch.cat([source, source + 1], -1)[:, :24] for source in operands["sources"]]
    check(kernel, device, operands)


def test_large_logits_do_not_overflow(kernel, device):
    operands = operands_of(6, sources=4)
    operands["query"] *= 1e3
    check(kernel, device, operands)


def test_scattered_rows_and_ten_sources_are_refused(kernel):
    attributes = {"eps": EPS, "out_eps": OUT_EPS}
    operands = operands_of(7)
    operands["sources"][1] = operands["sources"][1].transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(CompileError, match=r"sources_1 has strides .* make it contiguous"):
        kernel("attention_residual", flat(operands), attributes)
    with pytest.raises(CompileError, match=r"10 sources; .*attn_res_block_size"):
        kernel("attention_residual", flat(operands_of(7, sources=10)), attributes)


@pytest.mark.parametrize(
    ("sources", "count", "shape", "programs"), [(1, 1, (2,), 99), (3, 2, (2, 2), 0), (8, 8, (2,), 99)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [True, False])
def test_two_phases_equal_one_pass(kernel, device, sources, count, shape, programs, dtype, normed, monkeypatch):
    """Up to ``programs``, each query has one of its own; beyond, one takes two queries of a token."""
    monkeypatch.setattr(residual_phases, "PROGRAMS", programs)
    operands = operands_of(8, sources=sources + 1, shape=shape, dtype=dtype, normed=normed)
    *blocks, partial = operands["sources"]
    queries = [operands["query"] + number for number in range(count)]
    norms = [operands["norm_weight"]] * count if normed else []
    given = {"sources": blocks, "queries": queries, "norm_weights": norms}
    there = placed(given, device)
    history = kernel("attention_residual_history", flat(there), {"eps": EPS}).launch(*there.values())
    for found, wanted in zip(history, attention_residual_history(**given, eps=EPS), strict=True):
        close(found, wanted)
    for number, query in enumerate(queries[:2]):
        own = {"query": query, "norm_weight": operands["norm_weight"], "out_norm_weight": operands["out_norm_weight"]}
        second = {"history": history[0][number], "lse": history[1][number], "partial": partial, **own}
        there = placed(second, device)
        merge = kernel("attention_residual_merge", there, {"eps": EPS, "out_eps": OUT_EPS})
        whole = attention_residual(operands["sources"], **own, eps=EPS, out_eps=OUT_EPS)
        close(merge.launch(*there.values()), whole)


def test_nine_queries_are_refused(kernel):
    operands = operands_of(9)
    given = {"sources": operands["sources"], "queries": [operands["query"]] * 9, "norm_weights": []}
    with pytest.raises(CompileError, match="9 queries; the kernel takes at most 8"):
        kernel("attention_residual_history", flat(given), {"eps": EPS})
