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
    group.command("pt2")(reports_errors(_pt2))
    group.command("dot")(reports_errors(_dot))
    group.command("mermaid")(reports_errors(_mermaid))
    return group


def _group() -> None:
    """Write a model for other tools."""


Source = Annotated[str, typer.Argument(metavar="SOURCE", help="As for compile.")]
Phase = Annotated[Literal["decode", "prefill"], typer.Option(help="What the model does.")]
Batch = Annotated[int, typer.Option(min=1, metavar="N", help="Sequences in a step.")]
Tokens = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="New tokens per sequence. [default: 1 for decode, the context for prefill]"),
]
Context = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Cache capacity per sequence. [default: 4096, at most the model's]"),
]
RandomWeights = Annotated[bool, typer.Option("--random-weights", help="Use seeded weights instead of a checkpoint.")]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Seed of random weights and example inputs.")]
SetField = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the model's configuration."),
]
NoMarks = Annotated[bool, typer.Option("--no-marks", help="Capture without marking known functions.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the summary.")]


def _config(set_field: list[str] | None, no_marks: bool, **options: Any) -> CompileConfig:
    """What these options, and the fields of the configuration by name, ask for."""
    return CompileConfig(**options, overrides=parse_overrides(set_field or []), marks=not no_marks)


def _onnx(
    source: Source,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write; it ends in .onnx.")],
    phase: Phase = "decode",
    batch: Batch = 1,
    tokens: Tokens = None,
    context: Context = None,
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
    random_weights: RandomWeights = False,
    seed: Seed = 0,
    set_field: SetField = None,
    no_marks: NoMarks = False,
    as_json: AsJson = False,
) -> None:
    """Write one step of SOURCE as an ONNX model, states as inputs and outputs, and run it against the eager model.

    \b
      kimigraph export onnx examples/k31_tiny --batch 2 --context 256 --out k31.onnx
      kimigraph export onnx ./checkpoint --phase prefill --context 512 --flat --out prefill.onnx
    """
    config = _config(
        set_field,
        no_marks,
        target="cpu:reference",
        phase=phase,
        batch=batch,
        tokens=tokens,
        context=context,
        opt_level=opt_level,
        dtype=dtype,
        random_weights=random_weights,
        seed=seed,
    )
    from kimigraph.onnx_export import export_onnx

    with progress() as say:
        report = export_onnx(source, config, out, say, flat=flat, external_above=parse_bytes(external_above))
    document = report.as_dict()
    if as_json:
        print_json(document)
    else:
        _print(document)


def _pt2(
    source: Source,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write; it ends in .pt2.")],
    phase: Phase = "decode",
    batch: Batch = 1,
    tokens: Tokens = None,
    context: Context = None,
    dtype: Annotated[Literal["float32", "bfloat16"] | None, typer.Option(help="As for compile.")] = None,
    random_weights: RandomWeights = False,
    seed: Seed = 0,
    set_field: SetField = None,
    no_marks: NoMarks = False,
    as_json: AsJson = False,
) -> None:
    """Write one step of SOURCE as a .pt2 file of torch.export, with weights and example inputs: no code is needed to
    compile it.

    \b
      kimigraph export pt2 examples/k31_tiny --batch 2 --context 256 --out k31.pt2
      kimigraph compile k31.pt2 --target cpu:reference
    """
    config = _config(
        set_field,
        no_marks,
        target="cpu:reference",
        phase=phase,
        batch=batch,
        tokens=tokens,
        context=context,
        dtype=dtype,
        random_weights=random_weights,
        seed=seed,
    )
    from kimigraph.pt2_export import export_pt2

    with progress() as say:
        document = export_pt2(source, config, out, say).as_dict()
    if as_json:
        print_json(document)
        return
    verify = document["verify"]
    typer.echo(f"{document['source']}: {document['shape_key']}, a program of torch.export")
    rows = [
        ("nodes", str(document["nodes"])),
        ("loaded again", f"error {verify['max_rel_err']:.2g} of {verify['tolerance']:g} against the eager model"),
        ("file", document["file"]),
    ]
    print_columns(rows + [("note", note) for note in document["notes"]], indent=2)


Picture = Annotated[Path | None, typer.Option(metavar="FILE", help="The file to write. [default: stdout]")]
Zoom = Annotated[
    Literal["model", "layer", "kernel"],
    typer.Option(help="A box for each layer, for each module of the layers, or for each launch."),
]
Layer = Annotated[int | None, typer.Option(min=0, metavar="N", help="That layer alone.", show_default=False)]
Target = Annotated[str, typer.Option("--target", metavar="TARGET", help="As for compile.")]
Level = Annotated[int, typer.Option("-O", min=0, max=3, metavar="LEVEL", help="As for compile; 0 draws the model.")]


def _dot(
    source: Source,
    out: Picture = None,
    zoom: Zoom = "layer",
    layer: Layer = None,
    phase: Phase = "decode",
    batch: Batch = 1,
    tokens: Tokens = None,
    context: Context = None,
    target: Target = "auto",
    opt_level: Level = 2,
    random_weights: RandomWeights = False,
    set_field: SetField = None,
    no_marks: NoMarks = False,
) -> None:
    """Draw the optimized graph of SOURCE for Graphviz.

    \b
      kimigraph export dot examples/k31_tiny --zoom model | dot -Tsvg > model.svg
      kimigraph export dot examples/k31_tiny --zoom kernel --layer 3 --out layer3.dot
    """
    _draw("dot", **locals())


def _mermaid(
    source: Source,
    out: Picture = None,
    zoom: Zoom = "layer",
    layer: Layer = None,
    phase: Phase = "decode",
    batch: Batch = 1,
    tokens: Tokens = None,
    context: Context = None,
    target: Target = "auto",
    opt_level: Level = 2,
    random_weights: RandomWeights = False,
    set_field: SetField = None,
    no_marks: NoMarks = False,
) -> None:
    """Draw the optimized graph of SOURCE in Mermaid, which GitHub and many editors render.

    \b
      kimigraph export mermaid examples/k31_tiny --zoom model --out model.mmd
    """
    _draw("mermaid", **locals())


def _draw(form: str, source: str, out: Path | None, zoom: Any, layer: int | None, **options: Any) -> None:
    config = _config(**options)
    with progress() as say:
        from kimigraph.tools.pictures import picture_text

        text = picture_text(source, config, zoom, layer, form, say)
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")


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
