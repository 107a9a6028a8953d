"""onnxruntime as a second opinion: a captured graph, translated as it is, computes what the eager model would."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from kimigraph.adapters.onnx_model import OnnxSession, model_proto, require_onnx, write_model
from kimigraph.capture import ModelSource
from kimigraph.capture.eager import EagerStep
from kimigraph.capture.signature import call_leaves, unique
from kimigraph.codegen.onnx.model import narrow_types, translate_program
from kimigraph.codegen.onnx.scope import OPSET
from kimigraph.ir.errors import UsageError
from kimigraph.ir.onnx_format import DOMAIN
from kimigraph.ir.program import CapturedProgram


def step_inputs(model: ModelSource, program: CapturedProgram, length: int | None = None) -> dict[str, Tensor]:
    """The tensors of one example step by their outside names, buffers that the step updates among them."""
    leaves = [leaf for leaf in call_leaves(*model.build(length)) if isinstance(leaf.value, Tensor)]
    named = dict(zip(unique(leaf.name for leaf in leaves), (leaf.value for leaf in leaves), strict=True))
    kept = {spec.source: program.tensors[spec.name] for spec in program.inputs if spec.bound and spec.mutated}
    return {name: tensor.detach().clone() for name, tensor in {**kept, **named}.items()}


def onnx_steps(model: ModelSource, captured: CapturedProgram, lengths: Sequence[int | None]) -> list[EagerStep]:
    """One step of the captured graph in onnxruntime at each length, in standard operators alone.

    Raises UsageError for a model in 16 bits, CompileError that lists all operators without a translation.
    """
    require_onnx()
    if narrow_types(captured):
        raise UsageError(
            "--reference onnxruntime: it has no 16-bit products on a CPU; verify with --dtype float32, or by "
            "--reference eager"
        )
    translated = translate_program(captured, flat=True)
    with tempfile.TemporaryDirectory(prefix="kimigraph-onnx-") as scratch:
        path = Path(scratch) / "model.onnx"
        large = sum(tensor.nbytes for tensor in translated.weights.values()) > 2**30
        write_model(model_proto(translated, DOMAIN, OPSET), path, "model.data" if large else None)
        session = OnnxSession(path)
        steps: list[EagerStep] = []
        for length in lengths:
            values = session.run(step_inputs(model, captured, length))
            states = {name: values[output] for name, output in translated.states.items()}
            results = {spec.source: values[spec.source] for spec in captured.outputs}
            steps.append(EagerStep(results, states))
    return steps
