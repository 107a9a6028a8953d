"""An artifact of kind ``onnx``: the step as ``model.onnx``, weights among its inputs, for onnxruntime to run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kimigraph.adapters.onnx_model import model_proto, require_onnx, write_model
from kimigraph.codegen.artifact import checksums_of, model_name, tree_text, versions, write_constants
from kimigraph.codegen.onnx.model import narrow_types, translate_program
from kimigraph.codegen.onnx.scope import OPSET
from kimigraph.codegen.self_test import REFERENCE, tolerance_of
from kimigraph.ir.errors import CompileError
from kimigraph.ir.manifest import ONNX_MODEL, KernelRecord, Manifest, record_file
from kimigraph.ir.onnx_format import DOMAIN
from kimigraph.ir.operators import cost_of, operator_of
from kimigraph.ir.program import CapturedProgram


def build_onnx_artifact(
    program: CapturedProgram,
    target: str,
    directory: Path,
    facts: dict[str, Any],
    *,
    seed: int,
    self_test: bool,
    cache_key: str,
) -> Manifest:
    """Write the artifact; as ``build_artifact``, which hands on what onnxruntime is to run.

    CompileError for tensors in 16 bits, and one that lists all operators without a translation.
    """
    require_onnx()
    narrow = narrow_types(program)
    if narrow:
        raise CompileError(
            f"target {target!r}: onnxruntime has no products in {' and '.join(narrow)} on a CPU; compile with --dtype "
            "float32, or for cpu:reference"
        )
    model = translate_program(program, bind=False)
    write_model(model_proto(model, DOMAIN, OPSET), directory / ONNX_MODEL, None)
    paths = [ONNX_MODEL, *write_constants(program, directory)]
    sums = checksums_of(program, target, seed, lambda _: None) if self_test else {}
    manifest = Manifest(
        model=model_name(facts),
        phase=str(facts.get("phase", "")),
        shape_key=str(facts.get("shape_key", "")),
        target=target,
        versions=versions(),
        cache_key=cache_key,
        files=tuple(record_file(directory, path) for path in sorted(paths)),
        inputs=program.inputs,
        outputs=program.outputs,
        in_spec=tree_text(program.in_spec),
        out_spec=tree_text(program.out_spec),
        kernels=tuple(_records(program)),
        launches=sum(op.kind != "Constant" for op in model.ops),
        checksums=sums,
        seed=seed,
        tolerance=tolerance_of(program),
        reference=REFERENCE if sums else "",
        info=facts,
        kind="onnx",
    )
    manifest.write(directory)
    return manifest


def _records(program: CapturedProgram) -> Iterator[KernelRecord]:
    """The semantic operators of the graph, each a function of the model."""
    for node in program.graph_module.graph.nodes:
        operator = operator_of(node)
        if operator is not None:
            cost = cost_of(node)
            yield KernelRecord(
                name=node.name,
                op=operator.name,
                file=ONNX_MODEL,
                bytes=cost.bytes,
                flops=cost.flops,
                replaces=tuple(node.meta.get("replaces", ())),
            )
