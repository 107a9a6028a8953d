"""``kimigraph generate``."""

import sys
import time
from typing import Annotated, Any, Literal

import typer

from kimigraph.cli.console import print_json, progress
from kimigraph.cli.errors import reports_errors
from kimigraph.cli.shapes import parse_overrides
from kimigraph.ir import env
from kimigraph.ir.config import TARGETS, CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.ir.mesh import DeviceMesh

MAX_BATCH = 8


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("generate")(reports_errors(_generate))


def _generate(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Directory with config.json and *.safetensors.")],
    prompt_ids: Annotated[
        list[str] | None,
        typer.Option(metavar="IDS", help="Token ids of a prompt, such as 1,2,3. Give several to batch."),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A prompt as text, for a model with a tokenizer.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens to add to each prompt.")] = 16,
    temperature: Annotated[
        float, typer.Option(min=0.0, metavar="T", help="Divides the logits; 0 takes the likeliest token.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, metavar="K", help="Draw among the K likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, metavar="P", help="Draw among the likeliest that reach P together.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, metavar="S", help="Seed of what is drawn.")] = 0,
    stop_id: Annotated[
        list[int] | None, typer.Option(metavar="I", help="End at this token. [default: the model's end of text]")
    ] = None,
    no_stop: Annotated[bool, typer.Option("--no-stop", help="Go on behind the model's end of text.")] = False,
    context: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Most tokens of one sequence. [default: 4096, at most the model's]"),
    ] = None,
    max_batch: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help=f"Sequences that run at once. [default: all, at most {MAX_BATCH}]"),
    ] = None,
    target: Annotated[str, typer.Option("--target", metavar="TARGET", help=f"One of {', '.join(TARGETS)}.")] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Type of weights and activations. [default: the model's, else float32]", show_default=False),
    ] = None,
    opt_level: Annotated[int, typer.Option("-O", min=0, max=3, metavar="LEVEL", help="As for compile.")] = 2,
    disable_pass: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Leave a pass out.")] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Use seeded weights instead of a checkpoint.")
    ] = False,
    set_field: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the model's configuration."),
    ] = None,
    cache_layout: Annotated[
        Literal["model", "paged"], typer.Option(help="Rows of full length, or pages that sequences share.")
    ] = "model",
    pages: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Pages of 64 tokens. [default: for all sequences in full]")
    ] = None,
    cuda_graph: Annotated[bool, typer.Option("--cuda-graph", help="Replay each step as one CUDA graph.")] = False,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE|ngram|mtp",
            help="Guess tokens and verify them together: a smaller model, ngram, or mtp, the model's own layer for it.",
        ),
    ] = None,
    draft_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Most tokens to guess in a step.")] = 4,
    state_log: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Write recurrent states with every N-th token. [default: 6 where it pays, else 1]"
        ),
    ] = None,
    tp: Annotated[
        int, typer.Option("--tp", min=1, metavar="N", help="Processes, one a GPU, that share out heads and widths.")
    ] = 1,
    sp: Annotated[
        int,
        typer.Option(
            "--sp", min=1, metavar="N", help="Times as many processes, which share out each sequence's cache."
        ),
    ] = 1,
    dp: Annotated[
        int, typer.Option("--dp", min=1, metavar="N", help="Replicas, each on its own ranks, that share out prompts.")
    ] = 1,
    pp: Annotated[
        int,
        typer.Option("--pp", min=1, metavar="N", help="Stages of layers, one behind the other, each on --tp ranks."),
    ] = 1,
    micro_batches: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Parts of a step's sequences that go through the stages (--pp) in turn."),
    ] = 1,
    cache: Annotated[Literal["use", "off", "readonly", "refresh"], typer.Option(help="The compile cache.")] = "use",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document when all is done.")] = False,
) -> None:
    """Continue prompts with tokens of the model in SOURCE.

    One prompt is printed as it grows, several as they end; without a tokenizer as token ids. Compiled programs are
    kept in the compile cache.

    \b
      kimigraph generate examples/k31_tiny --prompt-ids 1,2,3 --max-new-tokens 8
      kimigraph generate ./checkpoint --prompt "Once upon a time" --temperature 0.8 --top-p 0.95 --seed 1
      kimigraph generate ./checkpoint --prompt "Once upon a time" --draft ngram --draft-tokens 7
      kimigraph generate ./checkpoint --prompt "Once upon a time" --tp 2
      kimigraph generate ./checkpoint --prompt "Once upon a time" --pp 2 --tp 2
      torchrun --nproc-per-node 2 -m kimigraph generate ./checkpoint --prompt "Once upon a time" --tp 2
    """
    mesh, place = DeviceMesh(dp=dp, pp=pp, sp=sp, tp=tp), (env.started_ranks() or (0, 1))[0]
    _check_ranks(mesh, cache, draft)
    if mesh.size > 1 and env.started_ranks() is None:
        from kimigraph.runtime.parallel.launch import launch

        launch(mesh.size, sys.argv[1:])
        return
    asked: list[str | list[int]] = [*(prompt or []), *map(_ids, prompt_ids or [])]
    if not asked:
        raise UsageError("no prompt was given: use --prompt-ids 1,2,3, or --prompt TEXT with a tokenizer")
    if target == "cpu":
        env.enable_interpreter()  # before the first import of triton, which the next lines may bring
    config = CompileConfig(
        target=target,
        opt_level=opt_level,
        context=context,
        dtype=dtype,
        disabled_passes=tuple(disable_pass or ()),
        random_weights=random_weights,
        overrides=parse_overrides(set_field or []),
        cache=cache,
        cuda_graph=cuda_graph,
        cache_layout=cache_layout,
        pages=pages,
        tp=tp,
        sp=sp,
        pp=pp,
        micro_batches=micro_batches,
    )
    started = time.perf_counter()
    with progress() as notify:
        from kimigraph.generator import Generator
        from kimigraph.runtime.generation import Sampling
        from kimigraph.runtime.parallel import join_ranks, of_all_replicas
        from kimigraph.session import resolve_target

        join_ranks(mesh, resolve_target(target))
        own = asked[mesh.place(place)[0] :: dp] if mesh.size > 1 else asked

        stops = () if no_stop and not stop_id else tuple(stop_id) if stop_id else None
        sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed, stops)
        rows = min(max_batch or MAX_BATCH, max(len(own), 1))
        generator = Generator(
            source,
            config=config,
            max_batch=rows,
            batches=(1, rows),
            draft=draft,
            draft_tokens=draft_tokens,
            state_log=state_log,
            notify=notify,
        )
        prompts = [generator.encode(item) for item in own]
        generator.prepare(map(len, prompts))
    ready = time.perf_counter()
    completions = _run(generator, prompts, sampling, as_json or mesh.size > 1) if own else []
    seconds = {"prepare": ready - started, "generate": time.perf_counter() - ready}
    completions = _in_order(of_all_replicas(completions, mesh.size // dp, dp), len(asked))
    if mesh.size > 1 and place > 0:
        return
    if mesh.size > 1 and not as_json:
        for number, record in enumerate(completions):
            typer.echo(_line(generator, number, record).removeprefix("" if len(asked) > 1 else "[0] "))
    if as_json:
        print_json(_document(source, generator, completions, seconds))
    else:
        typer.echo(_rates(generator, seconds), err=True)


def _in_order(parts: list[list[dict[str, Any]]], count: int) -> list[dict[str, Any]]:
    """The records of all prompts in their order, from those of each replica, which took every so many-th."""
    return [parts[number % len(parts)][number // len(parts)] for number in range(count)]


def _check_ranks(mesh: DeviceMesh, cache: str, draft: str | None) -> None:
    """What several ranks cannot do; UsageError that says what to leave out."""
    told = " ".join(f"--{dim} {size}" for dim, size in mesh.sizes.items() if size > 1 and dim != "dp")
    if mesh.pp > 1 and draft is not None:
        raise UsageError(
            f"{told} with --draft is not possible: leave out one of them, or share out by --tp and --sp alone"
        )
    if mesh.ways > 1 and cache not in ("use", "refresh"):
        raise UsageError(f"{told} with --cache {cache}: ranks take programs from the compile cache; use or refresh it")


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(" ", "").split(",") if part]
    except ValueError:
        raise UsageError(f"--prompt-ids {text}: give token ids with commas between them, such as 1,2,3") from None


def _run(generator: Any, prompts: list[list[int]], sampling: Any, quiet: bool) -> list[dict[str, Any]]:
    """Generate, printing what comes unless ``quiet``; one record for each prompt."""
    records: list[dict[str, Any]] = [{"prompt_ids": ids, "tokens": [], "text": None, "finish": ""} for ids in prompts]
    if len(prompts) == 1 and not quiet:
        growing = _Growing(generator)
        for event in generator.stream(prompts, sampling):
            _note(records[0], event)
            growing.show(event)
    else:
        results = sys.stdout  # which progress() keeps for them
        with progress() as say:
            for event in generator.stream(prompts, sampling):
                _note(records[event.number], event)
                say(f"{generator.engine.made} new tokens")
                if event.finish is not None and not quiet:
                    typer.echo(_line(generator, event.number, records[event.number]), file=results)
    for record in records:
        record["text"] = generator.text(record["tokens"])
    return records


def _note(record: dict[str, Any], event: Any) -> None:
    if event.token is not None:
        record["tokens"].append(event.token)
    record["finish"] = event.finish or ""


def _line(generator: Any, number: int, record: dict[str, Any]) -> str:
    text = generator.text(record["tokens"])
    return f"[{number}] " + (text if text is not None else " ".join(map(str, record["tokens"])))


class _Growing:
    """Prints the tokens of one sequence as they come: as text, or as ids with spaces between them."""

    def __init__(self, generator: Any) -> None:
        self._text = generator.text_stream()
        self._first = True

    def show(self, event: Any) -> None:
        piece = ""
        if self._text is not None:
            piece = self._text.add(event.token) + (self._text.end() if event.finish else "")
        elif event.token is not None:
            piece = str(event.token) if self._first else f" {event.token}"
        typer.echo(piece, nl=event.finish is not None)
        self._first = False


def _document(
    source: str, generator: Any, completions: list[dict[str, Any]], seconds: dict[str, float]
) -> dict[str, Any]:
    return {
        "source": source,
        "target": generator.programs.target,
        "context": generator.context,
        "completions": completions,
        "programs": [
            {"shape_key": report.shape_key, "cache": report.cache["status"], "fusions": report.fusions}
            for report in generator.programs.all_reports()
        ],
        "speculation": _speculation(generator),
        "tokens": {"read": generator.engine.read, "made": generator.engine.made},
        "timing": seconds,
        "tokens_per_second": generator.engine.made / max(seconds["generate"], 1e-9),
    }


def _speculation(generator: Any) -> dict[str, Any] | None:
    """What drafts were worth; ``state_bytes`` are those of recurrent states and their log. None without drafts."""
    rounds = generator.speculation
    if rounds is None:
        return None
    return {"draft_tokens": rounds.drafts, **rounds.counts.as_dict(), "state_bytes": rounds.state_bytes}


def _rates(generator: Any, seconds: dict[str, float]) -> str:
    engine, taken, drafts = generator.engine, seconds["generate"], _speculation(generator)
    told = (
        ""
        if drafts is None
        else (
            f"; {drafts['accepted']} of {drafts['drafted']} drafts were right ({drafts['acceptance']:.0%}), "
            f"{drafts['tokens_per_step']:.2f} tokens a sequence and verifying step"
            + (f", {drafts['speed_up']:.2f} times as fast as plain steps" if drafts["speed_up"] else "")
        )
    )
    return (
        f"{engine.read} prompt tokens and {engine.made} new ones in {taken:.2f} s "
        f"({engine.made / max(taken, 1e-9):.1f} new tokens/s) on {generator.programs.target}; "
        f"ready after {seconds['prepare']:.1f} s{told}"
    )
