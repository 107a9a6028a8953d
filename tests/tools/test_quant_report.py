"""``kimigraph quant-report``: its figures on a tiny model, its tables, and its exit code."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kimigraph.cli.app import make_app

SOURCE = str(Path(__file__).parents[2] / "examples" / "k31_tiny")
OPTIONS = ["--steps", "24", "--batch", "2", "--set", "num_hidden_layers=4"]
STRICT = """
[roles]
index_query = { format = "mxfp8", group = 32 }
index_key = { format = "mxfp8", group = 32 }
latent = { format = "fp8", group = 16 }
[tolerance]
output = 0.0001
"""


def invoke(*options):
    return CliRunner().invoke(make_app(), ["quant-report", SOURCE, *OPTIONS, *options])


def test_the_document(tmp_path):
    out = tmp_path / "report.json"
    result = invoke("--policy", "article", "--json", "--out", str(out))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document == json.loads(out.read_text())
    rows = {row["role"]: row for row in document["layers"]}
    assert set(rows) == {"latent", "rope", "index_key", "index_query"}
    assert {row["layer"] for row in rows.values()} == {"model.layers.3.self_attn"}
    assert (rows["latent"]["bytes_per_token"], rows["latent"]["bytes_per_token_before"]) == (36, 128)
    assert (rows["rope"]["bytes_per_token"], rows["index_key"]["bytes_per_token"]) == (32, 33)
    assert 29 < rows["latent"]["sqnr_db"] < 35 and 29 < rows["index_query"]["sqnr_db"] < 34
    assert 0.9 < rows["index_key"]["recall"] <= 1 and 0 < rows["latent"]["output_error"] < 0.25
    final = document["final"]
    assert final["tokens"] == 48 and 0 < final["divergence"] <= final["worst_divergence"]
    assert document["memory"]["cache_bytes_per_token"] == 101
    assert document["passed"] and document["worst"] is None


def test_beyond_the_tolerance_it_names_the_layer_and_exits_with_3(tmp_path):
    policy = tmp_path / "strict.toml"
    policy.write_text(STRICT)
    result = invoke("--policy", str(policy))
    assert result.exit_code == 3
    assert "model.layers.3.self_attn  index_key" in result.stdout and "recall" in result.stdout
    assert "model.layers.3.self_attn: output_error is 0.0" in result.stderr and "allows 0.0001" in result.stderr


@pytest.mark.parametrize(
    ("policy", "complaint"),
    [("off", "quantises nothing"), ("articel", "did you mean 'article'"), ("no/such.toml", "cannot be read")],
)
def test_what_it_cannot_report_on(policy, complaint):
    result = invoke("--policy", policy)
    assert result.exit_code == 2 and complaint in result.stderr


def test_packed_experts(tmp_path):
    """The weights' noise, what the experts' results lose, and the bytes; nothing else changes."""
    policy = tmp_path / "packed.toml"
    policy.write_text('[roles]\nexperts = "mxfp4"\n')
    result = invoke("--policy", str(policy), "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert {row["role"] for row in document["layers"]} == {"experts"} and len(document["layers"]) == 3
    for row in document["layers"]:
        assert row["format"] == "mxfp4 group 32" and row["layer"].endswith("block_sparse_moe")
        assert 16 < row["sqnr_db"] < 24 and 0.02 < row["output_error"] < 0.3
    memory = document["memory"]
    assert memory["experts_bytes"] * 128 == memory["experts_bytes_unpacked"] * 17 and memory["experts_bytes"] > 0
    assert document["final"]["logits_error"] > 0
