from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimigraph.ir.descriptors import (
    ConvDescriptor,
    IndexKeyDescriptor,
    LatentDescriptor,
    StateDescriptor,
    parse_descriptor,
)
from kimigraph.ir.errors import CompileError

positive = st.integers(1, 10_000)
dtypes = st.sampled_from(["bfloat16", "float16", "float32"])
pages = st.sampled_from([("contiguous", 0), ("paged", 16), ("paged", 64)])
descriptors = st.one_of(
    st.builds(
        lambda page, dtype, width, rope, buffers: LatentDescriptor(page[0], dtype, width, rope, page[1], buffers),
        pages, dtypes, positive, st.integers(0, 64), st.sampled_from([1, 2]),
    ),
    st.builds(lambda page, dtype, width: IndexKeyDescriptor(page[0], dtype, width, page[1]), pages, dtypes, positive),
    st.builds(StateDescriptor, st.sampled_from(["kv", "vk"]), dtypes, positive, positive, positive),
    st.builds(lambda channels, width: ConvDescriptor(channels, width, width + 2), positive, positive),
)  # fmt: skip


@given(descriptors)
def test_the_text_reads_back(descriptor):
    assert parse_descriptor(str(descriptor)) == descriptor


def test_the_text_of_a_latent_cache():
    descriptor = LatentDescriptor("contiguous", "bfloat16", width=512, rope_dim=64)
    text = "latent{layout=contiguous,dtype=bfloat16,width=512,rope_dim=64,page_size=0,buffers=2}"
    assert str(descriptor) == text
    assert parse_descriptor(" latent{ layout=contiguous, dtype=bfloat16, width=512, rope_dim=64 } ") == descriptor


def test_layouts_of_equal_sizes_differ():
    kv = StateDescriptor("kv", "float32", 4, 16, 16)
    assert str(kv) != str(replace(kv, layout="vk"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown kind ''; known are latent, index_key, state, conv"),
        ("kv{width=1}", "unknown kind 'kv'"),
        ("conv", "want conv{field=value,...}"),
        ("conv{channels=4,width=4,columns=3", "want conv{field=value,...}"),
        ("conv{channels=4,width=4,depth=3}", "no field 'depth'; fields are channels, width, columns"),
        ("conv{channels=4,channels=4}", "field 'channels' stands twice"),
        ("conv{channels=4,width=four}", "width is 'four', want a whole number"),
        ("conv{channels=4,width=4}", "fields columns are missing"),
        ("conv{channels=4,width=4,columns=2}", "at least width - 1"),
        ("state{layout=kk,dtype=float32,heads=1,key_dim=2,value_dim=3}", "layout must be one of kv, vk"),
        ("index_key{layout=paged,dtype=float32,width=8}", "a paged layout has a page_size"),
        ("index_key{layout=contiguous,dtype=float8_e5m2,width=8}", "dtype must be one of"),
        ("index_key{layout=contiguous,dtype=float8_e4m3fn,width=8}", "scales must be one of power2, amax"),
        ("latent{layout=contiguous,dtype=float32,width=8,rope_dim=0,buffers=3}", "buffers must be 1"),
    ],
)
def test_errors_quote_the_text_and_say_what_is_wrong(text, message):
    with pytest.raises(CompileError) as caught:
        parse_descriptor(text)
    assert message in str(caught.value)
