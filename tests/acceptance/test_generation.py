"""Generation from a directory: real programs, against the models themselves and through the command line."""

import json
import subprocess
import sys
from collections.abc import Generator as Generating
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import kimigraph
from kimigraph.capture.load import MODEL_TYPES
from kimigraph.cli.app import make_app
from kimigraph.generator import Generator
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.runtime.generation import PagedSlots, Sampling
from kimigraph.runtime.sequence import PoolExhaustedError

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "k31_tiny"
FOUND = {
    "kimi_k3": {"raise-kda": 3, "fuse-sparse-attention": 1},
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


@pytest.mark.parametrize(
    "family", ["kimi_k3", "kimi_linear", pytest.param("glm_moe_dsa", marks=pytest.mark.slow), "glm5_next"]
)
def test_generation_is_the_model_s_own(family: str) -> None:
    (row,) = measured("--family", family, "--size", "tiny", "--seeds", "1", "--steps", "8")
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


def test_prompts_of_every_length_take_the_same_programs(generator: Generator) -> None:
    """Read in pieces, each gives the token that it gives read token by token."""
    prompt = torch.randint(3, 256, (39,), generator=torch.Generator().manual_seed(4)).tolist()
    wanted = [int(logits.argmax()) for logits in logits_of(generator, prompt)]
    for length in range(1, 40):
        (done,) = generator.generate([prompt[:length]], Sampling(max_new_tokens=1, stop_ids=()))
        assert done.tokens == (wanted[length - 1],), length
    assert set(generator.programs.reports) == {(1, 1), (3, 1), (1, 8)}


def test_all_programs_together_hold_each_weight_once(generator: Generator) -> None:
    """Programs take some weights side by side, each in its own way: at most 1.1 times the checkpoint in all."""
    programs = generator.programs
    tensors = [tensor for key in programs.reports for tensor in programs.executor(*key).bound.values()]
    places = [tensor.untyped_storage() for tensor in (*tensors, *programs.weights.values())]
    storages = {place.data_ptr(): place.nbytes() for place in places}
    size = sum(tensor.nbytes for tensor in programs.weights.values())
    assert size <= sum(storages.values()) <= 1.1 * size


@pytest.fixture(scope="module")
def paged(tmp_path_factory: pytest.TempPathFactory) -> Generating[Generator]:
    """The same model over pages, too few for three sequences of full length; free ones are NaN."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIMIGRAPH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        layers = (("num_hidden_layers", "4"),)
        config = CompileConfig(
            target="cpu:reference", context=40, overrides=layers, cache_layout="paged", page_size=8, pages=9
        )
        made = kimigraph.Generator(EXAMPLE, config=config, max_batch=3, batches=(1, 3), chunks=(8,), debug=True)
        made.prepare()
        yield made


def logits_of(generator: Generator, prompt: list[int]) -> list[torch.Tensor]:
    """The logits of every step of a prompt that is read token by token in the staging place."""
    slots, found = generator.engine.slots, list[torch.Tensor]()
    slots.begin(len(prompt))
    for place, token in enumerate(prompt):
        found.append(generator.programs.step(1, 1, slots.staging)([[token]], [place]).clone())
        slots.read(1)
    slots.abandon()
    return found


def test_pages_and_forks_say_what_rows_say(generator: Generator, paged: Generator) -> None:
    """A small pool, sequences that wait for pages, forks of running ones: the tokens are those over plain rows."""
    sampling = Sampling(max_new_tokens=6, stop_ids=())
    wanted = generator.generate(PROMPTS, sampling)
    assert paged.generate(PROMPTS, sampling) == wanted
    assert isinstance(paged.engine.slots, PagedSlots)
    for each in (generator, paged):
        number, made = each.submit(PROMPTS[1], sampling), dict[int, list[int]]()
        forks: list[int] = []
        while each.engine.busy:
            for event in each.step():
                made.setdefault(event.number, []).append(event.token or 0)
            if len(made.get(number, [])) in (2, 4) and len(forks) < 2:
                forks.append(each.fork(number))
        assert tuple(made[number]) == wanted[1].tokens
        assert all(tuple(made[fork]) == wanted[1].tokens[-len(made[fork]) :] for fork in forks) and len(forks) == 2
    assert paged.engine.slots.cache.free_pages == 9


def test_exhaustion_loses_no_sequence(generator: Generator, paged: Generator) -> None:
    """Forks until slots or pages run out: the error says what is short, and every sequence ends as it does alone."""
    sampling = Sampling(max_new_tokens=6, stop_ids=())
    wanted = [done.tokens for done in generator.generate(PROMPTS, sampling)]
    for each, what in ((generator, "slot"), (paged, "page")):
        long = Sampling(max_new_tokens=24, stop_ids=())
        numbers = [each.submit(prompt, sampling) for prompt in PROMPTS]
        made: dict[int, list[int]] = {number: [] for number in numbers}
        told = 0
        while each.engine.busy:
            for event in each.step():
                made.setdefault(event.number, []).append(event.token or 0)
            running = [number for number in numbers if made[number] and len(made[number]) < 6]
            for number in running:
                try:
                    each.abort(each.fork(number, long))
                except PoolExhaustedError as error:
                    assert what in str(error) or "slot" in str(error)
                    told += 1
        assert told and [tuple(made[number]) for number in numbers] == wanted


@pytest.mark.parametrize("fixture", ["generator", "paged"])
def test_neighbours_in_the_same_program_change_nothing(fixture: str, request: pytest.FixtureRequest) -> None:
    """A row of a batch of three: beside padded rows, and beside sequences of other tokens. Rows of one expert are one
    product in the references, so that sums may round otherwise."""
    made: Generator = request.getfixturevalue(fixture)
    slots, found = made.engine.slots, list[list[torch.Tensor]]()
    for neighbours in ([], [PROMPTS[1], PROMPTS[2]]):
        seats = []
        for prompt in (PROMPTS[0][:1], *neighbours):
            slots.begin(16)
            made.programs.step(1, 1, slots.staging)([prompt[:1]], [0])
            slots.read(1)
            seats.append(slots.seat())
        assert seats[0] == 0
        step, logits = made.programs.step(3, 1, slots.first(3)), list[torch.Tensor]()
        for place, token in enumerate(PROMPTS[2][:6], 1):
            others = [[prompt[place]] for prompt in neighbours] or [[0], [0]]
            lengths = [place] * 3 if neighbours else [place, 0, 0]
            logits.append(step([[token], *others], lengths)[0].clone())
            slots.step(seats)
        for seat in seats:
            slots.free(seat)
        found.append(logits)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        assert one.argmax() == other.argmax()


def test_pages_of_any_places_and_histories_give_the_same_bits(generator: Generator, paged: Generator) -> None:
    prompt, slots = PROMPTS[2], paged.engine.slots
    assert isinstance(slots, PagedSlots)
    first = logits_of(paged, prompt)
    for got, want in zip(first, logits_of(generator, prompt), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for history in PROMPTS:
        paged.generate([history], Sampling(max_new_tokens=3, stop_ids=()))
        kept = slots.cache.new_table()  # pages taken meanwhile move all others
        slots.cache.reserve({kept: 8 * (len(history) % 3 + 1)})
        assert all(torch.equal(got, want) for got, want in zip(logits_of(paged, prompt), first, strict=True))
        slots.cache.free(kept)


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
