"""``kimigraph export onnx``: capture, the fusions that name operators, translation, file, check, run."""

import hashlib
import os
import re
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kimigraph import __version__
from kimigraph.adapters.onnx_model import OnnxSession, model_proto, require_onnx, write_model
from kimigraph.capture import ModelSource, capture, load_source
from kimigraph.capture.eager import eager_step
from kimigraph.codegen.onnx.model import OnnxModel, narrow_types, translate_program
from kimigraph.codegen.onnx.scope import OPSET
from kimigraph.ir.accuracy import deviation
from kimigraph.ir.config import ONNXRUNTIME, CompileConfig
from kimigraph.ir.errors import CompileError, NumericsError, UsageError
from kimigraph.ir.onnx_format import DOMAIN, PHASE, RANGE, STATE
from kimigraph.ir.program import CapturedProgram
from kimigraph.onnx_reference import step_inputs
from kimigraph.passes import default_pipeline, run_pipeline
from kimigraph.session import Notify, Timing, pass_context

EXTERNAL_ABOVE = 100 * 2**20


@dataclass
class OnnxReport:
    """What was exported. ``states`` maps each state's input to the output with its new value."""

    source: str
    phase: str
    shape_key: str
    file: str
    data: str | None
    opset: int
    nodes: int
    functions: dict[str, int]
    inputs: list[str]
    outputs: list[str]
    states: dict[str, str]
    verify: dict[str, Any]
    notes: list[str] = field(default_factory=lambda: [])
    timing: dict[str, float] = field(default_factory=lambda: {})

    def as_dict(self) -> dict[str, Any]:
        """The report as a JSON document."""
        return asdict(self)


def export_onnx(
    source: str,
    config: CompileConfig,
    out: Path,
    notify: Notify,
    *,
    flat: bool = False,
    external_above: int = EXTERNAL_ABOVE,
) -> OnnxReport:
    """Write one step of ``source`` to the file ``out``; weights beyond ``external_above`` bytes go to a file beside it.

    The file is checked by ``onnx.checker`` and run once in onnxruntime against the eager model before it takes its
    place. Raises UsageError for what cannot be asked, CompileError that lists all operators without a translation, and
    NumericsError, nothing written, when the run differs from the model by more than 1e-4 relative.
    """
    require_onnx()
    _check_path(out)
    timing, notes = Timing(), list[str]()
    model, config = _in_fp32(source, config, notes)
    notify(f"capturing {model.name}")
    with timing.stage("capture"):
        program = capture(model, config)
    _check_types(program)
    with timing.stage("passes"):
        for_onnx = replace(config, target=ONNXRUNTIME)
        run_pipeline(program, default_pipeline(for_onnx), pass_context(for_onnx), [])
    notify("translating to ONNX")
    with timing.stage("translation"):
        onnx_model = _described(translate_program(program, flat), model, program)
    with tempfile.TemporaryDirectory(prefix=".kimigraph-", dir=out.parent) as scratch:
        staged = Path(scratch) / out.name
        data = _data_name(out, onnx_model, external_above)
        notify("writing and checking")
        with timing.stage("writing"):
            write_model(model_proto(onnx_model, DOMAIN, OPSET), staged, data)
        notify("running in onnxruntime against the eager model")
        with timing.stage("verify"):
            verified = _verified(staged, onnx_model, model, program)
        _put(staged, out, data)
    return OnnxReport(
        source=model.name,
        phase=model.phase,
        shape_key=model.shape_key,
        file=str(out),
        data=data,
        opset=OPSET,
        nodes=len(onnx_model.ops),
        functions={item.name: len(item.ops) for item in onnx_model.functions},
        inputs=[port.name for port in onnx_model.inputs],
        outputs=[port.name for port in onnx_model.outputs],
        states=onnx_model.states,
        verify=verified,
        notes=[*notes, *model.notes],
        timing=timing.as_dict(),
    )


def _check_path(out: Path) -> None:
    if out.suffix != ".onnx":
        raise UsageError(f"--out {out}: give a file that ends in .onnx")
    if out.is_dir():
        raise UsageError(f"--out {out} is a directory: give a file")
    try:
        os.fsencode(out.absolute()).decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError("--out is no UTF-8 path, and onnxruntime opens no other: choose another name") from None
    out.parent.mkdir(parents=True, exist_ok=True)


def _in_fp32(source: str, config: CompileConfig, notes: list[str]) -> tuple[ModelSource, CompileConfig]:
    """The source in fp32: the CPU kernels of onnxruntime have no bf16 products."""
    if config.dtype == "bfloat16":
        raise UsageError("--dtype bfloat16: onnxruntime has no bf16 products on the CPU; leave the option out for fp32")
    model = load_source(source, config)
    if model.document.get("dtype") not in ("bfloat16", "float16"):
        return model, config
    notes.append(
        f"exported in float32: the model is in {model.document['dtype']}, of which onnxruntime has no products on a CPU"
    )
    config = replace(config, dtype="float32")
    return load_source(source, config), config


def _check_types(program: CapturedProgram) -> None:
    narrow = narrow_types(program)
    if narrow:
        raise CompileError(
            f"the model holds tensors in {' and '.join(narrow)}, of which onnxruntime has no products on a CPU: "
            "convert it with model.float() first"
        )


def _described(onnx_model: OnnxModel, model: ModelSource, program: CapturedProgram) -> OnnxModel:
    metadata = {"kimigraph": __version__, "source": model.name, PHASE: model.phase, "shape": model.shape_key}
    metadata |= {f"{STATE}{name}": output for name, output in onnx_model.states.items()}
    bounds = {spec.source: spec.value_range for spec in program.inputs if not spec.bound and spec.value_range}
    metadata |= {f"{RANGE}{name}": f"{low} {high}" for name, (low, high) in bounds.items()}
    return replace(onnx_model, name=re.sub(r"\W", "_", model.name), metadata=metadata)


def _data_name(out: Path, onnx_model: OnnxModel, above: int) -> str | None:
    """The file for the weights, named after what it holds, so that an old model beside it keeps its own."""
    if sum(tensor.nbytes for tensor in onnx_model.weights.values()) <= above:
        return None
    digest = hashlib.sha256()
    for name, tensor in onnx_model.weights.items():
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"{out.stem}-{digest.hexdigest()[:12]}.data"


def _put(staged: Path, out: Path, data: str | None) -> None:
    """Move the files to their place, the model last; then weights that an earlier export left beside it go."""
    if data is not None:
        (staged.parent / data).chmod(staged.stat().st_mode)  # onnx gives it to its owner alone
        (staged.parent / data).replace(out.parent / data)
    staged.replace(out)
    ours = re.compile(re.escape(out.stem) + r"-[0-9a-f]{12}\.data")
    for path in out.parent.iterdir():
        if ours.fullmatch(path.name) and path.name != data:
            path.unlink()


def _verified(staged: Path, onnx_model: OnnxModel, source: ModelSource, program: CapturedProgram) -> dict[str, Any]:
    step, before = eager_step(source), step_inputs(source, program)
    states = {output: step.inputs.get(name, before[name]) for name, output in onnx_model.states.items()}
    want = {**step.outputs, **states}
    error = deviation(OnnxSession(staged).run(before), want)
    if not error.passed:
        raise NumericsError(
            f"onnxruntime differs from the eager model: '{error.tensor}' by {error.relative:.3g} relative, "
            f"{error.tolerance:g} is allowed; nothing was written. -O0 exports without fusions and tells whether one "
            "of them is the cause"
        )
    return error.against_eager(len(want))
