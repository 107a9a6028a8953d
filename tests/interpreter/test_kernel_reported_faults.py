"""Faults that were reported of other engines' attention and delta-rule kernels, each as its smallest input.

``tests/api/test_public_failures.py`` has those of compile caches. What a case is about, other files test more widely.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kimigraph.ir.descriptors import LatentDescriptor
from kimigraph.ir.reference.kda_decode import kda_decode
from kimigraph.ir.reference.latent_attention import latent_attention
from kimigraph.ir.reference.latent_write import latent_write
from kimigraph.ir.reference.sparse_attention import sparse_attention

Kernel = Callable[..., ModuleType]
ATTENTION = {"scale": 0.05, "descriptor": ""}


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def launched(
    kernel: Kernel, device: str, op: str, tensors: dict[str, Tensor | None], attributes: dict[str, Any], **options: Any
) -> tuple[Callable[[], Any], dict[str, Tensor | None]]:
    """A call of the kernel, and its operands on the device."""
    placed = {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
    module = kernel(op, placed, attributes, **options)
    return lambda: module.launch(*placed.values()), placed


@pytest.mark.parametrize("splits", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("picks", [1, 5, 17])
def test_b5_any_number_of_parts_is_stable(kernel: Kernel, device: str, splits: int, picks: int) -> None:
    """NaN out of some runs of one number of parts and not of others; parts that have no row at all among them."""
    tensors: dict[str, Tensor | None] = {"q_latent": normal(1, 1, 1, 2, 16), "q_rope": normal(2, 1, 1, 2, 8)}
    tensors |= {"latent": normal(3, 1, 20, 16), "rope": normal(4, 1, 20, 8)}
    tensors |= {"indices": torch.arange(picks, dtype=torch.int32).view(1, 1, -1)}
    call, _ = launched(kernel, device, "sparse_attention", tensors, ATTENTION, splits=splits)
    first, wanted = call(), sparse_attention(**tensors, **ATTENTION)
    for found, right in zip(first, wanted, strict=True):
        torch.testing.assert_close(found.cpu(), right, rtol=5e-5, atol=5e-5)
    for _ in range(20 if device != "cpu" else 3):
        assert all(torch.equal(a, b) for a, b in zip(call(), first, strict=True))


def pool_of(pages: int, live: int, heads: int) -> tuple[dict[str, Tensor | None], dict[str, Any], Tensor, Tensor]:
    """A quantised pool in which one page is written: operands, attributes, and the rows that went in."""
    form = LatentDescriptor("paged", "float8_e4m3fn", 512, 64, 64, 1, 128, "scales_rope", "power2")
    latent = torch.full((pages, 64, 656), 255, dtype=torch.uint8)
    table = torch.tensor([[live]], dtype=torch.int32)
    values, turns = 0.1 * normal(5, 1, 64, 512).clamp(-1, 1), normal(6, 1, 64, 64).clamp(-1, 1)
    latent_write(latent, None, values, turns, torch.arange(64).view(1, -1), block_table=table, descriptor=str(form))
    tensors: dict[str, Tensor | None] = {"q_latent": normal(7, 1, 1, heads, 512), "q_rope": normal(8, 1, 1, heads, 64)}
    tensors |= {"latent": latent, "rope": None, "indices": torch.arange(64, dtype=torch.int32).view(1, 1, -1)}
    attributes = {"scale": 0.05, "descriptor": str(form)}
    return tensors | {"block_table": table}, attributes, values, turns


@pytest.mark.parametrize("heads", [16, 32])
def test_b8_rope_parts_ten_times_as_large_keep_their_precision(kernel: Kernel, device: str, heads: int) -> None:
    """One scale for both parts cuts the rope part off; and no number of heads gives an empty output."""
    tensors, attributes, values, turns = pool_of(3, 2, heads)
    call, _ = launched(kernel, device, "sparse_attention", tensors, attributes, target=device)
    out, lse = (found.cpu() for found in call())
    exact = {name: tensors[name] for name in ("q_latent", "q_rope")} | {"latent": values, "rope": turns}
    exact_out, exact_lse = sparse_attention(**exact, indices=tensors["indices"], **ATTENTION)
    assert (out - exact_out).norm() / exact_out.norm() < 0.05
    # The rope part makes most of the logits: their error is its rounding to bf16, far below one per cent.
    assert (lse - exact_lse).abs().max() < 0.02 and out.norm(dim=-1).min() > 0


def test_b16_what_a_step_touches_follows_from_its_rows_not_from_the_pool(
    kernel: Kernel, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,096 pages of which one is live: the others hold NaN and are not read, and no copy of the pool is made."""
    tensors, attributes, values, turns = pool_of(4096, 4095, 16)
    call, _ = launched(kernel, device, "sparse_attention", tensors, attributes, target=device)
    call()
    made: list[int] = []
    empty = torch.empty

    def counted(*arguments: Any, **options: Any) -> Tensor:
        tensor = empty(*arguments, **options)
        made.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "empty", counted)
    out, _ = call()
    monkeypatch.undo()
    exact = {name: tensors[name] for name in ("q_latent", "q_rope")} | {"latent": values, "rope": turns}
    wanted, _ = sparse_attention(**exact, indices=tensors["indices"], **ATTENTION)
    assert (out.cpu() - wanted).norm() / wanted.norm() < 0.05
    assert sum(made) < 2**22, f"{sum(made)} bytes for 64 rows of a pool of {4096 * 64 * 656}"


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("length", [15, 16, 17, 130])
def test_b18_few_queries_at_lengths_around_a_page(kernel: Kernel, device: str, tokens: int, length: int) -> None:
    """NaN for two queries and one length only; the rows behind the length are NaN."""
    latent, rope = normal(1, 1, 144, 16), normal(2, 1, 144, 8)
    latent[:, length + tokens - 1 :] = rope[:, length + tokens - 1 :] = torch.nan
    tensors: dict[str, Tensor | None] = {"q_latent": normal(3, 1, tokens, 2, 16), "q_rope": normal(4, 1, tokens, 2, 8)}
    tensors |= {"latent": latent, "rope": rope, "lengths": torch.tensor([length], dtype=torch.int32)}
    if device != "cpu":
        tensors = {name: t.bfloat16() if t is not None and t.is_floating_point() else t for name, t in tensors.items()}
    call, _ = launched(kernel, device, "latent_attention", tensors, ATTENTION, target=device)
    wide = {name: t.float() if t is not None and t.is_floating_point() else t for name, t in tensors.items()}
    for found, right in zip(call(), latent_attention(**wide, **ATTENTION), strict=True):
        limit = 1e-5 if device == "cpu" else 2e-2
        torch.testing.assert_close(found.cpu().float(), right, rtol=limit, atol=limit)


