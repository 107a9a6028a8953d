"""``kimigraph doctor``."""

from itertools import groupby
from typing import Annotated

import typer

from kimigraph.cli.console import print_columns, print_json, progress
from kimigraph.cli.errors import fail, reports_errors


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("doctor")(reports_errors(_doctor))


def _doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Say what is installed here, what works, and which known limits apply; exit with 1 when something needed fails.

    It runs small kernels under Triton's interpreter and builds one for a GPU, each in a process of its own.
    """
    with progress() as notify:
        from kimigraph.tools.doctor import diagnose

        found = diagnose(notify)
    if as_json:
        print_json(found.as_dict())
    else:
        typer.echo("versions")
        print_columns(list(found.versions.items()), indent=2)
        typer.echo("devices")
        print_columns([(d["kind"], d["name"], _size(d)) for d in found.devices], indent=2)
        for area, checks in groupby(sorted(found.checks, key=lambda check: _AREAS.index(check.area)), lambda c: c.area):
            typer.echo(area)
            print_columns([(check.name, check.status, check.detail) for check in checks], indent=2)
    if not found.healthy:
        names = ", ".join(check.name for check in found.checks if check.status == "fails")
        fail(f"error: something that kimigraph needs does not work here: {names}", 1)


_AREAS = ["packages", "targets", "interpreter", "cache"]


def _size(device: dict[str, object]) -> str:
    if device["kind"] == "cpu":
        return f"{device['cores']} cores"
    return f"{device['capability']}, {int(str(device['bytes'])) / 2**30:.0f} GiB"
