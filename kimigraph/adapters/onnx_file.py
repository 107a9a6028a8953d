# pyright: basic
# Reason: onnx carries no usable types.
"""An ONNX file as plain records. Nothing is loaded but the file itself: weights beside it are places, no data."""

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from kimigraph.adapters.onnx_model import LARGEST_PROTO, MODULES, TYPES, require_onnx
from kimigraph.ir.errors import UsageError

UNSAID = "no type"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file: ``data`` are its bytes, or ``external`` says where they lie (keys as in the file).

    ``dtype`` is None for an element type that has none here; ``kind`` is ONNX' name of the type.
    """

    name: str
    dtype: torch.dtype | None
    kind: str
    shape: tuple[int, ...]
    data: bytes
    external: dict[str, str] | None = None


@dataclass(frozen=True)
class Reference:
    """An attribute inside a function: the value of the call's attribute of that name."""

    name: str


@dataclass(frozen=True)
class Foreign:
    """An attribute of a kind that no operator here has (a sparse tensor, a type, a list of graphs)."""

    kind: str


@dataclass(frozen=True)
class FileGraph:
    """A graph that is an attribute: a branch, or the body of a loop. It may read what is made around it."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: "tuple[StoredTensor, ...]"
    nodes: "tuple[FileNode, ...]"
    foreign: tuple[str, ...]
    outer: tuple[str, ...]
    """The names that it reads and does not make."""


@dataclass(frozen=True)
class FileNode:
    """One node. ``inputs`` that are left out are empty names."""

    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    scopes: tuple[str, ...] = ()
    """The paths of the modules that the node was written in, from the outermost, where the exporter says them."""

    @property
    def graphs(self) -> dict[str, FileGraph]:
        """The graphs among its attributes."""
        return {name: value for name, value in self.attributes.items() if isinstance(value, FileGraph)}

    @property
    def reads(self) -> tuple[str, ...]:
        """All names that must be made before it: its inputs, and what its graphs read from around them."""
        return (*self.inputs, *(name for graph in self.graphs.values() for name in graph.outer))

    @property
    def title(self) -> str:
        """What a message calls the node."""
        return self.name or next((name for name in self.outputs if name), "") or self.op


@dataclass(frozen=True)
class FilePort:
    """An input or output of the graph; unknown sizes are names, or empty."""

    name: str
    dtype: torch.dtype | None
    kind: str
    shape: tuple[int | str, ...] | None
    note: str


@dataclass(frozen=True)
class FileFunction:
    """A function of the model."""

    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[str, ...]
    nodes: tuple[FileNode, ...]
    opset: int


@dataclass(frozen=True)
class OnnxFile:
    """All of a file. ``foreign`` names parts of it that no step here has, such as sparse weights."""

    path: Path
    producer: str
    opsets: dict[str, int]
    inputs: tuple[FilePort, ...]
    outputs: tuple[FilePort, ...]
    weights: tuple[StoredTensor, ...]
    nodes: tuple[FileNode, ...]
    functions: tuple[FileFunction, ...]
    metadata: dict[str, str]
    foreign: tuple[str, ...]


def read_onnx(path: Path) -> OnnxFile:
    """The records of a file. UsageError for one that is too large for a protocol buffer, or is none of ONNX."""
    require_onnx(("onnx",))
    from google.protobuf.message import DecodeError
    from onnx import ModelProto

    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise UsageError(f"{path} is no regular file: give an ONNX file")
    if facts.st_size > LARGEST_PROTO:
        raise UsageError(
            f"{path} has {facts.st_size / 2**30:.1f} GiB, and a protocol buffer holds 2: save it with external data"
        )
    proto = ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise UsageError(f"{path} is no ONNX file, or a damaged one ({error})") from None
    if not proto.HasField("graph") or not proto.opset_import:
        raise UsageError(f"{path} is no ONNX file: it holds no graph, or says no opset")
    return _file(path, proto)


def _file(path: Path, proto: Any) -> OnnxFile:
    graph = proto.graph
    training = (f"{len(proto.training_info)} training graphs",) if proto.training_info else ()
    return OnnxFile(
        path=path,
        producer=proto.producer_name,
        opsets=_opsets(proto.opset_import),
        inputs=tuple(map(_port, graph.input)),
        outputs=tuple(map(_port, graph.output)),
        weights=tuple(map(_tensor, graph.initializer)),
        nodes=tuple(_nodes(graph.node)),
        functions=tuple(map(_function, proto.functions)),
        metadata={item.key: item.value for item in proto.metadata_props},
        foreign=(*_foreign(graph), *training),
    )


def _opsets(imports: Any) -> dict[str, int]:
    return {"" if item.domain == "ai.onnx" else item.domain: item.version for item in imports}


def _function(proto: Any) -> FileFunction:
    return FileFunction(
        domain=proto.domain,
        name=proto.name,
        inputs=tuple(proto.input),
        outputs=tuple(proto.output),
        attributes=(*proto.attribute, *(item.name for item in proto.attribute_proto)),
        nodes=tuple(_nodes(proto.node)),
        opset=_opsets(proto.opset_import).get("", 0),
    )


def _nodes(protos: Any) -> Iterator[FileNode]:
    for proto in protos:
        yield FileNode(
            op=proto.op_type,
            domain="" if proto.domain == "ai.onnx" else proto.domain,
            name=proto.name,
            inputs=tuple(proto.input),
            outputs=tuple(proto.output),
            attributes={item.name: _attribute(item) for item in proto.attribute},
            scopes=_scopes(proto),
        )


def _scopes(proto: Any) -> tuple[str, ...]:
    text = next((item.value for item in proto.metadata_props if item.key == MODULES), "[]")
    return tuple(re.findall(r"'([^']*)'", text))[:-1]


def _attribute(proto: Any) -> Any:
    from onnx import AttributeProto

    if proto.ref_attr_name:
        return Reference(proto.ref_attr_name)
    kind = AttributeProto.AttributeType.Name(proto.type)
    if kind in ("FLOAT", "INT"):
        return getattr(proto, kind[0].lower())
    if kind == "STRING":
        return proto.s.decode("utf-8", "replace")
    if kind in ("FLOATS", "INTS"):
        return list(getattr(proto, kind.lower()))
    if kind == "STRINGS":
        return [text.decode("utf-8", "replace") for text in proto.strings]
    if kind == "TENSOR":
        return _tensor(proto.t)
    return _graph(proto.g) if kind == "GRAPH" else Foreign(kind)


def _graph(proto: Any) -> FileGraph:
    inputs, weights = tuple(item.name for item in proto.input), tuple(map(_tensor, proto.initializer))
    nodes, outputs = tuple(_nodes(proto.node)), tuple(item.name for item in proto.output)
    made = {*inputs, *(tensor.name for tensor in weights), *(name for node in nodes for name in node.outputs), ""}
    read = dict.fromkeys([*(name for node in nodes for name in node.reads), *outputs])
    outer = tuple(name for name in read if name not in made)
    return FileGraph(inputs, outputs, weights, nodes, _foreign(proto), outer)


def _foreign(graph: Any) -> tuple[str, ...]:
    return (f"{len(graph.sparse_initializer)} sparse weights",) if graph.sparse_initializer else ()


def _kind(number: int) -> tuple[torch.dtype | None, str]:
    from onnx import TensorProto

    known = {name: dtype for dtype, name in TYPES.items()}
    try:
        name = TensorProto.DataType.Name(number)
    except ValueError:
        return None, f"type number {number}"
    return known.get(name), name


def _port(proto: Any) -> FilePort:
    which = proto.type.WhichOneof("value")
    if which != "tensor_type":
        return FilePort(proto.name, None, which or UNSAID, None, proto.doc_string)
    form = proto.type.tensor_type
    dtype, kind = _kind(form.elem_type)
    shape = None
    if form.HasField("shape"):
        sizes = form.shape.dim
        shape = tuple(size.dim_value if size.HasField("dim_value") else size.dim_param for size in sizes)
    return FilePort(proto.name, dtype, kind, shape, proto.doc_string)


_LISTS = {"FLOAT": ("float_data", "<f4"), "DOUBLE": ("double_data", "<f8"), "INT64": ("int64_data", "<i8")}
_SHORT = {"INT8": "i1", "UINT8": "u1", "BOOL": "u1", "FLOAT16": "<u2", "BFLOAT16": "<u2"}
_NARROW = {"INT32": "<i4", "INT16": "<i2", **_SHORT}


def _tensor(proto: Any) -> StoredTensor:
    from onnx import TensorProto

    dtype, kind = _kind(proto.data_type)
    external = None
    if proto.data_location == TensorProto.EXTERNAL:
        external = {item.key: item.value for item in proto.external_data}
    data = proto.raw_data
    if external is None and not proto.HasField("raw_data") and dtype is not None:
        field, form = _LISTS.get(kind) or ("int32_data", _NARROW[kind])
        values = getattr(proto, field)
        wide = numpy.fromiter(values, dtype="<i8" if field == "int32_data" else form, count=len(values))
        data = wide.astype(form).tobytes()
    return StoredTensor(proto.name, dtype, kind, tuple(proto.dims), data, external)
