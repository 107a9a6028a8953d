"""Generation from a directory: real programs, against the models themselves and through the command line."""

import json
import subprocess
import sys
from collections.abc import Generator as Generating
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kimigraph
from kimigraph.capture.load import MODEL_TYPES
from kimigraph.cli.app import make_app
from kimigraph.generator import Generator
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.runtime.generation import Sampling

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "k31_tiny"
FOUND = {
    "kimi_k31": {"raise-kda": 3, "fuse-lightning-indexer": 1, "fuse-sparse-attention": 1},
    "kimi_linear": {"raise-kda": 3},
    "deepseek_v32": {"fuse-lightning-indexer": 2, "fuse-sparse-attention": 2},
    "glm_moe_dsa": {"fuse-lightning-indexer": 2, "fuse-sparse-attention": 3},
    "glm5_next": {"raise-kda": 1, "fuse-lightning-indexer": 1, "fuse-sparse-attention": 1},
}
"""Fusions of a decode step at least, one a layer; a shared index layer of glm_moe_dsa has no indexer of its own."""
PROMPTS = [[5, 6, 7], [9] * 11, [3, 4, 8, 7, 6, 5, 4, 3, 2, 1, 50, 51, 52, 53, 54, 55, 56, 57, 58], [1, 2]]


def measured(*arguments: str) -> list[dict[str, Any]]:
    """What scripts/write_fidelity.py finds, which exits with 1 where anything differs."""
    command = [sys.executable, str(ROOT / "scripts" / "write_fidelity.py"), "--json", *arguments]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout)


def check(row: dict[str, Any]) -> None:
    assert row["tokens"] and max(row["prompt"], row["decode"], row["caches"]) <= 1e-4
    for rule, count in FOUND[row["family"]].items():
        assert row["fusions"]["decode"][rule] >= count, rule
    assert all(counts["fuse-pointwise"] > 5 for counts in row["fusions"].values())


def test_every_model_type_with_a_head_is_measured() -> None:
    assert set(FOUND) == set(MODEL_TYPES) - {"glm5_next_text"}


@pytest.mark.parametrize("family", ["kimi_linear", "glm_moe_dsa", "glm5_next"])
def test_generation_is_the_model_s_own(family: str) -> None:
    (row,) = measured("--family", family, "--seeds", "1", "--steps", "8")
    check(row)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", list(FOUND))
def test_sixty_four_tokens_of_three_seeds_are_the_model_s_own(family: str) -> None:
    for row in measured("--family", family):
        check(row)


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Generating[Generator]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIMIGRAPH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        config = CompileConfig(target="cpu:reference", context=40, overrides=(("num_hidden_layers", "4"),))
        made = kimigraph.Generator(EXAMPLE, config=config, max_batch=3, batches=(1, 3), chunks=(8,))
        made.prepare()
        yield made


def test_a_sequence_alone_is_the_same_in_any_batch(generator: Generator) -> None:
    sampling = Sampling(max_new_tokens=6, stop_ids=())
    drawn = Sampling(max_new_tokens=6, temperature=1.2, top_k=40, seed=3, stop_ids=())
    for each in (sampling, drawn):
        together = generator.generate(PROMPTS, each)
        assert together == generator.generate(PROMPTS, each)
        for place, prompt in enumerate(PROMPTS):
            number = generator.submit(prompt, each, place)
            tokens = list[int]()
            while generator.engine.busy:
                tokens += [
                    event.token for event in generator.step() if event.number == number and event.token is not None
                ]
            assert tuple(tokens) == together[place].tokens
    assert set(generator.programs.reports) == {(1, 1), (3, 1), (1, 8)}


def test_a_stream_that_is_closed_ends_its_sequences(generator: Generator) -> None:
    stream = generator.stream(PROMPTS[:2], Sampling(max_new_tokens=20, stop_ids=()))
    next(stream)
    stream.close()
    generator.step()
    assert not generator.engine.busy


def test_what_cannot_be_a_prompt_is_refused(generator: Generator) -> None:
    with pytest.raises(UsageError, match="tokenizer"):
        generator.generate(["text"])
    with pytest.raises(UsageError, match="vocabulary"):
        generator.generate([[1, 256]])
    with pytest.raises(UsageError, match="larger"):
        generator.generate([[1] * 41])
    assert not generator.engine.busy


def test_the_command_prints_tokens_and_one_document(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimigraph.generator.Generator", lambda *_, **__: generator)
    wanted = generator.generate(PROMPTS[:2], Sampling(max_new_tokens=4, stop_ids=()))

    def run(*arguments: str) -> Any:
        command = ["generate", str(EXAMPLE), "--max-new-tokens", "4", "--no-stop", *arguments]
        ran = CliRunner().invoke(make_app(), command)
        assert ran.exit_code == 0, ran.output
        return ran

    ids = [",".join(map(str, prompt)) for prompt in PROMPTS[:2]]
    one = run("--prompt-ids", ids[0])
    assert one.stdout.split() == [str(token) for token in wanted[0].tokens]
    assert "tokens/s" in one.stderr
    document = json.loads(run("--prompt-ids", ids[0], "--prompt-ids", ids[1], "--json").stdout)
    assert [tuple(item["tokens"]) for item in document["completions"]] == [done.tokens for done in wanted]
    assert [item["finish"] for item in document["completions"]] == ["length", "length"]
    lines = run("--prompt-ids", ids[0], "--prompt-ids", ids[1]).stdout.splitlines()
    assert sorted(lines) == [f"[{n}] " + " ".join(map(str, done.tokens)) for n, done in enumerate(wanted)]


def test_the_command_says_what_is_missing() -> None:
    without = CliRunner().invoke(make_app(), ["generate", str(EXAMPLE)])
    assert without.exit_code == 2 and "--prompt-ids" in without.stderr
    wrong = CliRunner().invoke(make_app(), ["generate", str(EXAMPLE), "--prompt-ids", "1,x"])
    assert wrong.exit_code == 2 and "1,x" in wrong.stderr


def test_a_function_cannot_generate() -> None:
    with pytest.raises(UsageError, match="directory"):
        Generator("package.module:function", config=CompileConfig(target="cpu:reference"))
