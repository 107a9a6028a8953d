"""``kimigraph export pt2``: the model as torch.export captures it, in a file that needs none of its code."""

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kimigraph.adapters.torch_export import save_exported
from kimigraph.capture import ModelSource, load_source
from kimigraph.capture.eager import EagerStep, eager_step
from kimigraph.capture.errors import describe_failure
from kimigraph.capture.marks import marked
from kimigraph.capture.pt2.source import pt2_source, source_facts
from kimigraph.ir.accuracy import deviation
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import NumericsError, UsageError
from kimigraph.session import Notify, Timing


@dataclass
class Pt2Report:
    """What was exported: ``nodes`` are the calls of the graph, ``verify`` compares the file with the eager model."""

    source: str
    phase: str
    shape_key: str
    file: str
    nodes: int
    verify: dict[str, Any]
    notes: list[str] = field(default_factory=lambda: [])
    timing: dict[str, float] = field(default_factory=lambda: {})

    def as_dict(self) -> dict[str, Any]:
        """The report as a JSON document."""
        return asdict(self)


def export_pt2(source: str, config: CompileConfig, out: Path, notify: Notify) -> Pt2Report:
    """Write one step of ``source`` to the file ``out``: graph, weights, example inputs and what the caches are.

    The file is loaded again and run against the eager model before it takes its place. Raises UsageError for what
    cannot be asked, CaptureError for a model that torch cannot export, and NumericsError, nothing written, for a file
    that computes something else.
    """
    if out.suffix != ".pt2" or out.is_dir():
        raise UsageError(f"--out {out}: give a file that ends in .pt2")
    out.parent.mkdir(parents=True, exist_ok=True)
    timing, model = Timing(), load_source(source, config)
    with tempfile.TemporaryDirectory(prefix=".kimigraph-", dir=out.parent) as scratch:
        staged = Path(scratch) / out.name
        notify(f"exporting {model.name}")
        with timing.stage("export"):
            nodes = _save(model, config, staged)
        notify("loading and running it against the eager model")
        with timing.stage("verify"):
            verified = _verified(model, eager_step(pt2_source(staged, CompileConfig())))
        os.replace(staged, out)
    return Pt2Report(
        source=model.name,
        phase=model.phase,
        shape_key=model.shape_key,
        file=str(out),
        nodes=nodes,
        verify=verified,
        notes=list(model.notes),
        timing=timing.as_dict(),
    )


def _save(model: ModelSource, config: CompileConfig, path: Path) -> int:
    module, args, kwargs = model.build()
    extra = {"kimigraph.json": json.dumps(source_facts(model))}
    try:
        with marked(config):
            return save_exported(module, args, kwargs, path, extra)
    except Exception as error:  # torch.export raises whatever the traced code raises
        raise describe_failure(type(module).__name__, error) from error


def _verified(model: ModelSource, step: EagerStep) -> dict[str, Any]:
    eager = eager_step(model)
    want = {**eager.outputs, **eager.inputs}
    error = deviation({**step.outputs, **step.inputs}, want)
    if not error.passed:
        raise NumericsError(
            f"the exported program differs from the eager model: '{error.tensor}' by {error.relative:.3g} relative, "
            f"{error.tolerance:g} is allowed; nothing was written"
        )
    return error.against_eager(len(want))
