"""``kimigraph bench``."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kimigraph.cli.console import print_json, progress
from kimigraph.cli.errors import reports_errors
from kimigraph.ir.errors import UsageError

SUBJECTS = ("kda", "li", "sfa")


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("bench")(reports_errors(_bench))


def _bench(
    subject: Annotated[
        str, typer.Argument(metavar="OP", help="What to time: kda, li (indexer with top-k), sfa (attention).")
    ],
    peers: Annotated[bool, typer.Option("--peers", help="Time public kernels that do the same work, too.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A part or a peer alone: decode, prefill, fla, ...")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the JSON document there.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of lines.")] = False,
) -> None:
    """Time kernels on this machine's GPU, after holding their results against an fp64 reference.

    Calls stand in a CUDA graph and rotate through more input than the L2 cache holds; a time is the median of eleven
    replays. A peer that is not installed is named as such.

    \b
      kimigraph bench kda --peers --out bench/results/kda.json
      kimigraph bench li --peers
    """
    if subject not in SUBJECTS:
        raise UsageError(f"nothing to bench is called {subject!r}: choose {', '.join(SUBJECTS)}")
    chosen = tuple(only or ())
    say = _printer(as_json)
    measure = _bench_kda if subject == "kda" else _bench_selection
    document = measure(subject, peers, chosen, say)
    document["command"] = " ".join(["kimigraph bench", subject, *(["--peers"] if peers else []), *_spelled(chosen)])
    if out is not None:
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print_json(document)


def _printer(as_json: bool) -> Callable[[str], None]:
    return lambda line: typer.echo(line, err=as_json)


def _bench_selection(subject: str, peers: bool, chosen: tuple[str, ...], say: Callable[[str], None]) -> dict[str, Any]:
    from kimigraph.bench import selection
    from kimigraph.bench.peers import ATTENTION_PEERS, INDEXER_PEERS

    known = INDEXER_PEERS if subject == "li" else ATTENTION_PEERS
    for name in chosen:
        if name not in known:
            raise UsageError(f"--only {name}: choose {', '.join(known)}")
    with progress():
        return selection.run(subject, chosen or (known if peers else ()), say)


def _bench_kda(subject: str, peers: bool, chosen: tuple[str, ...], say: Callable[[str], None]) -> dict[str, Any]:
    del subject
    from kimigraph.bench import kda
    from kimigraph.bench.peers import DECODE_PEERS, PREFILL_PEERS

    known = (*dict.fromkeys(DECODE_PEERS + PREFILL_PEERS),)
    for name in chosen:
        if name not in (*known, "decode", "prefill"):
            raise UsageError(f"--only {name}: choose decode, prefill, {', '.join(known)}")
    parts = [name for name in ("decode", "prefill") if name in chosen] or ["decode", "prefill"]
    wanted = [name for name in known if name in chosen] or (known if peers else ())
    with progress():
        return kda.run(wanted, say, decode="decode" in parts, prefill="prefill" in parts)


def _spelled(chosen: tuple[str, ...]) -> list[str]:
    return [f"--only {name}" for name in chosen]
