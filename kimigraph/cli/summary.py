"""The summary that ``kimigraph compile`` prints when no JSON is asked for."""

from collections import Counter
from typing import Any, cast

import typer

from kimigraph.cli.console import print_columns


def print_summary(report: dict[str, Any]) -> None:
    """Print the report of one compilation (the ``--json`` document) for a person."""
    typer.echo(f"{report['source']}: {report['shape_key']} for {report['target']}")
    print_columns(_overview(report), indent=2)
    _section("fusions", [_fusion_row(fusion) for fusion in report["fusions"]])
    _section("kernels", _kernel_rows(report["kernels"]))
    if report["numerics"]:
        typer.echo("numerics")
        print_numerics(report["numerics"])
    _section("seconds", _timing_rows(report["timing"]))


def print_numerics(table: list[dict[str, Any]], err: bool = False) -> None:
    """Print the table of ``--check-numerics``: a row for each pass with its errors against the captured graph."""
    rows: list[tuple[str, ...]] = [("pass", "absolute", "relative", "tolerance", "", "worst tensor")]
    for row in table:
        errors = [f"{row[key]:.3g}" for key in ("max_abs_err", "max_rel_err", "tolerance")]
        word = "FAILED" if not row["passed"] else "ok" if row["modified"] else "unchanged" if row["index"] else ""
        tensor = f"{row['tensor']} ({row['data']})" if row["tensor"] else ""
        rows.append((f"{row['index']} {row['pass']}", *errors, word, tensor))
    print_columns(rows, indent=2, err=err)


def _overview(report: dict[str, Any]) -> list[tuple[str, ...]]:
    graph, launches, cache = report["graph"], report["launches"], report["cache"]
    rows: list[tuple[str, ...]] = [
        ("graph", f"{graph['nodes_before']} nodes before the passes, {graph['nodes_after']} after"),
        ("launches", f"{launches['before']} before, {launches['after']} after"),
        *([("streams", _streams_text(report["streams"]))] if report["streams"] else []),
        *([("caches", _caches_text(report))] if report["quantization"] else []),
        *([("experts", _experts_text(report["memory"]))] if "experts_bytes" in (report["memory"] or {}) else []),
        ("cache", _cache_text(cache)),
    ]
    if report["verify"] is not None:
        rows.append(("verify", _verify_text(report["verify"])))
    rows += [(name, report[name]) for name in ("artifact", "dumps", "report") if report[name]]
    return rows


def _streams_text(streams: dict[str, Any]) -> str:
    times = f"longest path {streams['critical_path_us']:.1f} us of {streams['serial_us']:.1f} us, estimated"
    return f"{streams['count']}, {streams['events']} events; {times}" if streams["count"] > 1 else f"1; {times}"


def _caches_text(report: dict[str, Any]) -> str:
    memory, policy = report["memory"], report["quantization"][0]["reason"].partition(" for ")[0]
    return (
        f"{memory['cache_bytes_per_token']} bytes a token by {policy}, {memory['cache_bytes_per_token_bf16']} in bf16"
    )


def _experts_text(memory: dict[str, Any]) -> str:
    return f"{memory['experts_bytes']:,} bytes as MXFP4, {memory['experts_bytes_unpacked']:,} as the model has them"


def _cache_text(cache: dict[str, Any]) -> str:
    saved = cache.get("saved_seconds") or 0
    facts = [cache["reason"], f"saved {saved:.1f} s" if saved else ""]
    text = "; ".join(fact for fact in facts if fact)
    return cache["status"] + (f" ({text})" if text else "")


def _verify_text(verify: dict[str, Any]) -> str:
    word = "passed" if verify["passed"] else "FAILED"
    return (
        f"{word} against {verify['reference']}: largest error {verify['max_abs_err']:.3g}, "
        f"relative {verify['max_rel_err']:.3g}, tolerance {verify['tolerance']:.3g}"
    )


def _fusion_row(fusion: dict[str, Any]) -> tuple[str, ...]:
    if fusion["count"]:
        return fusion["rule"], f"{fusion['count']}x", f"via {fusion['via']}"
    return fusion["rule"], "0x", fusion.get("reason", "")


def _kernel_rows(kernels: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One row for all equal launches: file, operator, how often, bytes and FLOPs of each."""
    counts = Counter((kernel["file"], kernel["op"], kernel["bytes"], kernel["flops"]) for kernel in kernels)
    return [
        (file, op, f"{count}x", f"{_scaled(size)}B", f"{_scaled(flops)}FLOP")
        for (file, op, size, flops), count in counts.items()
    ]


def _timing_rows(timing: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, value in timing.items():
        if isinstance(value, dict):  # per pass
            rows += [(f"pass {key}", f"{seconds:.2f}") for key, seconds in cast(dict[str, float], value).items()]
        else:
            rows.append((name, f"{value:.2f}"))
    return rows


def _section(title: str, rows: list[tuple[str, ...]]) -> None:
    if rows:
        typer.echo(f"  {title}")
        print_columns(rows, indent=4)


def _scaled(number: float | None) -> str:
    """A count with a unit prefix: 1536000 is ``1.54 M``."""
    if number is None:
        return "? "
    for prefix in ("", "k", "M", "G"):
        if abs(number) < 1000:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} T"
