"""``kimigraph explain``: near misses name the node, the line, what matched and what would help."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

from kimigraph.capture import capture_module
from kimigraph.capture.capture_source import capture
from kimigraph.capture.load import load_source
from kimigraph.cli.app import make_app
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.ir.program import CapturedProgram
from kimigraph.passes import DumpPasses, PassContext, default_pipeline, run_pipeline
from kimigraph.tools.explain import Site, explain

BATCH, KEYS, HEADS, WIDTH, LATENT = 2, 32, 4, 16, 24
CONFIG = CompileConfig(batch=BATCH, tokens=1, context=KEYS)


class SparseStep(nn.Module):
    """Latent attention over an indexer's picks, with at most one thing wrong."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        wide = torch.float32 if fault == "types" else torch.bfloat16
        self.expand = nn.Linear(LATENT, HEADS * 2 * WIDTH, bias=False, dtype=wide)

    def forward(self, x: dict[str, Tensor]) -> tuple[Tensor, ...]:
        visible = torch.arange(KEYS) < (x["lengths"] + 1).view(BATCH, 1, 1)
        dots = torch.matmul(x["index_q"].float(), x["keys"].float().transpose(-1, -2).unsqueeze(1))
        if self.fault != "relu":
            dots = F.relu(dots)
        scores = torch.matmul(x["weights"].unsqueeze(-2), dots).squeeze(-2)
        best, picks = scores.masked_fill(~visible, float("-inf")).topk(8, dim=-1)
        picked = torch.zeros_like(visible).scatter(-1, picks, True)

        latents = x["latents"].to(self.expand.weight.dtype)
        both = self.expand(latents).view(BATCH, KEYS, HEADS, 2 * WIDTH).transpose(1, 2)
        keys, values = both.split([WIDTH, WIDTH], dim=-1)
        logits = torch.matmul(x["q"].to(keys.dtype), keys.transpose(-1, -2)) * WIDTH**-0.5
        hidden = ~(picked & visible).unsqueeze(1)
        weights = torch.softmax(logits.float().masked_fill(hidden, float("-inf")), dim=-1)
        out = torch.matmul(weights.to(values.dtype), values)
        if self.fault == "scores":
            return out, scores.sum(-1)  # scores reused
        if self.fault == "values":
            return out * best.sum(-1).view(BATCH, 1, 1, 1), best  # values used
        return (out,)


def example(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "index_q": random(BATCH, 1, 32, WIDTH),
        "weights": random(BATCH, 1, 32),
        "keys": random(BATCH, KEYS, WIDTH),
        "q": random(BATCH, HEADS, 1, WIDTH).to(dtype),
        "latents": random(BATCH, KEYS, LATENT).to(dtype),
        "lengths": torch.tensor([5, 20], dtype=torch.int32),
    }


def dump(program: CapturedProgram, directory: Path, config: CompileConfig = CONFIG) -> Path:
    run_pipeline(program, default_pipeline(config), PassContext(config), [DumpPasses(directory)])
    return directory


@pytest.fixture
def near_miss(tmp_path: Path) -> Callable[[str], Path]:
    """The dumps of a step with that fault."""

    def make(fault: str) -> Path:
        program = capture_module(SparseStep(fault), (example(torch.bfloat16),), {}, CONFIG)
        return dump(program, tmp_path / "dumps")

    return make


def misses(directory: Path, rule: str) -> list[Site]:
    [report] = explain(directory, rule=rule)
    return [site for site in report.sites if not site.hit]


def line_of(site: Site) -> str:
    path, _, number = site.source.rpartition(":")
    return Path(path).read_text(encoding="utf-8").splitlines()[int(number) - 1]


def test_a_step_without_a_fault_is_matched(near_miss: Callable[[str], Path]) -> None:
    reports = {report.rule: report for report in explain(near_miss(""))}
    for rule in ("fuse-lightning-indexer", "fuse-sparse-attention"):
        assert [site.hit for site in reports[rule].sites] == [True]
    assert reports["raise-kda"].sites == () and "nothing in the graph" in reports["raise-kda"].note


