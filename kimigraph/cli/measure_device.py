"""``kimigraph measure-device``."""

from pathlib import Path
from typing import Annotated

import typer

from kimigraph.cli.console import progress
from kimigraph.cli.errors import reports_errors


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("measure-device")(reports_errors(_measure_device))


def _measure_device(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the device file goes.")],
) -> None:
    """Measure this machine's GPU and write a device file for `compile --device-file`.

    It measures the copy rate, the rate of matrix products by type, and what a kernel costs as a node of a CUDA graph.
    Nothing else should run on the GPU meanwhile.

    \b
      kimigraph measure-device --out device.json
      kimigraph compile SOURCE --device-file device.json
    """
    with progress() as notify:
        from kimigraph.bench.device import measure

        device = measure(notify)
    out.write_text(device.text(), encoding="utf-8")
    typer.echo(f"{device.name}: {device.bytes_per_second / 1e12:.2f} TB/s, {out}", err=True)
