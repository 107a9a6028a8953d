"""The indexer's kernel for many query rows: buffers that fill up and keep their winners, ties, chunked prefill."""

import pytest
import torch

from kimigraph.codegen.kernel import KernelRequest, TensorSpec
from kimigraph.codegen.specialize import BUILDERS
from kimigraph.codegen.specialize import lightning_indexer_prefill as prefill
from kimigraph.ir.descriptors import IndexKeyDescriptor
from kimigraph.ir.reference.lightning_indexer import lightning_indexer as reference

OPERANDS = ("q", "keys", "weights", "lengths", "mask", "block_table")


def whole(generator, *shape, span=3):
    """Small integers: every sum is exact, and ties are many."""
    return torch.randint(-span, span + 1, shape, generator=generator).float()


def bytes_of(generator, count, size, span=3):
    """Planar keys: ``size`` of 128, then their scales."""
    keys = torch.zeros(count, size * 132, dtype=torch.uint8)
    keys[:, : size * 128] = whole(generator, count, size * 128, span=span).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.tensor([0.5, 1.0, 2.0])[torch.randint(0, 3, (count, size), generator=generator)]
    keys[:, size * 128 :] = scales.view(torch.uint8).view(count, size * 4)
    return keys.view(count, size, 132)


def operands_of(form, batch, tokens, total, heads, lengths, seed=0, span=3):
    generator = torch.Generator().manual_seed(seed)
    q, weights = whole(generator, batch, tokens, heads, 128), whole(generator, batch, tokens, heads, span=2)
    table, paged, quantised = None, "pages" in form, "fp8" in form
    count = batch * total // 64 + 2
    if paged:
        table = torch.randperm(count, generator=generator)[: count - 2].to(torch.int32).view(batch, -1)
    if quantised:
        keys = bytes_of(generator, count, 64, span) if paged else bytes_of(generator, batch, total, span)
        q = q.to(torch.float8_e4m3fn)
    else:
        keys = whole(generator, *((count, 64) if paged else (batch, total)), 128, span=span).bfloat16()
        q = q.bfloat16()
    lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    descriptor = ""
    if quantised:
        descriptor = str(
            IndexKeyDescriptor("paged" if paged else "contiguous", "float8_e4m3fn", 128, 64 * paged, "power2")
        )
    return (q, keys, weights, lengths, None, table), descriptor


def run(kernel, device, operands, descriptor, k, monkeypatch, **chosen):
    """The rendered kernel's rows and the reference's."""
    monkeypatch.setitem(BUILDERS, "lightning_indexer", lambda request: prefill.build(request, **chosen))
    moved = tuple(None if tensor is None else tensor.to(device) for tensor in operands)
    module = kernel("lightning_indexer", dict(zip(OPERANDS, moved, strict=True)), {"k": k, "scale": 0.5})
    assert hasattr(module, "index_rows")
    q, keys, weights, lengths, mask, table = operands
    wanted = reference(q, keys, weights, lengths, mask, k=k, scale=0.5, block_table=table, descriptor=descriptor)
    return module.launch(*moved).cpu(), wanted


FORMS = ["fp8 pages", "fp8", "bf16 pages", "bf16"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("batch", "tokens", "total", "heads", "lengths", "k"),
    [
        (1, 9, 512, 64, [1], 40),
        (2, 5, 448, 32, [300, 7], 100),
        (1, 3, 320, 128, None, 64),
        (2, 10, 256, 16, [0, 250], 300),
        (1, 4, 640, 64, [636], 8),
    ],
)
def test_rows_of_a_prompt(kernel, device, monkeypatch, form, batch, tokens, total, heads, lengths, k):
    """From the start of a prompt and from its middle; buffers of a few keys fill up again and again."""
    operands, descriptor = operands_of(form, batch, tokens, total, heads, lengths)
    found, wanted = run(kernel, device, operands, descriptor, k, monkeypatch, GROUP=64, CHUNK=64, each=1)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("span", [0, 1])
def test_ties(kernel, device, monkeypatch, span):
    """Rows of one score, and of few: among equals the lower index wins however often the buffer was cleared."""
    operands, descriptor = operands_of("fp8 pages", 1, 4, 640, 64, [600], span=span)
    found, wanted = run(kernel, device, operands, descriptor, 70, monkeypatch, GROUP=64, CHUNK=64)
    assert torch.equal(found, wanted)


def test_scores_that_only_rise(kernel, device, monkeypatch):
    """Every key beats those before it: all are appended, and nothing is lost."""
    operands, descriptor = operands_of("bf16", 1, 2, 512, 64, None)
    q, keys, weights, *rest = operands
    keys = torch.zeros_like(keys)
    keys[0, :, 0] = torch.arange(512) // 2
    q = torch.zeros_like(q)
    q[..., 0] = 1
    operands = (q, keys, weights.abs() + 1, *rest)
    found, wanted = run(kernel, device, operands, descriptor, 33, monkeypatch, GROUP=64, CHUNK=64)
    assert torch.equal(found, wanted) and found[0, 0, 0] == 478


def test_unmapped_pages_and_numbers_that_are_none(kernel, device, monkeypatch):
    operands, descriptor = operands_of("bf16 pages", 1, 4, 512, 64, [500])
    operands[5][0, 2] = -1
    operands[5][0, 0] = -1
    operands[1][operands[5][0, 1], 3] = torch.nan
    operands[1][operands[5][0, 4], 5] = torch.inf
    for k in (100, 480):
        found, wanted = run(kernel, device, operands, descriptor, k, monkeypatch, GROUP=64, CHUNK=64)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("change", "serves"),
    [({}, True), ({"heads": 24}, False), ({"mask": True}, False), ({"total": 72}, True), ({"dtype": "float32"}, False)],
)
def test_what_it_serves(change, serves):
    heads, total, dtype = change.get("heads", 64), change.get("total", 128), change.get("dtype", "bfloat16")

    def spec(*shape, dtype=dtype):
        return TensorSpec(shape, tuple(torch.empty(shape, device="meta").stride()), dtype)

    tensors = {
        "q": spec(1, 256, heads, 128),
        "keys": spec(1, total, 128),
        "weights": spec(1, 256, heads),
        "lengths": None,
        "mask": spec(1, 256, total, dtype="bool") if "mask" in change else None,
        "block_table": None,
    }
    request = KernelRequest("lightning_indexer", tensors, {"k": 8, "scale": 1.0}, "cuda:sm_90")
    assert prefill.serves(request) == serves
