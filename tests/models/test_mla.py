import math

import pytest
import torch

from kimigraph.ir.reference.lightning_indexer import lightning_indexer
from kimigraph.ir.reference.sparse_attention import sparse_attention
from kimigraph.models.kimi_k31.cache import Positions
from kimigraph.models.kimi_k31.indexer import rope_angles, rotate

CONTEXT = 48


def turned(x, positions, style):
    """The first 16 dims of ``x`` [B, S, .., D] rotated pair by pair, each in the complex plane."""
    out, width = x.clone(), 16
    for i in range(width // 2):
        a, b = (i, i + width // 2) if style == "half_split" else (2 * i, 2 * i + 1)
        angle = positions.double() * 10000.0 ** (-2 * i / width)
        angle = angle.reshape(*angle.shape, *[1] * (x.dim() - 3))
        point = torch.complex(x[..., a].double(), x[..., b].double()) * torch.polar(torch.ones_like(angle), angle)
        out[..., a], out[..., b] = point.real.float(), point.imag.float()
    return out


def absorbed(layer, x, lengths, latents, ropes, keys, style):
    """The layer through the fp32 references of the fused operators; the caches hold the new tokens already."""
    batch, tokens, _ = x.shape
    query = layer.q_a_layernorm(layer.q_a_proj(x))
    index_q = layer.indexer.wq_b(query).view(batch, tokens, 32, 32)
    if style != "none":
        index_q = turned(index_q, lengths.unsqueeze(1) + torch.arange(tokens), style)
    weights = layer.indexer.weights_proj(x) / math.sqrt(32 * 32)
    picks = lightning_indexer(index_q, keys, weights, lengths + 1, k=layer.indexer.topk, scale=1.0)
    q = layer.q_b_proj(query).view(batch, tokens, 4, 32)
    up_key, up_value = layer.kv_b_proj.weight.view(4, 32, 32).split([16, 16], dim=1)
    q_latent = torch.einsum("bshn,hnl->bshl", q[..., :16], up_key)
    out, _ = sparse_attention(q_latent, q[..., 16:], latents, ropes, picks, scale=32**-0.5)
    out = torch.einsum("bshl,hvl->bshv", out, up_value).reshape(batch, tokens, -1)
    if layer.g_proj is not None:
        out = out * torch.sigmoid(layer.g_proj(x))
    return layer.o_proj(out)


@pytest.mark.parametrize(
    ("fields", "tokens", "lengths"),
    [
        ({}, 1, [0, 20, 47]),
        ({}, 4, [3, 0, 44]),
        ({"index_topk": CONTEXT + 5}, 3, [10, 20, 30]),
        ({"mla_use_output_gate": False}, 2, [40, 1, 7]),
        ({"index_rope": "half_split"}, 2, [40, 1, 7]),
        ({"index_rope": "interleaved"}, 2, [40, 1, 7]),
    ],
)
def test_layer_against_the_operator_references(build, fields, tokens, lengths):
    model = build(**fields)
    layer, style = model.model.layers[3].self_attn, fields.get("index_rope", "none")
    lengths, x = torch.tensor(lengths, dtype=torch.int32), torch.randn(3, tokens, 64)
    caches = [torch.randn(3, CONTEXT, width) for width in (32, 16, 32)]
    latent, rope = layer.kv_a_proj_with_mqa(x).split([32, 16], dim=-1)
    latent, key = layer.kv_a_layernorm(latent), layer.indexer.k_norm(layer.indexer.wk(x))
    if style != "none":
        key = turned(key, lengths.unsqueeze(1) + torch.arange(tokens), style)
    expected = [cache.clone() for cache in caches]
    for b in range(3):
        for cache, new in zip(expected, (latent, rope, key), strict=True):
            cache[b, lengths[b] : lengths[b] + tokens] = new[b]

    got = layer(x, Positions.after(lengths, tokens, CONTEXT), *caches)
    torch.testing.assert_close(got, absorbed(layer, x, lengths, *expected, style), rtol=1e-4, atol=1e-5)
    for cache, want in zip(caches, expected, strict=True):
        torch.testing.assert_close(cache, want)


def test_visibility_follows_each_row():
    positions = Positions.after(torch.tensor([0, 2], dtype=torch.int32), 2, 4)
    assert positions.visible.int().tolist() == [
        [[1, 0, 0, 0], [1, 1, 0, 0]],
        [[1, 1, 1, 0], [1, 1, 1, 1]],
    ]


@pytest.mark.parametrize("style", ["half_split", "interleaved"])
def test_rotation_leaves_the_other_dims_and_depends_on_distance_alone(style):
    q, k = torch.randn(1, 1, 24), torch.randn(1, 1, 24)

    def score(at, other):
        first, second = (rope_angles(torch.tensor([[position]]), 16, 10000.0) for position in (at, other))
        return (rotate(q, first, style) * rotate(k, second, style)).sum()

    assert torch.equal(rotate(q, rope_angles(torch.tensor([[9]]), 16, 10000.0), style)[..., 16:], q[..., 16:])
    torch.testing.assert_close(score(7, 3), score(104, 100), rtol=1e-4, atol=1e-4)
    assert (score(7, 3) - score(7, 5)).abs() > 1e-2
