"""Policies: what the files may say, what they may not."""

import pytest

from kimigraph.ir.errors import UsageError
from kimigraph.ir.policy import POLICIES, Format, policy_of, read_policy

PAIR = 'index_query = { format = "mxfp8" }\nindex_key = { format = "mxfp8" }\n'


def test_the_policies_that_come_along():
    off, article, deepseek = map(policy_of, POLICIES)
    assert not off.quantises and article.quantises and deepseek.quantises
    assert article.index_query == article.index_key == Format("mxfp8", 32)
    assert article.latent == Format("fp8", 128, "amax", "rope_scales")
    assert deepseek.index_key == Format("fp8", 128, "power2")
    assert deepseek.latent == Format("fp8", 128, "power2", "scales_rope")
    assert all(policy_of(name).summary and policy_of(name).name == name for name in POLICIES)
    assert 0 < article.tolerance.recall < 1


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(f'name = "mine"\nrotation = "hadamard"\n[roles]\n{PAIR}latent = "fp8"\n[tolerance]\nrecall = 0.5\n')
    policy = policy_of(read_policy(str(path)))
    assert (policy.name, policy.rotation, policy.tolerance.recall) == ("mine", "hadamard", 0.5)
    assert policy.index_key == Format("mxfp8", 32) and policy.latent == Format("fp8", 128, "power2", "scales_rope")
    assert str(policy.index_key) == "mxfp8 group 32" and policy.experts == Format()
    assert read_policy("article") == "article"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("artikle", "did you mean 'article'"),
        ("nonsense", "Use off, article, deepseek or a policy file"),
        ("[roles\n", "not TOML"),
        ('color = "red"\n', "has no field 'color'"),
        ('[roles]\nvalue = "fp8"\n', "has no field 'value'"),
        ('[roles]\nlatent = "mxfp8"\n', "latent has format 'mxfp8', want keep, fp8"),
        ('[roles]\nlatent = "float8_e4m3fnuz"\n', "latent has format 'float8_e4m3fnuz'"),  # G9
        ("[roles]\nlatent = 8\n", "latent is 8"),
        ('[roles]\nlatent = { format = "fp8", group = 0 }\n', "group 0"),
        ('[roles]\nlatent = { format = "fp8", order = "rope" }\n', "order 'rope', want scales_rope or rope_scales"),
        ('[roles]\nindex_key = { format = "mxfp8", scales = "amax" }\n', "has no field 'scales'"),
        ('[roles]\nindex_key = "mxfp8"\n', "half a pair gains nothing"),
        ('[roles]\nindex_query = "fp8"\nindex_key = "mxfp8"\n', "half a pair gains nothing"),
        ('[roles]\nexperts = "mxfp8"\n', "experts has format 'mxfp8', want keep, mxfp4"),
        ('[roles]\nexperts = { format = "mxfp4", group = 16 }\n', "experts has no field 'group'"),
        ('[roles]\nprolog_weights = "mxfp4"\n', "prolog_weights has format 'mxfp4', want keep"),
        ('rotation = "hadamard"\n[roles]\nlatent = "fp8"\n', "rotation is for quantised index"),
        ('rotation = "givens"\n', "want none or hadamard"),
        ("[tolerance]\nspeed = 1\n", "has no field 'speed'"),
        ('[tolerance]\nrecall = "high"\n', "recall is 'high'"),
        ("roles = 3\n", "want a table"),
    ],
)
def test_what_a_policy_may_not_say(text, complaint):
    with pytest.raises(UsageError, match=complaint):
        policy_of(text)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"absent.toml: cannot be read"):
        read_policy(str(tmp_path / "absent.toml"))
    odd = tmp_path / "odd.toml"
    odd.write_text('[roles]\nlatent = "fp4"\n')
    with pytest.raises(UsageError, match=r"odd.toml: policy: latent has format 'fp4'"):
        read_policy(str(odd))
