"""A ``.pt2`` file as a source, and what is written into one beside the program."""

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

from kimigraph.adapters.torch_export import load_exported
from kimigraph.capture.function_source import fresh_arguments
from kimigraph.capture.hints import CaptureHints, InputHint
from kimigraph.capture.pt2.audit import check_archive
from kimigraph.capture.source import Loaded, ModelSource
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.descriptors import parse_descriptor
from kimigraph.ir.errors import CompileError, UsageError


def pt2_source(path: Path, config: CompileConfig) -> ModelSource:
    """The source that the file is: one step on the example inputs that it holds. No code of the model is needed.

    UsageError for a file that is damaged, not to be trusted, or without example inputs.
    """
    if config.overrides or config.dtype:
        option = "--set" if config.overrides else "--dtype"
        raise UsageError(f"{option} does not apply to {path}: the file holds one program; export another one")
    facts = check_archive(path)
    module, args, kwargs = load_exported(path)
    return ModelSource(
        name=path.stem,
        model_type="pt2",
        phase="prefill" if facts.get("phase", config.phase) == "prefill" else "decode",
        load=lambda device: Loaded(module, partial(fresh_arguments, args, kwargs)),
        hints=_hints(path, facts),
        document={"pt2": hashlib.sha256(path.read_bytes()).hexdigest()},
    )


def source_facts(source: ModelSource) -> dict[str, Any]:
    """What ``source`` knows of its tensors, as JSON for the file."""
    inputs = {
        name: {"kind": hint.kind, "range": hint.value_range, "descriptor": hint.descriptor, "length": hint.is_length}
        for name, hint in source.hints.inputs.items()
    }
    return {
        "source": source.name,
        "phase": source.phase,
        "shape": source.shape_key,
        "inputs": inputs,
        "outputs": list(source.hints.outputs),
        "prefix": source.hints.prefix,
    }


def _hints(path: Path, facts: dict[str, Any]) -> CaptureHints:
    try:
        inputs = {str(name): _hint(fields) for name, fields in facts.get("inputs", {}).items()}
        return CaptureHints(inputs, tuple(map(str, facts.get("outputs", ()))), str(facts.get("prefix", "")))
    except (AttributeError, KeyError, TypeError, ValueError, CompileError) as error:
        raise UsageError(f"{path}: extra/kimigraph.json is not what kimigraph writes ({error})") from error


def _hint(fields: dict[str, Any]) -> InputHint:
    bounds, text = fields["range"], str(fields["descriptor"])
    return InputHint(
        kind="cache" if fields["kind"] == "cache" else "input",
        value_range=None if bounds is None else (int(bounds[0]), int(bounds[1])),
        descriptor=str(parse_descriptor(text)) if text else "",
        is_length=bool(fields["length"]),
    )
