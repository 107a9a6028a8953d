import math

import pytest
import torch
from torch import nn

from kimigraph.models.kimi_k31.attention_residual import ResidualStream, attention_residual
from kimigraph.models.kimi_k31.normalization import RMSNorm

WIDTH, EPS = 12, 1e-5


def parameters():
    norm, query = RMSNorm(WIDTH, EPS, torch.float32), nn.Linear(WIDTH, 1, bias=False)
    norm.weight.copy_(torch.randn(WIDTH))
    query.weight.copy_(torch.randn(1, WIDTH))
    return norm, query


def mix(sources, norm, query):
    """Equation 8 of the Kimi K3 report for each token in plain numbers."""
    out = torch.zeros_like(sources[0])
    for b in range(out.shape[0]):
        for s in range(out.shape[1]):
            vectors = [source[b, s].tolist() for source in sources]
            logits = []
            for vector in vectors:
                rms = math.sqrt(sum(x * x for x in vector) / WIDTH + EPS)
                key = [x / rms * g for x, g in zip(vector, norm.weight.tolist(), strict=True)]
                logits.append(sum(w * x for w, x in zip(query.weight[0].tolist(), key, strict=True)))
            weights = [math.exp(logit) for logit in logits]
            for vector, weight in zip(vectors, weights, strict=True):
                out[b, s] += torch.tensor(vector) * weight / sum(weights)
    return out


def sums(embedding, outputs, block_size):
    """The embedding, then the sum of each block's sublayer outputs so far (two sublayers a layer)."""
    step = 2 * block_size
    return [embedding, *(torch.stack(outputs[i : i + step]).sum(0) for i in range(0, len(outputs), step))]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_mixture_of_sources(count):
    sources, (norm, query) = [torch.randn(2, 3, WIDTH) for _ in range(count)], parameters()
    torch.testing.assert_close(attention_residual(sources, norm, query), mix(sources, norm, query))


@pytest.mark.parametrize(("layers", "block_size"), [(1, 1), (4, 1), (6, 2), (7, 3), (5, 12)])
def test_every_read_of_a_stream(layers, block_size):
    embedding = torch.randn(1, 2, WIDTH)
    stream, outputs = ResidualStream(embedding, block_size), []
    for layer in range(layers):
        for take in (lambda out, layer=layer: stream.add_attention(layer, out), stream.add_mlp):
            norm, query = parameters()
            want = mix(sums(embedding, outputs, block_size), norm, query)
            torch.testing.assert_close(stream.read(norm, query), want)
            outputs.append(torch.randn(1, 2, WIDTH))
            take(outputs[-1])
    norm, query = parameters()
    torch.testing.assert_close(stream.read(norm, query), mix(sums(embedding, outputs, block_size), norm, query))
    assert len(stream.blocks) == -(-layers // block_size)


def test_bf16_sources_round_once():
    sources, (norm, query) = [torch.randn(1, 4, WIDTH).bfloat16() for _ in range(3)], parameters()
    got = attention_residual(sources, norm, query)
    assert torch.equal(got, attention_residual([source.float() for source in sources], norm, query).bfloat16())
