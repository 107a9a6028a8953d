"""``kimigraph compile``."""

import inspect
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kimigraph.cli.console import print_json, shape_progress
from kimigraph.cli.errors import fail, reports_errors
from kimigraph.cli.shapes import one_per_shape, parse_overrides
from kimigraph.cli.summary import print_numerics, print_summary
from kimigraph.ir import env
from kimigraph.ir.config import MAX_SHAPES, STREAMS, TARGETS, CompileConfig
from kimigraph.ir.device import read_device_file
from kimigraph.ir.errors import NumericsError
from kimigraph.ir.policy import POLICIES, read_policy


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("compile")(reports_errors(_compile))


def _compile(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Directory with config.json and *.safetensors, package.module:function, or a .onnx or .pt2 file.",
        ),
    ],
    phase: Annotated[
        Literal["decode", "prefill", "verify"],
        typer.Option(help="What the program does. verify: the drafts of a token."),
    ] = "decode",
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="N", help="Sequences in a step. [default: 1]"),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            metavar="N",
            help="New tokens per sequence. [default: 1 for decode, the context for prefill, 8 for verify]",
        ),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Cache capacity per sequence. [default: 4096, at most the model's]",
        ),
    ] = None,
    target: Annotated[str, typer.Option("--target", metavar="TARGET", help=f"One of {', '.join(TARGETS)}.")] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Type of weights and activations. [default: the model's, else float32]", show_default=False),
    ] = None,
    opt_level: Annotated[
        int,
        typer.Option("-O", min=0, max=3, metavar="LEVEL", help="0 runs no passes, 1 to 3 run them."),
    ] = 2,
    passes: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The pipeline to run instead of the level's."),
    ] = None,
    disable_pass: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Leave a pass out.")] = None,
    require_fusion: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Exit with 4 unless this fusion fires."),
    ] = None,
    stop_after: Annotated[str | None, typer.Option(metavar="NAME", help="Run no pass after this one.")] = None,
    no_marks: Annotated[bool, typer.Option("--no-marks", help="Capture without marking known functions.")] = False,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Use seeded weights instead of a checkpoint.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of random weights and example inputs.")] = 0,
    set_field: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the model's configuration."),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE", help=f"Quantise by a policy: {', '.join(POLICIES)}, or a policy file (TOML)."
        ),
    ] = "off",
    device_file: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Price decisions for this device (see measure-device), not the target's."),
    ] = None,
    streams: Annotated[int, typer.Option(min=1, metavar="N", help="Streams that a program may use.")] = STREAMS,
    force_streams: Annotated[
        bool, typer.Option("--force-streams", help="Fork wherever it is legal, not only where it pays: for tests.")
    ] = False,
    half_batches: Annotated[
        Literal["auto", "on", "off"],
        typer.Option(help="Run a decode step as two interleaved halves of its batch: auto where that pays."),
    ] = "auto",
    tp: Annotated[int, typer.Option("--tp", min=1, metavar="N", help="Share heads and widths out among N ranks.")] = 1,
    sp: Annotated[
        int,
        typer.Option("--sp", min=1, metavar="N", help="Share each sequence's caches out among N times as many ranks."),
    ] = 1,
    pp: Annotated[
        int, typer.Option("--pp", min=1, metavar="N", help="Share layers out among N stages, one artifact each.")
    ] = 1,
    max_shapes: Annotated[int, typer.Option(min=1, metavar="N", help="Shapes that one call may ask for.")] = MAX_SHAPES,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Shapes to compile side by side. [default: half the processors, at most 4]"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Artifact directory. [default: ./<source>-<phase>-<shape>]"),
    ] = None,
    dump_passes: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the graph after each pass.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare with the model; exit with 3 on a difference.")
    ] = False,
    reference: Annotated[
        Literal["eager", "onnxruntime"],
        typer.Option(help="What --verify compares with: the eager model, or onnxruntime on the captured graph."),
    ] = "eager",
    no_report: Annotated[
        bool, typer.Option("--no-report", help="Leave report.html and the remarks out of the artifact.")
    ] = False,
    check_numerics: Annotated[
        bool,
        typer.Option("--check-numerics", help="Run the graph after each pass; exit with 3 on the first that differs."),
    ] = False,
    time_passes: Annotated[bool, typer.Option("--time-passes", help="Report the seconds of each pass.")] = False,
    cache: Annotated[
        Literal["use", "off", "readonly", "refresh", "check"],
        typer.Option(help="How to use the compile cache; check compiles again and compares."),
    ] = "use",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the summary.")] = False,
) -> None:
    """Compile SOURCE to a directory with the host program and its kernels.

    \b
      kimigraph compile examples/k31_tiny --batch 2 --context 256 --target cpu --verify
      kimigraph compile my_package.models:build --target cuda:sm_90 --out artifact
      kimigraph compile ./checkpoint --phase prefill --context 512 --target cpu:reference --json
    """
    configs = configurations(locals())
    documents = _run(source, configs, out, jobs)
    if as_json:
        print_json(documents if len(documents) > 1 else documents[0])
    else:
        for document in documents:
            print_summary(document)
    _check_numerics(documents)


def configurations(options: dict[str, Any]) -> list[CompileConfig]:
    """What the options (by the parameter names of the command) ask for: one configuration per shape."""
    base = CompileConfig(
        target=options["target"],
        opt_level=options["opt_level"],
        phase=options["phase"],
        dtype=options["dtype"],
        seed=options["seed"],
        passes=options["passes"],
        disabled_passes=tuple(options["disable_pass"] or ()),
        required_fusions=tuple(options["require_fusion"] or ()),
        stop_after=options["stop_after"],
        marks=not options["no_marks"],
        random_weights=options["random_weights"],
        overrides=parse_overrides(options["set_field"] or []),
        policy=read_policy(options["policy"]),
        device=None if options["device_file"] is None else read_device_file(options["device_file"]),
        streams=options["streams"],
        force_streams=options["force_streams"],
        half_batches=options["half_batches"],
        tp=options["tp"],
        pp=options["pp"],
        sp=options["sp"],
        cache=options["cache"],
        verify=options["verify"],
        reference=options["reference"],
        check_numerics=options["check_numerics"],
        time_passes=options["time_passes"],
        report=not options["no_report"],
        dump_passes=str(options["dump_passes"]) if options["dump_passes"] is not None else None,
        max_shapes=options["max_shapes"],
    )
    return one_per_shape(base, options["batch"] or [], options["tokens"] or [], options["context"] or [])


def parameters() -> list[inspect.Parameter]:
    """The parameters of the command, for commands that take its options."""
    return list(inspect.signature(_compile).parameters.values())


def _run(source: str, configs: list[CompileConfig], out: Path | None, jobs: int | None) -> list[dict[str, Any]]:
    if configs[0].target == "cpu":
        env.enable_interpreter()  # before the first import of triton, which the next line may bring
    with shape_progress(len(configs)) as watch:
        from kimigraph.tools.numerics import PassNumericsError
        from kimigraph.tools.shapes import compile_shapes

        try:
            return [report.as_dict() for report in compile_shapes(source, configs, out, watch, jobs)]
        except PassNumericsError as error:
            print_numerics(error.table, err=True)
            raise


def _check_numerics(documents: list[dict[str, Any]]) -> None:
    wrong = [d["shape_key"] for d in documents if d["verify"] is not None and not d["verify"]["passed"]]
    if wrong:
        fail(
            f"error: the program differs from the eager model at {', '.join(wrong)}: see `verify` in the report; "
            "--disable-pass and --stop-after narrow it down",
            NumericsError.exit_code,
        )
