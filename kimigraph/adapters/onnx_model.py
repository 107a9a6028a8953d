# pyright: basic
# Reason: onnx and onnxruntime carry no usable types.
"""ONNX models through onnx and onnxruntime: protos from plain descriptions, files, the checker, sessions."""

from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimigraph.ir.errors import CompileError, UsageError

IR_VERSION = 10
LARGEST_PROTO = 2**31 - 2**24
MODULES = "pkg.torch.onnx.name_scopes"
"""What torch.onnx calls the paths of the modules around a node, as text of a Python list with the node's name last."""
TYPES = {
    torch.float32: "FLOAT",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.float64: "DOUBLE",
    torch.int64: "INT64",
    torch.int32: "INT32",
    torch.int16: "INT16",
    torch.int8: "INT8",
    torch.uint8: "UINT8",
    torch.bool: "BOOL",
}


OLDEST = {"onnx": (1, 18), "onnxruntime": (1, 22)}
"""The oldest releases that files are written and run with."""


def require_onnx(packages: Sequence[str] = ("onnx", "onnxruntime")) -> None:
    """UsageError that names the extra to install when one of ``packages`` is missing or too old."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UsageError(f"ONNX needs {' and '.join(missing)}: pip install 'kimigraph[onnx]'")
    for name in packages:
        numbers = tuple(int(part) for part in version(name).split(".")[:2] if part.isdigit())
        if numbers < OLDEST[name]:
            oldest = ".".join(map(str, OLDEST[name]))
            raise UsageError(f"{name} {version(name)} is older than {oldest}: pip install -U 'kimigraph[onnx]'")


def element_type(dtype: torch.dtype, name: str = "") -> int:
    """ONNX' number of an element type. CompileError, naming the tensor, for a type that no model here has."""
    from onnx import TensorProto

    if dtype not in TYPES:
        raise CompileError(
            f"{name or 'a constant or a cast'} is in {dtype}, which ONNX export does not take: convert it, or keep it "
            "out of the step"
        )
    return TensorProto.DataType.Value(TYPES[dtype])


def tensor_proto(name: str, tensor: Tensor) -> Any:
    """A tensor as a proto with raw data."""
    from onnx import TensorProto

    flat = tensor.detach().cpu().contiguous()
    data = flat.reshape(-1).view(torch.uint8).numpy().tobytes()
    return TensorProto(name=name, dims=list(tensor.shape), data_type=element_type(tensor.dtype, name), raw_data=data)


def _attribute(key: str, value: Any) -> Any:
    from onnx import GraphProto, helper

    if hasattr(value, "ops"):
        value = GraphProto(
            name=value.name,
            node=[_node(op) for op in value.ops],
            input=[_value(port) for port in value.inputs],
            output=[_value(port) for port in value.outputs],
        )
    elif isinstance(value, Tensor):
        value = tensor_proto("", value)
    elif isinstance(value, torch.dtype):
        value = element_type(value)
    return helper.make_attribute(key, value)


def _node(op: Any) -> Any:
    from onnx import NodeProto

    attributes = [_attribute(key, value) for key, value in op.attributes.items()]
    node = NodeProto(
        op_type=op.kind, input=op.inputs, output=op.outputs, attribute=attributes, domain=op.domain, doc_string=op.note
    )
    if op.modules:
        node.metadata_props.add(key=MODULES, value=repr([*op.modules, op.note.partition(":")[0]]))
    return node