@pytest.mark.parametrize("width", [torch.int32, torch.int64])
def test_c18_slots_that_do_not_lie_side_by_side(kernel: Kernel, device: str, width: torch.dtype) -> None:
    """Indices that are a column of a table, as graphs of pieces hand them on."""
    heads, dim, rows = 2, 8, 3
    channels = 3 * heads * dim
    slots = torch.tensor([[4, 9], [1, 9], [2, 9]], dtype=width)[:, 0]
    assert slots.stride() == (2,)
    tensors: dict[str, Tensor | None] = {"qkv": normal(1, rows, 1, channels), "conv_weight": normal(2, channels, 4)}
    tensors |= {"conv_state": normal(3, 5, channels, 3), "gate": normal(4, rows, 1, heads * dim)}
    tensors |= {"dt_bias": normal(5, heads * dim), "a_log": normal(6, heads), "beta": normal(7, rows, 1, heads)}
    tensors |= {"state": normal(8, 5, heads, dim, dim), "out_gate": None, "norm_weight": None, "slots": slots}
    attributes = {"scale": 0.3, "l2_eps": 1e-6, "lower_bound": None, "norm_eps": 1e-5, "state_layout": "vk"}
    wanted = {name: None if tensor is None else tensor.clone() for name, tensor in tensors.items()}
    placed = {name: None if t is None else t.to(device) for name, t in tensors.items()}
    placed["slots"] = slots.to(device) if device == "cpu" else torch.stack([slots, slots], 1).to(device)[:, 0]
    module = kernel("kda_decode", placed, attributes)
    out = module.launch(*placed.values())
    torch.testing.assert_close(out.cpu(), kda_decode(**wanted, **attributes), rtol=1e-4, atol=1e-5)
    for name in ("conv_state", "state"):
        torch.testing.assert_close(placed[name].cpu(), wanted[name], rtol=1e-4, atol=1e-5)
