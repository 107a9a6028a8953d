"""Caches that are slices of one pool: each layer reads and writes its own region, whatever its storage offset."""

import torch
from torch import Tensor, nn

import kimigraph


class Accumulate(nn.Module):
    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(x)
        return cache * 2


def test_a_step_stays_inside_its_slice() -> None:
    example = (torch.ones(2, 3), torch.zeros(2, 3))
    compiled = kimigraph.optimize(Accumulate(), example, kimigraph.CompileConfig(target="cpu:reference", cache="off"))
    pool = torch.arange(18.0).reshape(3, 2, 3)
    before = pool.clone()
    out = compiled(torch.full((2, 3), 10.0), pool[1])
    torch.testing.assert_close(out, (before[1] + 10) * 2, rtol=0, atol=0)
    torch.testing.assert_close(pool[1], before[1] + 10, rtol=0, atol=0)
    assert torch.equal(pool[0], before[0]) and torch.equal(pool[2], before[2])


def test_an_unaligned_slice_of_a_longer_buffer_is_its_own_region() -> None:
    example = (torch.ones(2, 3), torch.zeros(2, 3))
    compiled = kimigraph.optimize(Accumulate(), example, kimigraph.CompileConfig(target="cpu:reference", cache="off"))
    buffer = torch.arange(9.0)
    part = buffer[1:7].view(2, 3)
    out = compiled(torch.ones(2, 3), part)
    torch.testing.assert_close(out, (torch.arange(1.0, 7.0).view(2, 3) + 1) * 2, rtol=0, atol=0)
    assert buffer[0] == 0 and buffer[7:].tolist() == [7.0, 8.0]