@pytest.mark.parametrize(
    ("fault", "rule", "reason", "node", "line", "remedy"),
    [
        (
            "scores",
            "fuse-lightning-indexer",
            "is used elsewhere, by sum",
            "squeeze",
            "torch.matmul(x",
            "without squeeze",
        ),
        ("relu", "fuse-lightning-indexer", "expected relu, found aten.matmul", "matmul", "torch.matmul(x", "put relu"),
        ("types", "fuse-sparse-attention", "weight and latent differ in type", "w_expand", "torch.softmax(", "--dtype"),
        ("values", "fuse-lightning-indexer", "values of the top-k are used", "getitem", ".topk(8", "use the indices"),
    ],
)
def test_a_near_miss_made_for_the_purpose(
    fault: str, rule: str, reason: str, node: str, line: str, remedy: str, near_miss: Callable[[str], Path]
) -> None:
    directory = near_miss(fault)
    [site] = misses(directory, rule)
    assert reason in site.reason
    assert site.node.startswith(node)
    assert line in line_of(site) and Path(site.source.rpartition(":")[0]).name == Path(__file__).name
    assert remedy in site.remedy
    operators = {item.partition(" (")[2].rstrip(")") for item in site.matched}
    assert {"topk" if "indexer" in rule else "softmax", "matmul"} <= operators
    for node in (site.node, *(item.partition(" ")[0] for item in site.matched)):
        assert site in [found for report in explain(directory, node=node) for found in report.sites]


DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "random_weights": {"seed": 0},
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "index_topk": 8,
    "index_head_dim": 32,
    "index_n_heads": 32,
    "num_hidden_layers": 2,
    "mlp_layer_types": ["dense", "sparse"],
}


def test_deepseek_v32_without_its_indexer_fused(tmp_path: Path) -> None:
    """A public model: without the first fusion the second finds picks that no operator made."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    config = replace(CONFIG, disabled_passes=("fuse-lightning-indexer",))
    directory = dump(capture(load_source(str(tmp_path), config), config), tmp_path / "dumps", config)
    sites = misses(directory, "fuse-sparse-attention")
    assert [site.module for site in sites] == [f"model.layers.{n}.self_attn.indexer" for n in (0, 1)]
    for layer, site in enumerate(sites):
        assert site.reason == "the selection is not that of an indexer that was fused"
        assert "deepseek_v32/modeling_deepseek_v32.py" in site.source and "topk" in line_of(site)
        assert any(item.startswith(f"cache_{layer}_latent") for item in site.matched)
        assert "fuse-lightning-indexer" in site.remedy
    [report] = explain(directory, rule="fuse-lightning-indexer")
    assert report.sites == () and "did not run" in report.note


def test_kimi_linear_has_dense_attention(tmp_path: Path) -> None:
    """A public model: a prompt that may hold several documents is masked by more than a length."""
    directory = dump(capture_module(*kimi_linear(), CONFIG), tmp_path / "dumps")
    [site] = misses(directory, "fuse-sparse-attention")
    assert site.reason == "attention over all keys has masks besides a length"
    assert "kimi_linear/modeling_kimi_linear.py" in site.source
    assert any("kv_b_proj_weight" in item for item in site.matched)
    assert "one causal length only" in site.remedy


def kimi_linear() -> tuple[nn.Module, tuple[Tensor], dict[str, Any]]:
    """One dense layer of the public model, and its example inputs."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    config = KimiLinearConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        mlp_layer_types=["dense"],
        layer_types=["full_attention"],
        attn_implementation="eager",
    )

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = KimiLinearForCausalLM(config).eval().requires_grad_(False)

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(input_ids=ids, use_cache=False).logits

    return Logits(), (torch.arange(3, 9).view(1, 6),), {}


def test_unknown_names_are_usage_errors_with_the_nearest(near_miss: Callable[[str], Path], tmp_path: Path) -> None:
    directory = near_miss("relu")
    with pytest.raises(UsageError, match="did you mean 'fuse-sparse-attention'"):
        explain(directory, rule="fuse-sparse-atention")
    with pytest.raises(UsageError, match="nearest names are matmul"):
        explain(directory, node="matmull")
    with pytest.raises(UsageError, match=r"holds no remarks\.jsonl"):
        explain(tmp_path)


def test_a_node_that_no_rule_came_near(near_miss: Callable[[str], Path]) -> None:
    assert explain(near_miss("relu"), node="scatter") == []


def test_the_command(near_miss: Callable[[str], Path]) -> None:
    directory = near_miss("relu")
    done = CliRunner().invoke(make_app(), ["explain", str(directory), "--rule", "fuse-lightning-indexer"])
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert done.exit_code == 0
    assert lines[0] == "fuse-lightning-indexer: 0 matched, 1 came near"
    assert "near miss at topk" in lines and "did not match expected relu, found aten.matmul" in lines
    assert "node matmul" in lines and any(line.startswith("to match put relu") for line in lines)
    done = CliRunner().invoke(make_app(), ["explain", str(directory), "--json"])
    rules = {rule["rule"]: rule for rule in json.loads(done.stdout)["rules"]}
    assert rules["fuse-lightning-indexer"]["sites"][0]["node"] == "matmul"
    unknown = CliRunner().invoke(make_app(), ["explain", str(directory), "--node", "nowhere_at_all"])
    assert unknown.exit_code == 2 and unknown.stdout == ""
