"""``kimigraph timeline``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kimigraph.cli.console import print_columns, print_json, progress
from kimigraph.cli.errors import reports_errors
from kimigraph.ir.errors import UsageError

if TYPE_CHECKING:
    from kimigraph.tools.timelines import Timeline


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("timeline")(reports_errors(_timeline))


def _timeline(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Artifact of `kimigraph compile`, or directory of --dump-passes.")
    ],
    measure: Annotated[
        bool, typer.Option("--measure", help="Also trace a replay of the artifact on this machine's GPU.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also take a replay from a trace of torch.profiler.", show_default=False),
    ] = None,
    replays: Annotated[int, typer.Option(min=1, metavar="N", help="How many replays the trace holds.")] = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the timelines for Perfetto there.", show_default=False)
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write them as a picture there.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Show the planned schedule of a program beside a measured one, and what the GPU waits for.

    Both go into one file for https://ui.perfetto.dev, with idle times named after what they wait for.

    \b
      kimigraph timeline k31_tiny-decode-b1-t1-c4096 --measure --out timeline.json
    """
    if measure and trace is not None:
        raise UsageError("--measure and --trace: give one of them")
    with progress():
        from kimigraph.ir.trace import write_timeline
        from kimigraph.report.timeline_svg import Window, timeline_svg
        from kimigraph.tools.timelines import planned_timeline, with_measurement, with_trace

        found = planned_timeline(directory)
        found = with_measurement(found, directory) if measure else found
        found = with_trace(found, trace, replays) if trace is not None else found
        if out is not None:
            write_timeline(out, found.tracks)
        if svg is not None:
            pictures = [(track, Window.whole(track)) for track in found.tracks]
            svg.write_text(timeline_svg(directory.name, pictures), encoding="utf-8")
    if as_json:
        print_json({"directory": str(directory), **found.as_dict()})
    else:
        _print(found)


def _print(found: "Timeline") -> None:
    planned, measured = found.planned, found.measured
    rows = [("planned", f"{planned.length:.1f} us on {len(planned.lanes)} streams ({planned.title})")]
    if measured is not None:
        facts = measured.facts
        rows += [
            ("measured", f"{facts['span_us']:.1f} us ({measured.title.removeprefix('measured: ')})"),
            ("idle", f"{facts['idle_us']:.1f} us, {facts['idle_share']:.1%}, in {facts['gaps']} gaps"),
            (
                "beyond",
                f"{facts['beyond_us']:.1f} us, {facts['beyond_share']:.1%}: gaps longer than 1 us, by the excess",
            ),
        ]
    print_columns(rows)
    gaps = found.longest_gaps()
    if gaps:
        typer.echo("longest waits" + ("" if measured is not None else " of the caller's stream, as planned"))
        print_columns([(f"{length:.2f} us", name) for name, length in gaps], indent=2)
