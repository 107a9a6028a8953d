"""Drafts verified by models of transformers: greedy tokens are those of plain decoding, whatever the drafts are."""

from collections.abc import Generator as Generating
from pathlib import Path
from typing import Any

import pytest
from scripted_drafts import Known, Scripted
from tiny_configs import MODELS, write_config

from kimigraph.compiler import compile_source
from kimigraph.generator import Generator
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.ir.manifest import Manifest
from kimigraph.runtime.generation import Sampling

CONTEXT, DRAFTS = 32, 3
PROMPTS = [[5, 6, 7], [9, 8, 9, 8, 9], [1, 2]]
GREEDY = Sampling(max_new_tokens=14, stop_ids=())
SMALL = {
    "kimi_linear": {"mlp_layer_types": ["dense", "dense"]},
    "glm5_next": {
        "num_hidden_layers": 1,
        "layer_types": ["indexed_attention"],
        "indexer_types": ["full"],
        "mlp_layer_types": ["dense"],
    },
}
ROWS = {"kimi_linear": 2, "glm5_next": 1, "deepseek_v32": 3, "glm_moe_dsa": 2}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Generating[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIMIGRAPH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def small(directory: Path, family: str) -> str:
    """A model of few layers: what is tested is their caches."""
    fields: dict[str, Any] = SMALL.get(family, {})
    if family == "glm5_next":
        fields = {"text_config": MODELS[family]["text_config"] | fields}
    return write_config(directory, family, **fields)


@pytest.fixture(
    scope="module",
    params=[
        "kimi_linear",
        "glm5_next",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("deepseek_v32", "glm_moe_dsa")),
    ],
)
def speculating(
    cache: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Generator, Known]:
    """The first of DSA models is in test_draft_head.py."""
    source = small(tmp_path_factory.mktemp("model") / "tiny", request.param)
    rows = ROWS[request.param]
    config = CompileConfig(target="cpu:reference", context=CONTEXT)
    generator = Generator(
        source,
        config=config,
        max_batch=rows,
        batches=(rows,),
        chunks=(),
        draft=Scripted({}, "right"),
        draft_tokens=DRAFTS,
    )
    generator.speculation.adaptive = False
    speculation, generator.engine.speculation = generator.engine.speculation, None
    known = {done.prompt: done.tokens for done in generator.generate(PROMPTS, GREEDY)}
    generator.engine.speculation = speculation
    return generator, known


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["right", "wrong", "random", "page", "lapse", "some"])
def test_greedy_tokens_are_those_of_plain_decoding(speculating: tuple[Generator, Known], mode: str) -> None:
    generator, known = speculating
    generator.speculation.draft = Scripted(known, mode, vocabulary=96)
    before = generator.speculation.counts.as_dict()
    assert {done.prompt: done.tokens for done in generator.generate(PROMPTS, GREEDY)} == known
    after = generator.speculation.counts.as_dict()
    counts = {name: after[name] - before[name] for name in ("drafted", "accepted", "rounds", "plain")}
    if mode == "some" and generator.engine.slots.slots == 1:
        assert counts["rounds"] == 0, "the only slot is one that gets no drafts"
        return
    assert counts["rounds"] > 3
    assert mode != "right" or counts["accepted"] > 0.8 * counts["drafted"], "the last ones lie behind the end"
    assert mode not in ("wrong", "lapse") or counts["accepted"] == 0
    assert mode != "lapse" or counts["plain"] > 3, "plain steps behind rejected drafts"


def test_an_error_between_verification_and_commit_leaves_a_pooled_indexer_as_it_was(
    speculating: tuple[Generator, Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, known = speculating
    prompt = PROMPTS[0]
    generator.speculation.draft = Scripted(known, "wrong", vocabulary=96)
    number = generator.submit(prompt, GREEDY)
    tokens = [event.token for event in generator.step()]
    with monkeypatch.context() as patch:
        patch.setattr(generator.speculation, "_accept", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generator.step()
    generator.speculation.draft = Scripted(known, "some", vocabulary=96)  # plain steps see what is left there
    while generator.engine.busy:
        tokens += [event.token for event in generator.step() if event.number == number]
    assert tuple(tokens) == known[tuple(prompt)]


def test_several_rows_of_a_pooled_indexer_are_refused_at_once(cache: None, tmp_path: Path) -> None:
    source = write_config(tmp_path / "tiny", "glm5_next")
    config = CompileConfig(target="cpu:reference", context=CONTEXT)
    with pytest.raises(UsageError, match=r"indexer pools keys.*--max-batch 1"):
        Generator(source, config=config, max_batch=2, draft="ngram")


@pytest.mark.timeout(600)
def test_compile_makes_the_verifying_step_of_a_public_model(cache: None, tmp_path: Path) -> None:
    source = small(tmp_path / "tiny", "kimi_linear")
    config = CompileConfig(target="cpu:reference", phase="verify", tokens=4, batch=2, context=CONTEXT)
    compile_source(source, [config], tmp_path / "out", lambda text: None)
    manifest = Manifest.read(next(path.parent for path in (tmp_path / "out").rglob("manifest.json")))
    changed = {spec.source.split(".")[0] for spec in manifest.inputs if spec.mutated}
    assert changed == {"cache", "log"}, "no recurrent state is written"
    assert manifest.info["shape_key"] == "verify-b2-t4-c32"
