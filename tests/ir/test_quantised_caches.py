"""Quantised caches beside the captured ones: bytes, the way back, rotation, the bill at K3.1's published sizes."""

import json
from pathlib import Path

import pytest
import torch

from kimigraph.ir.cache_formats import (
    cache_bill,
    given_to,
    left_in,
    pack,
    quantised_keys,
    quantised_latent,
    quantised_spec,
    rounded,
    unpack,
)
from kimigraph.ir.descriptors import IndexKeyDescriptor, LatentDescriptor, parse_descriptor
from kimigraph.ir.errors import CompileError
from kimigraph.ir.manifest import _tuples
from kimigraph.ir.policy import policy_of
from kimigraph.ir.program import InputSpec
from kimigraph.ir.reference.hadamard import hadamard_rotated


def cache(name, shape, form, dtype="bfloat16"):
    stride = torch.empty(shape, device="meta").stride()
    return InputSpec(name, "cache", name, shape, stride, dtype, mutated=True, descriptor=str(form))


def specs(policy, dtype="bfloat16", batch=2, total=64, width=512, rope=64, key=128, head=False):
    """Captured and quantised caches of one layer."""
    lead = (batch, 1, total) if head else (batch, total)
    form, keys = LatentDescriptor("contiguous", dtype, width, rope), IndexKeyDescriptor("contiguous", dtype, key)
    parts = [cache("latent", (*lead, width), form, dtype), cache("rope", (*lead, rope), form, dtype)]
    index = cache("index_key", (batch, total, key), keys, dtype)
    policy = policy_of(policy)
    packed = quantised_spec(parts[0], quantised_latent(form, policy.latent), *parts[1 if rope else 2 :])
    turned = quantised_keys(keys, policy.index_key, policy.rotation)
    captured = [*parts[: 2 if rope else 1], index]
    return captured, [packed, quantised_spec(index, turned)]


@pytest.mark.parametrize("policy", ["article", "deepseek"])
def test_the_bill_at_published_sizes(policy):
    captured, quantised = specs(policy)
    assert [spec.shape[-1] for spec in quantised] == [656, 132]
    assert cache_bill(quantised) == {"cache_bytes_per_token": 656 + 132, "cache_bytes_per_token_bf16": 1152 + 256}
    assert cache_bill(captured)["cache_bytes_per_token"] == 1152 + 256


@pytest.mark.parametrize("policy", ["article", "deepseek"])
@pytest.mark.parametrize("head", [False, True])
def test_there_and_back(policy, head):
    captured, quantised = specs(policy, "float32", head=head)
    values = {spec.source: torch.randn(spec.shape) for spec in captured}
    given = given_to(quantised, values)
    assert [tuple(tensor.shape) for tensor in given] == [spec.shape for spec in quantised]
    after = left_in(quantised, given, values)
    for name, value in values.items():
        assert after[name].shape == value.shape
        error = (after[name] - value).norm() / value.norm()
        assert error < (0.003 if name == "rope" else 0.04)
    twice = rounded(quantised[1], {"index_key": after["index_key"]})["index_key"]
    assert torch.equal(twice, after["index_key"])  # powers of two: what is quantised stays as it is


def test_rotated_keys_come_back_as_the_model_has_them():
    text = 'rotation = "hadamard"\n[roles]\nindex_query = "mxfp8"\nindex_key = "mxfp8"\nlatent = "fp8"\n'
    captured, quantised = specs(text, "float32")
    keys = torch.randn(captured[-1].shape)
    keys[..., 7] *= 1e4
    assert "rotation=hadamard" in quantised[1].descriptor
    back = unpack(quantised[1], pack(quantised[1], {"index_key": keys}))["index_key"]
    assert (back - keys).norm() / keys.norm() < 0.04
    torch.testing.assert_close(hadamard_rotated(hadamard_rotated(keys)), keys, atol=1e-2, rtol=1e-5)


def test_a_record_of_an_input_survives_json():
    _, quantised = specs("article")
    for spec in quantised:
        assert InputSpec(**_tuples(json.loads(json.dumps(vars(spec))))) == spec


@pytest.mark.parametrize(
    "text",
    [
        "index_key{layout=contiguous,dtype=float8_e4m3fn,width=128,page_size=0,scales=e8m0,group=32}",
        "index_key{layout=paged,dtype=float8_e4m3fn,width=128,page_size=64,scales=e8m0,group=32,rotation=hadamard}",
    ],
)
def test_descriptors_of_groups_round_trip(text):
    form = parse_descriptor(text)
    assert str(form) == text and form.row == 132


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ("dtype=bfloat16,width=128,page_size=0,group=32", "group belongs to"),
        ("dtype=float8_e4m3fn,width=128,page_size=0,scales=power2,group=32", "scales of groups must be e8m0"),
        ("dtype=float8_e4m3fn,width=128,page_size=0,scales=e8m0", "scales must be one of"),
        ("dtype=float8_e4m3fn,width=96,page_size=0,scales=power2,rotation=hadamard", "power of two"),
        ("dtype=bfloat16,width=128,page_size=0,rotation=hadamard", "rotation belongs to"),
        ("dtype=float8_e4m3fnuz,width=128,page_size=0,scales=power2", "dtype must be one of"),  # G9
    ],
)
def test_descriptors_that_contradict_themselves(fields, rule):
    with pytest.raises(CompileError, match=rule):
        parse_descriptor(f"index_key{{layout=contiguous,{fields}}}")


def test_policies_are_packaged():
    folder = Path(policy_of.__code__.co_filename).with_name("policies")
    assert sorted(path.stem for path in folder.glob("*.toml")) == ["article", "deepseek", "off"]
