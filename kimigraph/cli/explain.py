"""``kimigraph explain``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kimigraph.cli.console import print_columns, print_json, progress
from kimigraph.cli.errors import reports_errors

if TYPE_CHECKING:
    from kimigraph.tools.explain import RuleReport, Site


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("explain")(reports_errors(_explain))


def _explain(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Artifact of `kimigraph compile`, or directory of --dump-passes.")
    ],
    node: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only what concerns this node.", show_default=False)
    ] = None,
    rule: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this rule, a name from `kimigraph passes list`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Say why each rule matched or did not: what did, what did not, where, and what would make it match.

    With --node also when that node runs in the planned schedule, what it waits for and why.

    \b
      kimigraph explain k31_tiny-decode-b2-t1-c256 --rule fuse-sparse-attention
      kimigraph explain dumps --node topk_2
    """
    with progress():
        from kimigraph.tools.explain import explain
        from kimigraph.tools.waiting import waiting

        reports = explain(directory, node, rule)
        schedule = waiting(directory, node) if node is not None and rule is None else None
    if as_json:
        rules = [report.as_dict() for report in reports]
        told = {} if schedule is None else {"schedule": schedule.as_dict()}
        print_json({"directory": str(directory), "rules": rules, **told})
        return
    if not reports:
        typer.echo(f"{node}: no rule came near this node" if node else "no rule ran")
    for report in reports:
        _print_rule(report, every_hit=node is not None)
    if schedule is not None:
        typer.echo(f"schedule: {node}" + (f" is a part of {schedule.node}" if schedule.node != node else ""))
        print_columns(schedule.describe(), indent=2)


def _print_rule(report: "RuleReport", every_hit: bool) -> None:
    hits = [site for site in report.sites if site.hit]
    misses = _grouped([site for site in report.sites if not site.hit])
    count = sum(map(len, misses))
    typer.echo(f"{report.rule}: {len(hits)} matched, {count} came near" + (f"; {report.note}" if report.note else ""))
    if every_hit:
        for site in hits:
            print_columns([("matched", site.reason), ("source", _place(site))], indent=2)
    elif hits:
        print_columns([("matched", ", ".join(site.node for site in hits))], indent=2)
    for sites in misses:
        _print_miss(sites)


def _print_miss(sites: list["Site"]) -> None:
    first, further = sites[0], sites[1:]
    typer.echo(f"  near miss at {first.anchor}" + (f" and {len(further)} more" if further else ""))
    rows = [("did not match", first.reason), ("node", first.node), ("source", _place(first))]
    if first.matched:
        rows.append(("did match", ", ".join(first.matched)))
    if first.remedy:
        rows.append(("to match", first.remedy))
    if further:
        rows.append(("also at", ", ".join(f"{site.anchor} (node {site.node})" for site in further)))
    print_columns(rows, indent=4)


def _place(site: "Site") -> str:
    return (site.source or "no source line") + (f" ({site.module})" if site.module else "")


def _grouped(sites: list["Site"]) -> list[list["Site"]]:
    """Sites that say the same about the same source line: the layers of a model."""
    from kimigraph.report.misses import unnumbered

    groups: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        groups.setdefault((unnumbered(site.reason), site.source), []).append(site)
    return list(groups.values())
