"""Speculative decoding of real programs: greedy tokens are those of plain decoding, whatever the drafts are."""

import json
from collections.abc import Generator as Generating
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_drafts import Scripted
from typer.testing import CliRunner

import kimigraph
from kimigraph.cli.app import make_app
from kimigraph.generator import Generator
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.runtime.generation import Sampling

EXAMPLE = Path(__file__).parents[2] / "examples" / "k31_tiny"
CONTEXT, PAGE, DRAFTS = 48, 8, 3
PROMPTS = [[5, 6, 7], [9] * 11, [3, 4, 8, 7, 6, 5, 4, 3, 2, 1, 50, 51, 52, 53], [1, 2]]
GREEDY = Sampling(max_new_tokens=26, stop_ids=())
LAYERS = (
    ("num_hidden_layers", "3"),
    ("linear_attn_config.kda_layers", "[1, 3]"),
    ("linear_attn_config.full_attn_layers", "[2]"),
)
"""A recurrent layer behind sparse attention behind a recurrent one."""
MODES = ("right", "wrong", "random", "page", "short", "lapse", "some")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Generating[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIMIGRAPH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def made(rows: int, drafts: int, **layout: Any) -> Generator:
    config = CompileConfig(target="cpu:reference", context=CONTEXT, overrides=LAYERS, **layout)
    options: dict[str, Any] = {"debug": bool(layout), "draft": Scripted({}, "right"), "draft_tokens": drafts}
    return Generator(EXAMPLE, config=config, max_batch=rows, batches=(rows,), chunks=(8,), **options)


def plainly(generator: Generator, sampling: Sampling = GREEDY) -> dict[tuple[int, ...], tuple[int, ...]]:
    """What each prompt goes on with in plain steps of the same programs."""
    speculation, generator.engine.speculation = generator.engine.speculation, None
    found = {done.prompt: done.tokens for done in generator.generate(PROMPTS, sampling)}
    generator.engine.speculation = speculation
    return found


@pytest.fixture(scope="module", params=["model", "paged"])
def speculating(
    cache: None, request: pytest.FixtureRequest
) -> tuple[Generator, dict[tuple[int, ...], tuple[int, ...]]]:
    layout = {"cache_layout": "paged", "page_size": PAGE} if request.param == "paged" else {}
    generator = made(3, DRAFTS, **layout)
    generator.speculation.adaptive = False  # so that every round has all drafts of the mode
    return generator, plainly(generator)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_are_those_of_plain_decoding(speculating: Any, mode: str) -> None:
    """Four prompts in three slots, so that one is used again; over pages too, of which free ones are NaN."""
    generator, known = speculating
    generator.speculation.draft = Scripted(known, mode)
    before = generator.speculation.counts.as_dict()
    assert {done.prompt: done.tokens for done in generator.generate(PROMPTS, GREEDY)} == known
    after = generator.speculation.counts.as_dict()
    counts = {name: after[name] - before[name] for name in ("drafted", "accepted", "made", "rows")}
    share = counts["accepted"] / counts["drafted"]
    if mode in ("right", "short", "some"):
        assert share > 0.9, "the last drafts of a sequence lie behind its end"
    assert mode not in ("wrong", "lapse") or counts["accepted"] == 0
    assert mode not in ("random", "page") or 0.2 < share < 0.9
    assert counts["made"] == counts["accepted"] + counts["rows"]


def running(generator: Generator, prompt: list[int], written: int) -> tuple[int, dict[str, torch.Tensor]]:
    """Begin a prompt and step until at least so many tokens are in the caches; how many are, and copies of its row."""
    number = generator.submit(prompt, GREEDY)
    while generator.engine.requests[0].written < written:
        generator.step()
    [request] = generator.engine.requests
    row = {name: tensor[0].clone() for name, tensor in generator.engine.slots.first(1).items()}
    generator.abort(number)
    generator.step()
    return request.written, row


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["random", "short", "page"])
def test_states_and_caches_behind_rounds_are_those_of_plain_steps(speculating: Any, mode: str) -> None:
    """Partly accepted drafts leave nothing in any layer, also none that reads what another one made of them."""
    generator, known = speculating
    prompt = PROMPTS[0]
    generator.speculation.draft = Scripted(known, mode)
    written, found = running(generator, prompt, len(prompt) + 18)
    speculation, generator.engine.speculation = generator.engine.speculation, None
    same, wanted = running(generator, prompt, written)
    generator.engine.speculation = speculation
    assert same == written
    states = [name for name in wanted if name.startswith("state.")]
    assert {name.split(".")[1] for name in states} == {"0", "2"}
    for name in states:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=1e-5)
    if generator.programs.config.cache_layout == "model":
        for name in (name for name in wanted if name.startswith("cache.")):
            torch.testing.assert_close(found[name][:written], wanted[name][:written], rtol=1e-4, atol=1e-5)


