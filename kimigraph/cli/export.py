"""``kimigraph export``."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kimigraph.cli.console import print_columns, print_json, progress
from kimigraph.cli.errors import reports_errors
from kimigraph.cli.shapes import parse_overrides
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.sizes import parse_bytes


def make_group() -> typer.Typer:
    """The commands below ``kimigraph export``."""
    group = typer.Typer(help="Write a model for other tools.", no_args_is_help=True, rich_markup_mode=None)
    group.callback()(_group)
    group.command("onnx")(reports_errors(_onnx))
    return group


def _group() -> None:
    """Write a model for other tools."""


def _onnx(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="As for compile.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write; it ends in .onnx.")],
    phase: Annotated[Literal["decode", "prefill"], typer.Option(help="What the model does.")] = "decode",
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences in a step.")] = 1,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="New tokens per sequence. [default: 1 for decode, the context for prefill]"
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Cache capacity per sequence. [default: 4096, at most the model's]"),
    ] = None,
    flat: Annotated[
        bool, typer.Option("--flat", help="Standard operators alone, no functions of the domain kimigraph.")
    ] = False,
    opt_level: Annotated[int, typer.Option("-O", min=0, max=3, metavar="LEVEL", help="0 exports without fusions.")] = 2,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None, typer.Option(help="As for compile; onnxruntime takes float32.")
    ] = None,
    external_above: Annotated[
        str, typer.Option(metavar="SIZE", help="Weights of more bytes go to a file beside the model.")
    ] = "100M",
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Use seeded weights instead of a checkpoint.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of random weights and example inputs.")] = 0,
    set_field: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the model's configuration."),
    ] = None,
    no_marks: Annotated[bool, typer.Option("--no-marks", help="Capture without marking known functions.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the summary.")] = False,
) -> None:
    """Write one step of SOURCE as an ONNX model, states as inputs and outputs, and run it against the eager model.

    \b
      kimigraph export onnx examples/k31_tiny --batch 2 --context 256 --out k31.onnx
      kimigraph export onnx ./checkpoint --phase prefill --context 512 --flat --out prefill.onnx
    """
    config = CompileConfig(
        target="cpu:reference",
        phase=phase,
        batch=batch,
        tokens=tokens,
        context=context,
        opt_level=opt_level,
        dtype=dtype,
        random_weights=random_weights,
        seed=seed,
        overrides=parse_overrides(set_field or []),
        marks=not no_marks,
    )
    from kimigraph.onnx_export import export_onnx

    with progress() as say:
        report = export_onnx(source, config, out, say, flat=flat, external_above=parse_bytes(external_above))
    document = report.as_dict()
    if as_json:
        print_json(document)
    else:
        _print(document)


def _print(document: dict[str, Any]) -> None:
    typer.echo(f"{document['source']}: {document['shape_key']}, ONNX opset {document['opset']}")
    functions = ", ".join(f"{name} ({count})" for name, count in document["functions"].items())
    verify = document["verify"]
    print_columns(
        [
            ("nodes", str(document["nodes"])),
            ("functions", functions or "none: standard operators alone"),
            ("states", f"{len(document['states'])}, each an input and an output '<name>.next'"),
            ("onnxruntime", f"error {verify['max_rel_err']:.2g} of {verify['tolerance']:g} against the eager model"),
            ("file", document["file"] + (f" with {document['data']}" if document["data"] else "")),
            *(("note", note) for note in document["notes"]),
        ],
        indent=2,
    )
