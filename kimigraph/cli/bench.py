"""``kimigraph bench``."""

import json
from pathlib import Path
from typing import Annotated

import typer

from kimigraph.cli.console import print_json, progress
from kimigraph.cli.errors import reports_errors
from kimigraph.ir.errors import UsageError

SUBJECTS = ("kda",)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("bench")(reports_errors(_bench))


def _bench(
    subject: Annotated[str, typer.Argument(metavar="OP", help="What to time: kda (decode step and prefill).")],
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
    """
    if subject not in SUBJECTS:
        raise UsageError(f"nothing to bench is called {subject!r}: choose {', '.join(SUBJECTS)}")
    chosen = tuple(only or ())
    from kimigraph.bench import kda
    from kimigraph.bench.peers import DECODE_PEERS, PREFILL_PEERS

    known = (*dict.fromkeys(DECODE_PEERS + PREFILL_PEERS),)
    for name in chosen:
        if name not in (*known, "decode", "prefill"):
            raise UsageError(f"--only {name}: choose decode, prefill, {', '.join(known)}")
    parts = [name for name in ("decode", "prefill") if name in chosen] or ["decode", "prefill"]
    wanted = [name for name in known if name in chosen] or (known if peers else ())
    with progress():
        document = kda.run(
            wanted, lambda line: typer.echo(line, err=as_json), decode="decode" in parts, prefill="prefill" in parts
        )
    document["command"] = " ".join(["kimigraph bench", subject, *(["--peers"] if peers else []), *_spelled(chosen)])
    if out is not None:
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print_json(document)


def _spelled(chosen: tuple[str, ...]) -> list[str]:
    return [f"--only {name}" for name in chosen]
