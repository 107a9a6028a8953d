"""The cache writers: bit by bit the reference's bytes, in every layout, with norm and rotation on the way."""

import pytest
import torch

from kimigraph.ir.descriptors import IndexKeyDescriptor, LatentDescriptor
from kimigraph.ir.reference.index_key_write import index_key_write
from kimigraph.ir.reference.latent_write import latent_write

KEY_OPERANDS = ("keys", "values", "positions", "norm_weight", "norm_bias", "cos", "sin", "block_table")
LATENT_OPERANDS = ("latent", "rope", "values", "rope_values", "positions", "cos", "sin", "block_table", "norm_weight")
FP8 = "float8_e4m3fn"


def key_form(page, scales):
    return IndexKeyDescriptor("paged" if page else "contiguous", FP8, 128, page, scales)


def latent_form(page, order, scales, width=512):
    return LatentDescriptor("paged" if page else "contiguous", FP8, width, 64, page, 1, 128, order, scales)


class Data:
    """Seeded operands on one device."""

    def __init__(self, device, seed=0):
        self.generator, self.device = torch.Generator().manual_seed(seed), device

    def normal(self, *shape, dtype=torch.bfloat16, spread=True):
        """Numbers whose magnitudes span twelve binades."""
        x = torch.randn(shape, generator=self.generator)
        if spread:
            x *= torch.exp2(torch.randint(-8, 5, (*shape[:-1], 1), generator=self.generator).float())
        return x.to(dtype).to(self.device)

    def angles(self, *shape, dtype=torch.float32):
        angle = torch.rand(shape, generator=self.generator) * 6.3
        return angle.cos().to(dtype).to(self.device), angle.sin().to(dtype).to(self.device)

    def positions(self, batch, tokens, total, dtype=torch.int64):
        rows = [torch.randperm(total, generator=self.generator)[:tokens] for _ in range(batch)]
        found = torch.stack(rows).to(dtype)
        found[0, -1] = -1
        return found.to(self.device)

    def table(self, batch, pages, page_size):
        """Shuffled pages, and how many there are."""
        table = torch.randperm(batch * pages + 1, generator=self.generator)[: batch * pages]
        return table.to(torch.int32).view(batch, pages).to(self.device), batch * pages + 1


def written(kernel, op, names, operands, attributes, caches):
    """The caches after the kernel's launch, and after the reference on copies."""
    module = kernel(op, dict(zip(names, operands, strict=True)), attributes)
    wanted = [None if x is None else x.cpu().clone() for x in operands]
    assert module.launch(*operands) is None
    reference = index_key_write if op == "index_key_write" else latent_write
    tensors = dict(zip(names, wanted, strict=True))
    reference(**tensors, **attributes)
    for name in caches:
        found, want = operands[names.index(name)].cpu(), tensors[name]
        assert want.count_nonzero() > 0
        assert torch.equal(found.view(torch.uint8), want.view(torch.uint8)), name