@pytest.mark.timeout(600)
def test_all_drafts_are_accepted_up_to_the_end_of_a_page(speculating: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, _ = speculating
    prompt, plain = [4, 3, 2, 1], generator.engine.speculation
    generator.engine.speculation = None
    [done] = generator.generate([prompt], GREEDY)
    generator.engine.speculation = plain
    generator.speculation.draft = Scripted({tuple(prompt): done.tokens}, "right")
    number, ends, tokens = generator.submit(prompt, GREEDY), [], []
    while generator.engine.busy:
        before = generator.speculation.counts.accepted
        tokens += [event.token for event in generator.step() if event.number == number]
        if generator.engine.requests and generator.speculation.counts.accepted - before == DRAFTS:
            ends.append(generator.engine.requests[0].written)
    assert tuple(tokens) == done.tokens
    assert sum(end % PAGE == 0 for end in ends) >= 2


@pytest.mark.timeout(600)
def test_rows_without_a_sequence_stay_without_tokens(speculating: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences in a program of three rows: counts, lengths and states of the third stay."""
    generator, known = speculating
    generator.speculation.draft = Scripted(known, "random")
    rollback, programs = generator.speculation._rollback, generator.programs
    counts, lengths = [], []
    commit, verify = rollback.commit, programs.verify

    def watched(rows: int, tokens: int, caches: Any) -> Any:
        def step(ids: list[list[int]], written: list[int]) -> Any:
            lengths.append(written)
            return verify(rows, tokens, caches)(ids, written)

        return step

    monkeypatch.setattr(rollback, "commit", lambda found: (counts.append(found.tolist()), commit(found)))
    monkeypatch.setattr(programs, "verify", watched)
    before = {name: tensor[2].clone() for name, tensor in rollback.states.items()}
    found = generator.generate(PROMPTS[:2], GREEDY)
    assert {done.prompt: done.tokens for done in found} == {tuple(one): known[tuple(one)] for one in PROMPTS[:2]}
    assert len(counts) == len(lengths) > 5
    assert all(len(row) == 3 and row[2] == 0 < row[0] for row in (*counts,)), "one count a sequence, not a token"
    assert all(row[2] == 0 for row in lengths)
    assert all(torch.equal(tensor[2], before[name]) for name, tensor in rollback.states.items())


@pytest.mark.timeout(600)
def test_sequences_whose_drafts_are_wrong_get_fewer(speculating: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, known = speculating
    monkeypatch.setattr(generator.speculation, "adaptive", True)
    generator.speculation.draft = Scripted(known, "wrong")
    before = generator.speculation.counts.drafted
    assert {done.prompt: done.tokens for done in generator.generate(PROMPTS, GREEDY)} == known
    assert generator.speculation.counts.drafted - before < len(PROMPTS) * 26


@pytest.mark.timeout(600)
def test_the_end_of_the_context_is_reached_as_in_plain_decoding(speculating: Any) -> None:
    generator, _ = speculating
    sampling = Sampling(max_new_tokens=200, stop_ids=())
    known = plainly(generator, sampling)
    generator.speculation.draft = Scripted(known, "right")
    found = generator.generate(PROMPTS, sampling)
    assert {done.prompt: done.tokens for done in found} == known
    assert {done.finish for done in found} == {"context"}


@pytest.mark.timeout(600)
def test_an_error_between_verification_and_commit_leaves_every_sequence_as_it_was(
    speculating: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, known = speculating
    generator.speculation.draft = Scripted(known, "right")
    numbers = [generator.submit(prompt, GREEDY, place) for place, prompt in enumerate(PROMPTS)]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    rounds = 0
    while generator.engine.busy:
        rounds += 1
        if rounds % 3 == 2:
            with monkeypatch.context() as patch:
                patch.setattr(generator.speculation, "_accept", lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    generator.step()
        for event in generator.step():
            tokens[event.number].append(event.token)
    assert [tuple(tokens[number]) for number in numbers] == [known[tuple(prompt)] for prompt in PROMPTS]


@pytest.mark.timeout(600)
def test_aborted_and_forked_sequences_leave_the_others_alone(speculating: Any) -> None:
    generator, known = speculating
    generator.speculation.draft = Scripted(known, "page")
    first, second = generator.submit(PROMPTS[0], GREEDY), generator.submit(PROMPTS[1], GREEDY)
    tokens: dict[int, list[int]] = {first: [], second: []}
    fork = None
    while generator.engine.busy:
        for event in generator.step():
            if event.token is not None:
                tokens[event.number].append(event.token)
        if fork is None and len(tokens[first]) > 5:
            fork = generator.fork(first)
            tokens[fork] = list(tokens[first])
            assert generator.abort(second)
    assert tuple(tokens[first]) == tuple(tokens[fork]) == known[tuple(PROMPTS[0])]
    assert tuple(tokens[second]) == known[tuple(PROMPTS[1])][: len(tokens[second])]


@pytest.mark.timeout(600)
def test_drawn_sequences_do_not_touch_greedy_ones_and_repeat(speculating: Any) -> None:
    generator, known = speculating
    generator.speculation.draft = Scripted(known, "right")
    drawn = Sampling(max_new_tokens=20, temperature=1.0, top_p=0.9, seed=4, stop_ids=())
    samplings = [GREEDY, drawn, GREEDY, drawn]
    found = generator.generate(PROMPTS, samplings)
    assert [found[place].tokens for place in (0, 2)] == [known[tuple(PROMPTS[place])] for place in (0, 2)]
    assert generator.generate(PROMPTS, samplings) == found


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("rows", "drafts"), [(1, 1), (1, 8), (2, 2), (4, 5), (8, 7)])
@pytest.mark.parametrize("mode", ["right", "wrong", "random"])
def test_greedy_tokens_in_batches_of_one_to_eight(cache: None, rows: int, drafts: int, mode: str) -> None:
    generator = made(rows, drafts)
    known = plainly(generator)
    generator.speculation.draft = Scripted(known, mode)
    assert {done.prompt: done.tokens for done in generator.generate(PROMPTS, GREEDY)} == known


@pytest.mark.timeout(900)
@pytest.mark.parametrize("draft", ["ngram", pytest.param(str(EXAMPLE), marks=pytest.mark.slow)])
def test_the_command_tells_what_drafts_were_worth(cache: None, draft: str) -> None:
    command = ["generate", str(EXAMPLE), "--prompt-ids", "9,9,9,9,9,9,9,9", "--max-new-tokens", "12", "--no-stop"]
    command += ["--context", str(CONTEXT), "--target", "cpu:reference", "--set", "num_hidden_layers=4", "--json"]
    runner, app = CliRunner(), make_app()
    plain = runner.invoke(app, command, catch_exceptions=False)
    drafted = runner.invoke(app, [*command, "--draft", draft, "--draft-tokens", "3"], catch_exceptions=False)
    plain_document, document = json.loads(plain.stdout), json.loads(drafted.stdout)
    assert plain_document["speculation"] is None
    assert document["completions"] == plain_document["completions"]
    told = document["speculation"]
    assert told["draft_tokens"] == 3 and told["made"] == told["accepted"] + told["rows"]
    assert told["acceptance"] == told["accepted"] / max(told["drafted"], 1)
    assert (told["speed_up"] is None) == (not told["rounds"] or not told["plain"])
    if draft != "ngram":
        assert told["rounds"] > 0


def test_drafts_that_cannot_be_are_refused(cache: None, tmp_path: Path) -> None:
    config = CompileConfig(target="cpu:reference", context=CONTEXT, overrides=LAYERS)
    with pytest.raises(UsageError, match="draft_tokens is 0"):
        kimigraph.Generator(EXAMPLE, config=config, draft="ngram", draft_tokens=0)
    document = json.loads((EXAMPLE / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(document | {"vocab_size": 128}))
    with pytest.raises(UsageError, match="same vocabulary"):
        kimigraph.Generator(EXAMPLE, config=config, draft=tmp_path)
