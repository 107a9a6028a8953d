"""MXFP8 index keys: what is written, and the indexer whose scales stand inside the sum under the ReLU."""

import pytest
import torch

from kimigraph.ir.descriptors import IndexKeyDescriptor
from kimigraph.ir.reference.index_key_write import index_key_write
from kimigraph.ir.reference.lightning_indexer import lightning_indexer
from kimigraph.ir.reference.mxfp8_quantize import mxfp8_quantize

WRITER = ("keys", "values", "positions", "norm_weight", "norm_bias", "cos", "sin", "block_table")
INDEXER = ("q", "keys", "weights", "lengths", "mask", "block_table", "q_scales")
FP8 = "float8_e4m3fn"


def form(width=128, page=0, group=32, rotation=None):
    layout = "paged" if page else "contiguous"
    return IndexKeyDescriptor(layout, FP8, width, page, "e8m0", group, rotation)


class Data:
    def __init__(self, device, seed=0):
        self.generator, self.device = torch.Generator().manual_seed(seed), device

    def normal(self, *shape, dtype=torch.bfloat16):
        x = torch.randn(shape, generator=self.generator)
        spread = torch.randint(-6, 3, (*shape[:-1], 1), generator=self.generator).float()
        return (x * torch.exp2(spread)).to(dtype).to(self.device)

    def table(self, batch, pages):
        order = torch.randperm(batch * pages + 1, generator=self.generator)[: batch * pages]
        return order.to(torch.int32).view(batch, pages).to(self.device)


def filled(keys, values, descriptor, table=None):
    """A cache with all its keys written by the reference."""
    positions = torch.arange(values.shape[1]).expand(values.shape[:2])
    index_key_write(keys, values, positions, block_table=table, descriptor=str(descriptor))
    return keys


@pytest.mark.parametrize(("width", "group"), [(128, 32), (64, 32), (48, 32), (16, 32), (128, 128)])
@pytest.mark.parametrize("page", [0, 16])
def test_writer(kernel, device, width, group, page):
    data, descriptor = Data(device), form(width, page, group)
    table = data.table(2, 3) if page else None
    keys = torch.full((7 if page else 2, page or 48, descriptor.row), 9, dtype=torch.uint8, device=device)
    values = data.normal(2, 3, width)
    positions = torch.tensor([[5, 40, -1], [47, 0, 16]], device=device)
    weight, bias = data.normal(width), data.normal(width)
    angle = torch.rand(2, 3, width // 4, generator=data.generator).to(device)
    operands = (keys, values, positions, weight, bias, angle.cos(), angle.sin(), table)
    attributes = {"norm_eps": 1e-6, "rope_style": "half_split", "descriptor": str(descriptor)}
    module = kernel("index_key_write", dict(zip(WRITER, operands, strict=True)), attributes)
    wanted = [None if x is None else x.cpu().clone() for x in operands]
    module.launch(*operands)
    index_key_write(*wanted[:-1], block_table=wanted[-1], **attributes)
    assert torch.equal(keys.cpu(), wanted[0])


def test_writer_rotates(kernel, device):
    data, descriptor = Data(device), form(64, rotation="hadamard")
    keys = torch.zeros(1, 8, descriptor.row, dtype=torch.uint8, device=device)
    operands = (keys, data.normal(1, 1, 64), torch.tensor([[3]], device=device), *[None] * 5)
    attributes = {"norm_eps": 1e-6, "rope_style": "none", "descriptor": str(descriptor)}
    wanted = keys.cpu().clone()
    kernel("index_key_write", dict(zip(WRITER, operands, strict=True)), attributes).launch(*operands)
    index_key_write(wanted, operands[1].cpu(), operands[2].cpu(), **attributes)
    assert torch.equal(keys.cpu(), wanted) and wanted.any()


def run(kernel, device, q, descriptor, keys, weights, lengths=None, table=None, k=24, quantise="before"):
    codes, scales = mxfp8_quantize(q, group=descriptor.group) if quantise == "before" else (q, None)
    operands = (codes, keys, weights, lengths, None, table, scales)
    attributes = {"k": k, "scale": 0.5, "quantises_q": quantise == "inside", "descriptor": str(descriptor)}
    named = {name: x if x is None else x.to(device) for name, x in zip(INDEXER, operands, strict=True)}
    module = kernel("lightning_indexer", named, attributes)
    got = module.launch(*named.values()).cpu()
    want = lightning_indexer(codes, keys, weights, lengths, None, block_table=table, q_scales=scales, **attributes)
    assert torch.equal(got, want)
    return want


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("width", "group"), [(128, 32), (48, 32), (40, 24), (512, 32)])
def test_indexer(kernel, device, width, group, tokens):
    data, descriptor = Data("cpu", width), form(width, group=group)
    keys = filled(torch.zeros(2, 80, descriptor.row, dtype=torch.uint8), data.normal(2, 80, width), descriptor)
    q, weights = data.normal(2, tokens, 20, width), data.normal(2, tokens, 20, dtype=torch.float32)
    run(kernel, device, q, descriptor, keys, weights, torch.tensor([40, 70], dtype=torch.int32))


@pytest.mark.parametrize("quantise", ["before", "inside", "never"])
def test_indexer_over_pages(kernel, device, quantise):
    data, descriptor = Data("cpu", 2), form(page=16)
    table = data.table(2, 4)
    keys = torch.zeros(9, 16, descriptor.row, dtype=torch.uint8)
    filled(keys, data.normal(2, 64, 128), descriptor, table)
    table[1, 2] = -1
    q, weights = data.normal(2, 1, 64, 128), data.normal(2, 1, 64, dtype=torch.float32)
    run(kernel, device, q, descriptor, keys, weights, torch.tensor([64, 61], dtype=torch.int32), table, 50, quantise)


@pytest.mark.parametrize(("width", "group"), [(128, 32), (48, 16), (16, 32), (512, 64)])
def test_queries_are_quantised_inside(kernel, device, width, group):
    """The same picks as of queries that were quantised before: the same numbers reach the products."""
    data, descriptor = Data("cpu", width), form(width, group=group)
    keys = filled(torch.zeros(2, 80, descriptor.row, dtype=torch.uint8), data.normal(2, 80, width), descriptor)
    q, weights = data.normal(2, 2, 20, width), data.normal(2, 2, 20, dtype=torch.float32)
    q[0, 0, 3, :7], q[1, 1, 2, 5], q[1, 0, 4] = 0.0, float("inf"), float("nan")
    lengths = torch.tensor([40, 70], dtype=torch.int32)
    picks = [run(kernel, device, q, descriptor, keys, weights, lengths, quantise=when) for when in ("before", "inside")]
    assert torch.equal(*picks)


def test_scales_stand_under_the_relu(kernel, device):
    """A head whose groups disagree in sign: with a scale taken out of the sum another key would win."""
    descriptor = form(64, group=32)
    values = torch.zeros(1, 2, 64)
    values[0, 0, 0], values[0, 0, 32] = 1.0, -1.0  # cancels under equal scales, not under its own
    values[0, 1, 0] = 0.25
    keys = filled(torch.zeros(1, 2, descriptor.row, dtype=torch.uint8), values, descriptor)
    q = torch.zeros(1, 1, 1, 64)
    q[..., 0], q[..., 32] = 1.0, 64.0
    picks = run(kernel, device, q, descriptor, keys, torch.ones(1, 1, 1), k=1)
    assert picks.item() == 1