@pytest.mark.parametrize("style", ["none", "half_split", "interleaved", "deinterleaved"])
@pytest.mark.parametrize("norm", ["none", "weight", "bias"])
@pytest.mark.parametrize(("page", "scales"), [(64, "power2"), (64, "amax"), (16, "amax"), (0, "power2")])
def test_quantised_keys(kernel, device, style, norm, page, scales):
    data, tokens = Data(device), 5
    table, pages = data.table(2, 3, page) if page else (None, 0)
    keys = torch.zeros((pages, page, 132) if page else (2, 48, 132), dtype=torch.uint8, device=device)
    cos, sin = data.angles(2, tokens, 32) if style != "none" else (None, None)
    weight = None if norm == "none" else (1 + 0.2 * data.normal(128, dtype=torch.float32, spread=False))
    bias = data.normal(128, dtype=torch.float32, spread=False) if norm == "bias" else None
    positions = data.positions(2, tokens, 3 * page if page else 48)
    operands = (keys, data.normal(2, tokens, 128), positions, weight, bias, cos, sin, table)
    attributes = {"norm_eps": 1e-6, "rope_style": style, "descriptor": str(key_form(page, scales))}
    written(kernel, "index_key_write", KEY_OPERANDS, operands, attributes, ["keys"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("paged", [False, True])
def test_plain_keys(kernel, device, dtype, paged):
    data, tokens, width = Data(device, 1), 3, 40
    table, pages = data.table(2, 2, 8) if paged else (None, 0)
    keys = torch.zeros((pages, 8, width) if paged else (2, 16, width), dtype=dtype, device=device)
    cos, sin = data.angles(2, tokens, 12, dtype=torch.bfloat16)
    weight, bias = data.normal(width, spread=False), data.normal(width, spread=False)
    positions = data.positions(2, tokens, 16, torch.int32)
    operands = (keys, data.normal(2, tokens, width), positions, weight, bias, cos, sin, table)
    attributes = {"norm_eps": 1e-5, "rope_style": "half_split", "descriptor": ""}
    written(kernel, "index_key_write", KEY_OPERANDS, operands, attributes, ["keys"])


@pytest.mark.parametrize("style", ["none", "half_split", "interleaved", "deinterleaved"])
@pytest.mark.parametrize(
    "form",
    [
        latent_form(64, "scales_rope", "power2"),
        latent_form(64, "rope_scales", "amax"),
        latent_form(0, "scales_rope", "amax", width=384),
    ],
)
@pytest.mark.parametrize("normed", [False, True])
def test_quantised_latents(kernel, device, style, form, normed):
    data, tokens = Data(device, 2), 4
    weight = 1 + 0.2 * data.normal(form.width, spread=False) if normed else None
    table, pages = data.table(2, 2, 64) if form.page_size else (None, 0)
    latent = torch.zeros((pages, 64, form.row) if form.page_size else (2, 32, form.row), dtype=torch.uint8)
    latent = latent.to(device)
    cos, sin = data.angles(2, tokens, 32) if style != "none" else (None, None)
    positions = data.positions(2, tokens, 128 if form.page_size else 32)
    values = data.normal(2, tokens, form.width), data.normal(2, tokens, 64)
    operands = (latent, None, *values, positions, cos, sin, table, weight)
    attributes = {"rope_style": style, "norm_eps": 1e-5, "descriptor": str(form)}
    written(kernel, "latent_write", LATENT_OPERANDS, operands, attributes, ["latent"])


@pytest.mark.parametrize("rope", ["split", "none", "empty", "one buffer"])
@pytest.mark.parametrize("paged", [False, True])
def test_plain_latents(kernel, device, rope, paged):
    data, tokens, width = Data(device, 3), 3, 24
    table, pages = data.table(2, 2, 8) if paged else (None, 0)
    rows = (pages, 8) if paged else (2, 16)
    turns = 0 if rope == "empty" else 8
    packed = rope == "one buffer"
    form = LatentDescriptor("paged" if paged else "contiguous", "bfloat16", width, 8, 8 if paged else 0, 1)
    latent = torch.zeros(*rows, width + 8 * packed, dtype=torch.bfloat16, device=device)
    cache = torch.zeros(*rows, turns, dtype=torch.bfloat16, device=device) if rope in ("split", "empty") else None
    turned = None if rope == "none" else data.normal(2, tokens, turns)
    cos, sin = data.angles(2, tokens, 4) if turns and turned is not None else (None, None)
    weight = data.normal(width, dtype=torch.float32, spread=False) if paged else None
    values = data.normal(2, tokens, width)
    operands = (latent, cache, values, turned, data.positions(2, tokens, 16), cos, sin, table, weight)
    attributes = {"rope_style": "none" if cos is None else "interleaved", "descriptor": str(form) if packed else ""}
    attributes["norm_eps"] = 1e-6
    caches = ["latent", "rope"] if rope == "split" else ["latent"]
    written(kernel, "latent_write", LATENT_OPERANDS, operands, attributes, caches)


def test_rows_without_a_place_are_skipped(kernel, device):
    """Positions beyond the cache and on unmapped pages: nothing is written, no memory outside is touched."""
    data = Data(device, 4)
    keys = torch.zeros(3, 8, 16, dtype=torch.bfloat16, device=device)
    table = torch.tensor([[1, -1]], dtype=torch.int32, device=device)
    positions = torch.tensor([[3, 9, 16, -1]], device=device)
    values = data.normal(1, 4, 16)
    operands = (keys, values, positions, None, None, None, None, table)
    attributes = {"norm_eps": 1e-6, "rope_style": "none", "descriptor": ""}
    kernel("index_key_write", dict(zip(KEY_OPERANDS, operands, strict=True)), attributes).launch(*operands)
    wanted = torch.zeros_like(keys)
    wanted[1, 3] = values[0, 0]
    assert torch.equal(keys, wanted)


def test_every_e4m3_value_and_what_lies_between(kernel, device):
    """Halfway points go to even, magnitudes over 448 stop there: a row for each sign, scale 1 by its largest value."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    values = torch.stack([torch.cat([codes, codes[:1]]), torch.cat([middles, codes[:1], codes[-1:]])])
    values = torch.stack([values, -values]).view(1, 4, 128).to(device)
    values[:, :, -1] = 448.0
    keys = torch.zeros(1, 64, 132, dtype=torch.uint8, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    operands = (keys, values, torch.arange(4, device=device).view(1, 4), None, None, None, None, table)
    attributes = {"norm_eps": 1e-6, "rope_style": "none", "descriptor": str(key_form(64, "power2"))}
    written(kernel, "index_key_write", KEY_OPERANDS, operands, attributes, ["keys"])
