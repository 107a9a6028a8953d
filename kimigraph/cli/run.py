"""``kimigraph run``."""

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from kimigraph.cli.console import print_columns, print_json, reading
from kimigraph.cli.errors import fail, reports_errors
from kimigraph.ir import env
from kimigraph.ir.errors import CorruptArtifactError, NumericsError, UsageError

MANIFEST, FIRST_STAGE = "manifest.json", "stage-0"
"""What tells an artifact from the directory of a pipeline, read without torch."""


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("run")(reports_errors(_run))


def _run(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="Directory that `kimigraph compile` wrote.")],
    weights: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Checkpoint, or .onnx or .pt2 source. [default: seeded weights]")
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Safetensors file with inputs and caches by name. [default: seeded ones]"),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Steps to run.")] = 1,
    cuda_graph: Annotated[
        bool, typer.Option("--cuda-graph", help="Capture the step as a CUDA graph and replay it (targets cuda*).")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a trace of the steps for Perfetto or chrome://tracing.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
) -> None:
    """Run one step of ARTIFACT and print a checksum per output.

    Of a pipeline each rank runs its stage, and without torchrun one process all of them in turn.

    A checksum is the sum, the sum of magnitudes and a dot product with a seeded vector. With seeded weights and inputs
    the checksums must be those of the manifest (exit code 3 when not).

    \b
      kimigraph run k31_tiny-decode-b2-t1-c256 --repeat 3
      kimigraph run k31_tiny-decode-b2-t1-c256 --repeat 3 --trace run.json
    """
    pipeline = not (artifact / MANIFEST).exists() and (artifact / FIRST_STAGE / MANIFEST).exists()
    if artifact_target(artifact / FIRST_STAGE if pipeline else artifact) == "cpu":
        env.enable_interpreter()  # before the first import of triton, which the next line may bring
    with reading("reading weights") as watch:
        if pipeline:
            from kimigraph.tools.run_stages import run_stages as run
        else:
            from kimigraph.run import run_artifact as run

        with _traced(trace):
            result = run(artifact, weights, inputs, repeat, watch, cuda_graph)
    if (env.started_ranks() or (0, 1))[0] > 0:
        pass  # the first rank tells
    elif as_json:
        print_json(result)
    else:
        _print_result(result)
    if result["passed"] is False:
        fail("error: the outputs are not those of the manifest: see the checksums above", NumericsError.exit_code)


def _traced(path: Path | None) -> AbstractContextManager[None]:
    if path is None:
        return nullcontext()
    from kimigraph.tools.chrome_trace import traced

    return traced(path)


def artifact_target(directory: Path) -> str:
    """The target that the manifest in ``directory`` names, read without torch."""
    manifest = directory / MANIFEST
    if not manifest.is_file():
        raise UsageError(
            f"{directory} is no artifact (it has no manifest.json): name a directory that `kimigraph compile` wrote"
        )
    try:
        return str(json.loads(manifest.read_text(encoding="utf-8"))["target"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptArtifactError(f"{manifest} cannot be read ({error}): compile again") from error


def _print_result(result: dict[str, Any]) -> None:
    rows = [("output", "sum", "sum of magnitudes", "dot")]
    rows += [(name, *(f"{value:.9g}" for value in values)) for name, values in result["outputs"].items()]
    print_columns(rows)
    seconds = sorted(result["seconds"])
    if seconds:
        typer.echo(f"seconds: {seconds[len(seconds) // 2]:.6f} (median of {len(seconds)})")
    if result["passed"] is not None:
        typer.echo("checksums: those of the manifest" if result["passed"] else "checksums: not those of the manifest")
