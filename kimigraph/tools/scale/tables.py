"""The tables of ``docs/scale.md``."""

import json
from pathlib import Path

from kimigraph.tools.scale.model import AT_WIDTH, K31, Sizes
from kimigraph.tools.scale.plan import Cluster, Estimate, Load, best, cluster_of

MARKS = ("<!-- tables: written by scripts/write_scale.py -->", "<!-- end of tables -->")
GPUS = (8, 16, 32, 64, 128, 256, 512)
CONTEXT = 131_072
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PROMPT, CHUNK = 65_536, 8_192
SLOWEST = 0.05
COMPILED = {(8, 1): 731.4, (8, 2): 449.9, (64, 1): 2241.0, (64, 2): 1255.9}
"""Microseconds that the cost model gives the compiled programs (``kimigraph compile``), by batch and tp."""


def with_tables(page: str, measured: Path | None) -> str:
    """The page with its tables made anew; ``measured`` is the result file of a run on two GPUs."""
    before, rest = page.split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    return f"{before}{MARKS[0]}\n{tables(measured)}\n{MARKS[1]}{after}"


def tables(measured: Path | None) -> str:
    """All tables as Markdown."""
    cluster, told = cluster_of(measured)
    decode = [Load(rows, 1, CONTEXT, CONTEXT) for rows in ROWS]
    prefill = [Load(1, CHUNK, PROMPT / 2, PROMPT)]
    return "\n\n".join(
        [
            f"Links inside a node: {cluster.inside.bytes_per_second / 1e9:.0f} GB/s and "
            f"{cluster.inside.latency * 1e6:.0f} us a collective ({told}); between nodes: "
            f"{cluster.between.bytes_per_second / 1e9:.0f} GB/s and {cluster.between.latency * 1e6:.0f} us (assumed).",
            "### The formulas against compiled programs",
            _check(cluster, measured),
            f"### Decode at {CONTEXT:,} tokens, most tokens a second with steps of at most {SLOWEST * 1e3:.0f} ms",
            _rows(K31, cluster, decode, SLOWEST, False),
            f"### Decode at {CONTEXT:,} tokens, the quickest step of one sequence",
            _rows(K31, cluster, decode[:1], 10.0, True),
            f"### Prefill of {PROMPT:,} tokens in pieces of {CHUNK:,}, most tokens a second",
            _rows(K31, cluster, prefill, 1e3, False),
            f"### Prefill of {PROMPT:,} tokens in pieces of {CHUNK:,}, the quickest piece",
            _rows(K31, cluster, prefill, 1e3, True),
        ]
    )


def _check(cluster: Cluster, measured: Path | None) -> str:
    lines = ["| batch | tp | formulas, us | graph of the program, us | measured, us |", "|---|---|---|---|---|"]
    timed = _measured(measured)
    for (batch, tp), compiled in COMPILED.items():
        seconds = AT_WIDTH.step_work(batch, 1, CONTEXT, tp, 1, 1).seconds(cluster.device)
        lines.append(f"| {batch} | {tp} | {seconds * 1e6:.0f} | {compiled:.0f} | {timed.get((batch, tp), '')} |")
    return "\n".join(lines)


def _measured(path: Path | None) -> dict[tuple[int, int], str]:
    """Microseconds of the programs' steps by batch and tp, of two GPUs without communication."""
    if path is None or not path.exists():
        return {}
    found: dict[tuple[int, int], str] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        if "one_gpu_us" in row and row["context"] == CONTEXT:
            found[row["batch"], 1] = f"{row['one_gpu_us']:.0f}"
            found[row["batch"], 2] = f"{row['without_communication_us']:.0f}"
    return found


def _rows(sizes: Sizes, cluster: Cluster, loads: list[Load], slowest: float, for_latency: bool) -> str:
    head = (
        "GPUs",
        "dp x pp x tp",
        "sp",
        "experts over",
        "sequences a replica",
        "GB a GPU",
        "step, ms",
        "communication",
        "MB a GPU and step over links",
        "tokens/s a GPU",
    )
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for gpus in GPUS:
        found = best(sizes, cluster, gpus, loads, slowest, for_latency)
        lines.append(_line(gpus, found) if found else f"| {gpus} | does not fit |" + " |" * (len(head) - 2))
    return "\n".join(lines)


def _line(gpus: int, one: Estimate) -> str:
    mesh = one.mesh
    links = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in one.link_bytes.items() if size)
    cells = (
        str(gpus),
        f"{mesh.dp} x {mesh.pp} x {mesh.tp}",
        str(mesh.sp),
        f"{one.ep} replicas" if one.ep > 1 else "tp",
        str(one.load.rows),
        f"{one.memory / 1e9:.0f}",
        f"{one.latency * 1e3:.1f}",
        f"{one.communicating / one.latency:.0%}",
        links,
        f"{one.tokens_per_second / gpus:,.0f}",
    )
    return f"| {' | '.join(cells)} |"
