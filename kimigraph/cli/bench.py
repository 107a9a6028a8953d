"""``kimigraph bench``."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kimigraph.cli.console import print_json, progress
from kimigraph.cli.errors import reports_errors
from kimigraph.ir.errors import UsageError

SUBJECTS = (
    "attnres", "dsa", "kda", "kda-logged", "li", "li-mxfp8", "moe", "pointwise", "prolog", "quantize", "rollback",
    "sfa",
)  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("bench")(reports_errors(_bench))


def _bench(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="OP",
            help="What to time: attnres (attention residuals), dsa (indexer and attention), kda, kda-logged (states "
            "written with every sixth token), li (indexer with top-k), li-mxfp8 (the same over MXFP8 keys), moe "
            "(routed experts), pointwise (generated kernels), prolog (merged products, and an indexer's prolog), "
            "quantize, rollback (drafts verified and committed), sfa.",
        ),
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
    measure = {
        "attnres": _bench_residuals,
        "dsa": _bench_dsa,
        "kda": _bench_kda,
        "li-mxfp8": _bench_group_indexer,
        "pointwise": _bench_pointwise,
        "moe": _bench_moe,
        "prolog": _bench_prolog,
        "quantize": _bench_quantize,
        "kda-logged": _bench_states,
        "rollback": _bench_states,
    }.get(subject, _bench_selection)
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
    from kimigraph.bench.peers import ATTENTION_PEERS, INDEXER_PEERS, PREFILL_INDEXER_PEERS, SLOW_PEERS

    known = (*INDEXER_PEERS, *PREFILL_INDEXER_PEERS) if subject == "li" else ATTENTION_PEERS
    for name in chosen:
        if name not in known:
            raise UsageError(f"--only {name}: choose {', '.join(known)}")
    with progress():
        usual = tuple(name for name in known if name not in SLOW_PEERS)
        return selection.run(subject, chosen or (usual if peers else ()), say)


def _bench_residuals(subject: str, peers: bool, chosen: tuple[str, ...], say: Callable[[str], None]) -> dict[str, Any]:
    del subject
    from kimigraph.bench import attention_residual
    from kimigraph.bench.peers import RESIDUAL_PEERS

    for name in chosen:
        if name not in RESIDUAL_PEERS:
            raise UsageError(f"--only {name}: choose {', '.join(RESIDUAL_PEERS)}")
    with progress():
        return attention_residual.run(chosen or (RESIDUAL_PEERS if peers else ()), say)


def _bench_dsa(subject: str, peers: bool, chosen: tuple[str, ...], say: Callable[[str], None]) -> dict[str, Any]:
    del subject
    from kimigraph.bench import pair
    from kimigraph.bench.peers import PAIR_PEERS

    for name in chosen:
        if name not in PAIR_PEERS:
            raise UsageError(f"--only {name}: choose {', '.join(PAIR_PEERS)}")
    with progress():
        return pair.run(chosen or (PAIR_PEERS if peers else ()), say)


def _bench_group_indexer(
    subject: str, peers: bool, chosen: tuple[str, ...], say: Callable[[str], None]
) -> dict[str, Any]:
    if chosen:
        raise UsageError(f"--only {chosen[0]}: bench {subject} has no parts")
    del peers  # its peer is the indexer over keys of one scale each
    from kimigraph.bench import group_indexer

    with progress():
        return group_indexer.run(say)


def _bench_moe(subject: str, peers: bool, chosen: tuple[str, ...], say: Callable[[str], None]) -> dict[str, Any]:
    del subject
    from kimigraph.bench import moe

    for name in chosen:
        if name not in moe.POINTS:
            raise UsageError(f"--only {name}: choose {', '.join(moe.POINTS)}")
    with progress():
        return moe.run(chosen or tuple(moe.POINTS), peers, say)


def _bench_prolog(subject: str, peers: bool, chosen: tuple[str, ...], say: Callable[[str], None]) -> dict[str, Any]:
    del subject, peers  # cuBLAS comes with torch
    from kimigraph.bench import prolog

    for name in chosen:
        if name not in prolog.PARTS:
            raise UsageError(f"--only {name}: choose {', '.join(prolog.PARTS)}")
    with progress():
        return prolog.run(say, chosen or prolog.PARTS)


def _bench_pointwise(subject: str, peers: bool, chosen: tuple[str, ...], say: Callable[[str], None]) -> dict[str, Any]:
    del subject, peers  # eager and torch.compile are always there
    from kimigraph.bench import pointwise
    from kimigraph.bench.pointwise_chains import CHAINS

    known = [chain.name for chain in CHAINS]
    for name in chosen:
        if name not in known:
            raise UsageError(f"--only {name}: choose {', '.join(known)}")
    with progress():
        return pointwise.run(chosen, say)


def _bench_quantize(subject: str, peers: bool, chosen: tuple[str, ...], say: Callable[[str], None]) -> dict[str, Any]:
    del subject
    from kimigraph.bench import quantize

    for name in chosen:
        if name not in quantize.PEERS:
            raise UsageError(f"--only {name}: choose {', '.join(quantize.PEERS)}")
    with progress():
        return quantize.run(chosen or (quantize.PEERS if peers else ()), say)


def _bench_states(subject: str, peers: bool, chosen: tuple[str, ...], say: Callable[[str], None]) -> dict[str, Any]:
    if chosen:
        raise UsageError(f"--only {chosen[0]}: bench {subject} has no parts")
    del peers  # their peers are the other ways to keep states
    from kimigraph.bench import kda_logged, kda_rollback

    with progress():
        return (kda_rollback if subject == "rollback" else kda_logged).run(say)


def _bench_kda(subject: str, peers: bool, chosen: tuple[str, ...], say: Callable[[str], None]) -> dict[str, Any]:
    del subject
    from kimigraph.bench import kda
    from kimigraph.bench.peers import DECODE_PEERS, PREFILL_PEERS, SLOW_PEERS

    known = (*dict.fromkeys(DECODE_PEERS + PREFILL_PEERS),)
    for name in chosen:
        if name not in (*known, "decode", "prefill"):
            raise UsageError(f"--only {name}: choose decode, prefill, {', '.join(known)}")
    parts = [name for name in ("decode", "prefill") if name in chosen] or ["decode", "prefill"]
    quick = [name for name in known if peers and name not in SLOW_PEERS]
    wanted = [name for name in known if name in chosen] or quick
    with progress():
        return kda.run(wanted, say, decode="decode" in parts, prefill="prefill" in parts)


def _spelled(chosen: tuple[str, ...]) -> list[str]:
    return [f"--only {name}" for name in chosen]
