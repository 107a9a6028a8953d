"""The indexer's operands in groups: what is checked, and the sum with its scales inside the ReLU."""

import pytest
import torch

from kimigraph.ir.descriptors import IndexKeyDescriptor
from kimigraph.ir.reference.cache_bytes import index_key_bytes, index_key_planes
from kimigraph.ir.reference.e4m3 import from_e4m3
from kimigraph.ir.reference.mxfp8_quantize import mxfp8_quantize

FORM = str(IndexKeyDescriptor("contiguous", "float8_e4m3fn", 64, 0, "e8m0", 32))


def operands(seed=0):
    random = torch.Generator().manual_seed(seed)
    q, keys = (torch.randn(shape, generator=random) for shape in ((1, 1, 4, 64), (1, 40, 64)))
    packed = torch.zeros(1, 40, 66, dtype=torch.uint8)
    for plane, part in zip(index_key_planes(packed, FORM), index_key_bytes(keys, FORM), strict=True):
        plane.copy_(part)
    return (*mxfp8_quantize(q, group=32), packed, torch.randn(1, 1, 4, generator=random))


def test_scores_by_the_formula():
    codes, scales, packed, weights = operands()
    values, key_scales = index_key_planes(packed, FORM)
    score = torch.zeros(40)
    for head in range(4):
        dot = torch.zeros(40)
        for group in range(2):
            part = slice(32 * group, 32 * group + 32)
            power = scales[0, 0, head, group].int() + key_scales[0, :, group].int() - 254
            dot += torch.exp2(power.float()) * (from_e4m3(values[0, :, part]) @ from_e4m3(codes[0, 0, head, part]))
        score += weights[0, 0, head] * dot.relu()
    want = score.topk(8).indices.sort().values
    got = torch.ops.kimigraph.lightning_indexer(
        codes, packed, weights, k=8, scale=1.0, q_scales=scales, descriptor=FORM
    )
    assert torch.equal(got[0, 0].long(), want)


def fake(*args, **kwargs):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        args = [mode.from_tensor(a) for a in args]
        kwargs = {n: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for n, v in kwargs.items()}
        return torch.ops.kimigraph.lightning_indexer(*args, k=8, scale=1.0, **kwargs)


def test_operands_that_do_not_meet_are_refused():
    codes, scales, packed, weights = operands()
    assert fake(codes, packed, weights, q_scales=scales, descriptor=FORM).shape == (1, 1, 8)
    assert fake(codes.float(), packed, weights, descriptor=FORM).shape == (1, 1, 8)
    plain = torch.randn(1, 40, 64)
    with pytest.raises(ValueError, match="without the q_scales"):
        fake(codes, packed, weights, descriptor=FORM)
    with pytest.raises(ValueError, match="without the q_scales"):
        fake(codes.view(torch.float8_e4m3fn), packed, weights, descriptor=FORM)
    with pytest.raises(ValueError, match=r"scales \[1, 1, 4, 2\]"):
        fake(codes, packed, weights, q_scales=scales[..., :1], descriptor=FORM)
    with pytest.raises(ValueError, match="keys in groups"):
        fake(codes, plain, weights, q_scales=scales)