def model_proto(model: Any, domain: str, opset: int) -> Any:
    """The proto of an ``OnnxModel`` (``kimigraph.codegen.onnx.model``)."""
    from onnx import FunctionProto, GraphProto, ModelProto, helper

    imports = [helper.make_opsetid("", opset), helper.make_opsetid(domain, 1)]
    functions = [
        FunctionProto(
            name=item.name,
            domain=domain,
            input=item.inputs,
            output=item.outputs,
            attribute=list(item.attributes),
            node=[_node(op) for op in item.ops],
            opset_import=imports[:1],
            doc_string=item.summary,
        )
        for item in model.functions
    ]
    # Viewers show what is no node inside the boxes that read it, and not as a box with lines to all of them.
    numbers = {op.outputs[0]: op.attributes["value"] for op in model.ops if _is_number(op)}
    graph = GraphProto(
        name=model.name,
        node=[_node(op) for op in model.ops if not _is_number(op)],
        initializer=[tensor_proto(name, tensor) for name, tensor in {**numbers, **model.weights}.items()],
        input=[_value(port) for port in model.inputs],
        output=[_value(port) for port in model.outputs],
    )
    proto = ModelProto(
        ir_version=IR_VERSION,
        opset_import=imports if functions else imports[:1],
        producer_name="kimigraph",
        graph=graph,
        functions=functions,
    )
    helper.set_model_props(proto, model.metadata)
    return proto


def _is_number(op: Any) -> bool:
    """Whether a node is a number or a short list of integers."""
    value = op.attributes.get("value") if op.kind == "Constant" else None
    if not isinstance(value, Tensor):
        return False
    return value.numel() == 1 or (not value.is_floating_point() and value.nbytes < 1024)


def _value(port: Any) -> Any:
    from onnx import helper

    return helper.make_tensor_value_info(
        port.name, element_type(port.dtype, port.name), port.shape, doc_string=port.note
    )


def write_model(proto: Any, path: Path, data: str | None) -> None:
    """Write the model; with ``data``, weights go to the file of that name beside it. Checked after writing.

    CompileError when the checker refuses the file.
    """
    import onnx

    if data is None:
        onnx.save_model(proto, str(path))
    else:
        onnx.save_model(
            proto, str(path), save_as_external_data=True, all_tensors_to_one_file=True, location=data,
            size_threshold=1024,
        )  # fmt: skip
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except onnx.checker.ValidationError as error:
        raise CompileError(f"onnx.checker refuses what was written: {error}") from error


class OnnxSession:
    """A model file in onnxruntime, on the CPU."""

    def __init__(self, path: Path, threads: int | None = None, bound: dict[str, Tensor] | None = None) -> None:
        """``bound`` are inputs that become weights of the session, as they are now.

        CompileError when onnxruntime cannot run the model.
        """
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if threads is not None:
            options.intra_op_num_threads = threads
        try:
            model = str(path) if bound is None else _with_weights(path, bound)
            self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises classes of its own that have no common base
            raise CompileError(f"onnxruntime {onnxruntime.__version__} does not run {path.name}: {error}") from error
        self.inputs: Sequence[str] = [item.name for item in self._session.get_inputs()]
        self.outputs: Sequence[str] = [item.name for item in self._session.get_outputs()]

    def run(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """One run: the outputs by name, as new tensors."""
        feeds = {name: tensors[name].detach().contiguous().numpy() for name in self.inputs}
        values: Any = self._session.run(None, feeds)
        return {
            name: torch.from_numpy(value) if value.shape else torch.tensor(value)
            for name, value in zip(self.outputs, values, strict=True)
        }


def _with_weights(path: Path, bound: dict[str, Tensor]) -> bytes:
    """The model with inputs of these names as weights. CompileError for more than a proto holds."""
    import onnx

    size = sum(tensor.nbytes for tensor in bound.values())
    if size > LARGEST_PROTO:
        raise CompileError(
            f"the weights take {size / 2**30:.1f} GiB, and onnxruntime takes 2 GiB from memory at once; compile for "
            "cpu:reference"
        )
    proto = onnx.load(str(path))
    free = [item for item in proto.graph.input if item.name not in bound]
    del proto.graph.input[:]
    proto.graph.input.extend(free)
    proto.graph.initializer.extend(tensor_proto(name, tensor) for name, tensor in bound.items())
    return proto.SerializeToString()
