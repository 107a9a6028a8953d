"""``kimigraph quant-report``."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kimigraph.cli.console import print_columns, print_json, progress
from kimigraph.cli.errors import fail, reports_errors
from kimigraph.cli.shapes import parse_overrides
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import NumericsError
from kimigraph.ir.policy import POLICIES, read_policy


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("quant-report")(reports_errors(_quant_report))


def _quant_report(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="As for compile.")],
    policy: Annotated[
        str, typer.Option(metavar="NAME|FILE", help=f"One of {', '.join(POLICIES)}, or a policy file (TOML).")
    ] = "article",
    phase: Annotated[Literal["decode", "prefill"], typer.Option(help="What the program does.")] = "decode",
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Prompts.")] = 4,
    context: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Cache capacity per prompt. [default: the steps]")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Decode steps from empty caches.")] = 64,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Type of weights and activations. [default: the model's, else float32]", show_default=False),
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Use seeded weights instead of a checkpoint.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of random weights and prompts.")] = 0,
    set_field: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the model's configuration."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the JSON document there.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
) -> None:
    """Say what a quantization policy saves and costs in SOURCE; exit with 3 beyond the policy's tolerance.

    \b
      kimigraph quant-report examples/k31_tiny --policy article
      kimigraph quant-report ./checkpoint --policy my_policy.toml --steps 256 --json
    """
    config = CompileConfig(
        target="cpu:reference",
        phase=phase,
        batch=batch,
        context=context or steps,
        dtype=dtype,
        seed=seed,
        random_weights=random_weights,
        overrides=parse_overrides(set_field or []),
        policy=read_policy(policy),
        cache="off",
    )
    from kimigraph.tools.quant_report import quant_report

    with progress() as say:
        document = quant_report(source, config, steps, say)
    document["command"] = _command(source, policy, batch, steps)
    if out is not None:
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print_json(document)
    else:
        _print(document)
    if not document["passed"]:
        worst = document["worst"]
        fail(
            f"error: {worst['layer']}: {worst['figure']} is {worst['value']:.4g}, the policy '{document['policy']}' "
            f"allows {worst['limit']:.4g}: give that role a finer format, or the policy another tolerance",
            NumericsError.exit_code,
        )


def _command(source: str, policy: str, batch: int, steps: int) -> str:
    return f"kimigraph quant-report {source} --policy {policy} --batch {batch} --steps {steps}"


def _print(document: dict[str, Any]) -> None:
    typer.echo(f"{document['source']}: policy {document['policy']}, {document['shape_key']}, {document['steps']} steps")
    rows: list[tuple[str, ...]] = [("layer", "role", "format", "bytes a token", "SQNR", "recall", "output error")]
    for row in document["layers"]:
        size = "" if row["bytes_per_token"] is None else f"{row['bytes_per_token']} of {row['bytes_per_token_before']}"
        figures = (_text(row["sqnr_db"], ".1f", " dB"), _text(row["recall"], ".4f"), _text(row["output_error"], ".4f"))
        rows.append((row["layer"], row["role"], row["format"], size, *figures))
    print_columns(rows, indent=2)
    final, memory = document["final"], document["memory"]
    print_columns(
        [
            ("logits", f"relative error {final['logits_error']:.4f} over {final['tokens']} tokens"),
            ("divergence", f"{final['divergence']:.3g} nats, at worst {final['worst_divergence']:.3g}"),
            ("first token", f"the same for {100 * final['same_first_token']:.1f} %"),
            (
                "caches",
                f"{memory['cache_bytes_per_token']} bytes a token, {memory['cache_bytes_per_token_bf16']} in bf16",
            ),
            *_experts(memory),
            *(("not done", text) for text in document["not_done"]),
        ],
        indent=2,
    )


def _experts(memory: dict[str, Any]) -> list[tuple[str, str]]:
    if "experts_bytes" not in memory:
        return []
    return [
        ("experts", f"{memory['experts_bytes']:,} bytes, {memory['experts_bytes_unpacked']:,} as the model has them")
    ]


def _text(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"
