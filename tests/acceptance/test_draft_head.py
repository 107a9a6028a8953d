"""Drafts of a checkpoint's multi-token-prediction layer, against the layer run eagerly over the whole sequence."""

import copy
import json
from collections.abc import Generator as Generating
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from scripted_drafts import Known, Scripted
from tiny_configs import MODELS
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modelling
from typer.testing import CliRunner

from kimigraph.capture import load_source
from kimigraph.cli.app import make_app
from kimigraph.generator import Generator
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.runtime.generation import Request, Sampling

CONTEXT, DRAFTS, ROWS, LAYER = 40, 3, 2, 1
PROMPTS = [[5, 6, 7, 8, 9], [9, 8, 7], [11, 12]]
GREEDY = Sampling(max_new_tokens=18, stop_ids=())
DOCUMENT: dict[str, Any] = MODELS["deepseek_v32"] | {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 1,
    "mlp_layer_types": ["dense"],
    "num_nextn_predict_layers": 1,
}
"""More tokens than the indexer's 8 picks, so that the layer's own picks count."""


class Eager(nn.Module):
    """The model and the layer behind its last one, of transformers' own parts; no caches."""

    def __init__(self) -> None:
        super().__init__()
        fields = {key: value for key, value in DOCUMENT.items() if key not in ("model_type", "random_weights")}
        config = AutoConfig.for_model("deepseek_v32", **fields)
        config._attn_implementation = "sdpa"
        config._experts_implementation = "batched_mm"
        longer = copy.deepcopy(config)
        longer.num_hidden_layers, longer.mlp_layer_types = 2, ["dense", "sparse"]
        longer.layer_types = ["indexed_attention"] * 2
        self.model = modelling.DeepseekV32ForCausalLM(config)
        self.layer = modelling.DeepseekV32DecoderLayer(longer, LAYER)
        size = config.hidden_size
        self.enorm, self.hnorm, self.norm = (modelling.DeepseekV32RMSNorm(size) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(3)
        for name, tensor in self.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            scaled = noise * tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 1 + 0.1 * noise
            small = 0.4 if "o_proj" in name or "down_proj" in name else 1.0
            tensor.copy_(small * (0.1 * noise if "bias" in name else scaled))
        # Both guess mostly by the last token alone, so that some guesses agree.
        self.eh_proj.weight.mul_(0.3)[:, :size] += torch.eye(size)
        self.model.model.embed_tokens.weight.mul_(8)

    def hidden(self, ids: list[int]) -> Tensor:
        return self.model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state

    def drafts(self, ids: list[int], count: int) -> list[int]:
        """What the layer makes of a sequence whose last token the model has not taken yet."""
        hidden, behind = self.hidden(ids[:-1]), ids[1:]
        for _ in range(count):
            embedded = self.model.model.embed_tokens(torch.tensor([behind]))
            mixed = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
            places = torch.arange(len(behind)).unsqueeze(0)
            made = self.layer(
                mixed,
                attention_mask=torch.ones(len(behind), len(behind), dtype=torch.bool).tril()[None, None],
                position_ids=places,
                position_embeddings=self.model.model.rotary_emb(mixed, position_ids=places),
            )
            made = self.norm(made)
            behind = [*behind, int(self.model.lm_head(made[:, -1]).argmax())]
            hidden = torch.cat([hidden, made[:, -1:]], dim=1)
        return behind[-count:]

    def published(self) -> dict[str, Tensor]:
        """The checkpoint: experts one by one, embedding and head a second time in the layer, as published."""
        tensors = dict(self.model.state_dict())
        for name, tensor in self.layer.state_dict().items():
            if "experts." not in name or "shared" in name:
                tensors[f"model.layers.{LAYER}.{name}"] = tensor
                continue
            parts = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            for number, one in enumerate(tensor):
                for part, rows in zip(parts, one.chunk(len(parts)), strict=True):
                    tensors[f"model.layers.{LAYER}.mlp.experts.{number}.{part}.weight"] = rows
        beside = {
            "enorm.weight": self.enorm.weight,
            "hnorm.weight": self.hnorm.weight,
            "eh_proj.weight": self.eh_proj.weight,
            "shared_head.norm.weight": self.norm.weight,
            "shared_head.head.weight": self.model.lm_head.weight,
            "embed_tokens.weight": self.model.model.embed_tokens.weight,
        }
        tensors |= {f"model.layers.{LAYER}.{name}": tensor for name, tensor in beside.items()}
        return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def eager() -> Eager:
    return Eager()


@pytest.fixture(scope="module")
def checkpoint(eager: Eager, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps({k: v for k, v in DOCUMENT.items() if k != "random_weights"}))
    save_file(eager.published(), directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Generating[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIMIGRAPH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def made(checkpoint: Path, **layout: Any) -> Generator:
    config = CompileConfig(target="cpu:reference", context=CONTEXT, **layout)
    options: dict[str, Any] = {"debug": bool(layout), "draft": "mtp", "draft_tokens": DRAFTS}
    generator = Generator(checkpoint, config=config, max_batch=ROWS, batches=(ROWS,), chunks=(4,), **options)
    generator.speculation.adaptive = False
    return generator


@pytest.fixture(scope="module")
def speculating(cache: None, checkpoint: Path) -> tuple[Generator, Known]:
    generator = made(checkpoint)
    return generator, plainly(generator)


def plainly(generator: Generator) -> Known:
    speculation, generator.engine.speculation = generator.engine.speculation, None
    known = {done.prompt: done.tokens for done in generator.generate(PROMPTS, GREEDY)}
    generator.engine.speculation = speculation
    return known


def watched(generator: Generator, patch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Sequences and what was proposed behind them, as it comes."""
    draft, seen = generator.speculation.draft, list[tuple[list[int], list[int]]]()
    propose = draft.propose

    def noting(rows: int, running: dict[int, Request], tokens: int) -> dict[int, list[int]]:
        found = propose(rows, running, tokens)
        seen.extend((running[slot].ids(0, running[slot].length), drafts) for slot, drafts in found.items())
        return found

    patch.setattr(draft, "propose", noting)
    return seen


@pytest.mark.timeout(600)
def test_drafts_are_those_of_the_layer_over_the_whole_sequence(
    speculating: Any, eager: Eager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three prompts in two slots; rounds that keep none, some and all of their drafts."""
    generator, known = speculating
    assert known == {tuple(prompt): greedily(eager, prompt) for prompt in PROMPTS}
    seen = watched(generator, monkeypatch)
    before = generator.speculation.counts.as_dict()
    assert {done.prompt: done.tokens for done in generator.generate(PROMPTS, GREEDY)} == known
    assert len(seen) > 10
    for ids, drafts in seen:
        assert drafts == eager.drafts(ids, DRAFTS)
    after = generator.speculation.counts.as_dict()
    share = (after["accepted"] - before["accepted"]) / (after["drafted"] - before["drafted"])
    assert 0.2 < share < 0.95


def greedily(eager: Eager, prompt: list[int]) -> tuple[int, ...]:
    ids = list(prompt)
    for _ in range(GREEDY.max_new_tokens):
        ids.append(int(eager.model.lm_head(eager.hidden(ids)[:, -1]).argmax()))
    return tuple(ids[len(prompt) :])


def test_plain_steps_forks_and_errors_in_between_are_taken_in(
    speculating: Any, eager: Eager, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, known = speculating
    seen = watched(generator, monkeypatch)
    speculation, prompt = generator.speculation, PROMPTS[0]
    first, fork = generator.submit(prompt, GREEDY), None
    tokens: dict[int, list[int]] = {first: []}
    rounds = 0
    while generator.engine.busy:
        rounds += 1
        with monkeypatch.context() as patch:
            if 2 <= rounds <= 7:  # more plain steps than hidden states wait for
                patch.setattr(speculation, "round", lambda *_: None)
            if rounds == 9:
                patch.setattr(speculation, "_accept", lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    generator.step()
                continue
            for event in generator.step():
                tokens[event.number].append(event.token)
        if rounds == 5:
            fork = generator.fork(first)
            tokens[fork] = list(tokens[first])
    assert tuple(tokens[first]) == tuple(tokens[fork]) == known[tuple(prompt)]
    assert len(seen) > 4
    for ids, drafts in seen:
        assert drafts == eager.drafts(ids, len(drafts))


def test_sequences_near_the_end_of_the_context_take_plain_steps(speculating: Any, eager: Eager) -> None:
    """One is at the end, where no drafts fit, while others have more hidden states waiting than fit a step."""
    generator, _ = speculating
    prompts, sampling = [PROMPTS[0] * 6, PROMPTS[1] * 7], Sampling(max_new_tokens=30, stop_ids=())
    speculation, generator.engine.speculation = generator.engine.speculation, None
    known = [done.tokens for done in generator.generate(prompts, sampling)]
    generator.engine.speculation = speculation
    found = generator.generate(prompts, sampling)
    assert [done.tokens for done in found] == known
    assert {done.finish for done in found} == {"context"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["right", "wrong", "random", "page", "lapse", "some"])
def test_greedy_tokens_are_those_of_plain_decoding(
    speculating: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, known = speculating
    monkeypatch.setattr(generator.speculation, "draft", Scripted(known, mode, vocabulary=96))
    assert {done.prompt: done.tokens for done in generator.generate(PROMPTS, GREEDY)} == known


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pages_and_a_single_draft_change_nothing(cache: None, checkpoint: Path, eager: Eager) -> None:
    generator = made(checkpoint, cache_layout="paged", page_size=8)
    with pytest.MonkeyPatch.context() as patch:
        seen = watched(generator, patch)
        found = {done.prompt: done.tokens for done in generator.generate(PROMPTS, GREEDY)}
    assert found == {tuple(prompt): greedily(eager, prompt) for prompt in PROMPTS}
    assert all(drafts == eager.drafts(ids, DRAFTS) for ids, drafts in seen)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_the_command_takes_the_layer_of_either_family(cache: None, tmp_path: Path, family: str) -> None:
    document = MODELS[family] | {"model_type": family, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(document))
    command = ["generate", str(tmp_path), "--prompt-ids", "9,9,9,9", "--max-new-tokens", "9", "--no-stop", "--json"]
    command += ["--context", str(CONTEXT), "--target", "cpu:reference"]
    runner, app = CliRunner(), make_app()
    plain = json.loads(runner.invoke(app, command, catch_exceptions=False).stdout)
    found = json.loads(runner.invoke(app, [*command, "--draft", "mtp"], catch_exceptions=False).stdout)
    assert found["completions"] == plain["completions"]
    assert found["speculation"]["rounds"] > 0


def test_the_eager_model_leaves_the_layer_s_weights_alone(checkpoint: Path, eager: Eager) -> None:
    source = load_source(str(checkpoint), CompileConfig(context=CONTEXT))
    state = source.loaded.module.state_dict()
    assert not [name for name in state if f"layers.{LAYER}." in name]
    assert torch.equal(state["model.lm_head.weight"], eager.model.lm_head.weight)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("deepseek_v32", {}, "num_nextn_predict_layers is 0"),
        ("kimi_linear", {"num_nextn_predict_layers": 1}, "the draft mtp is for deepseek_v32 and glm_moe_dsa"),
        ("kimi_k31", {}, "checkpoints of kimi_k31 have no layer for the draft mtp"),
    ],
)
def test_a_model_without_such_a_layer_is_refused(
    tmp_path: Path, family: str, fields: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[family] | {"model_type": family} | fields))
    with pytest.raises(UsageError, match=message):
        Generator(tmp_path, config=CompileConfig(target="cpu:reference", context=CONTEXT), draft="mtp")
