"""A ``.onnx`` file as a source."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimigraph.adapters.onnx_file import FileNode, FilePort, OnnxFile, StoredTensor, read_onnx
from kimigraph.capture.hints import CaptureHints, InputHint
from kimigraph.capture.onnx.audit import check_file
from kimigraph.capture.onnx.module import Inputs, build_module, input_ports
from kimigraph.capture.onnx.weights import held_weights
from kimigraph.capture.signature import call_leaves
from kimigraph.capture.source import Arguments, Loaded, ModelSource
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.descriptors import parse_descriptor
from kimigraph.ir.errors import CompileError, UsageError
from kimigraph.ir.onnx_format import NEXT, PHASE, RANGE, STATE, VALUE
from kimigraph.ir.seeded import seeded_tensor


def onnx_source(path: Path, config: CompileConfig) -> ModelSource:
    """The source that the file is: one step with the sizes that it says.

    ``config.overrides`` (``--set``) give open sizes by name, and the file's properties: ``state <input>`` names the
    output with the new value of a state, ``range <input>`` the bounds of its integers, ``value <input>`` what an input
    of one element always is. Raises UsageError for a file that is damaged or not to be trusted, CaptureError that lists
    operators without a translation.
    """
    if config.dtype:
        raise UsageError(f"--dtype does not apply to {path}: the file has the types that it was written with")
    file = check_file(read_onnx(path))
    properties = {**file.metadata, **dict(config.overrides)}
    file = _with_values(file, properties)
    states = _states(file, properties)
    inputs = input_ports(file, states, {name: int(text) for name, text in properties.items() if text.isdigit()})
    ranges = {name: _range(file, name, properties) for name in _integers(inputs)}
    module = build_module(file, inputs, states)
    arguments = partial(_arguments, inputs, ranges, config.seed)
    args, kwargs = arguments(None)
    ports = [*inputs.plain.values(), *inputs.states.values()]
    leaves = call_leaves(module, args, kwargs)
    hints = {leaf.name: _hint(port, ranges, port.name in states) for leaf, port in zip(leaves, ports, strict=True)}
    results = tuple(port.name for port in file.outputs if port.name not in states.values())
    return ModelSource(
        name=path.stem,
        model_type="onnx",
        phase="prefill" if properties.get(PHASE, config.phase) == "prefill" else "decode",
        load=lambda device: Loaded(module, arguments),
        hints=CaptureHints(hints, results),
        document={"onnx": _digest(path), "properties": properties, "states": states},
    )


def onnx_weights(path: Path) -> dict[str, Tensor]:
    """The weights of the file by the names that a program compiled from it has for them; errors as ``onnx_source``."""
    return held_weights(check_file(read_onnx(path)))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _states(file: OnnxFile, properties: Mapping[str, str]) -> dict[str, str]:
    """Each state's input and the output with its new value: as the properties say, else by their names."""
    inputs = {port.name: port for port in file.inputs}
    outputs = {port.name: port for port in file.outputs}
    told = {key.removeprefix(STATE): value for key, value in properties.items() if key.startswith(STATE)}
    for name, output in told.items():
        if name not in inputs or output not in outputs:
            raise UsageError(
                f"{file.path}: the property '{STATE}{name}' = '{output}' names what the file does not have; its inputs "
                f"are {_few(inputs)}, its outputs {_few(outputs)}"
            )
    if len(set(told.values())) < len(told):
        raise UsageError(f"{file.path}: two states have one output")
    for name in inputs:
        for output in (f"{name}{NEXT}", f"{name}_next", name.replace("past_key_values", "present")):
            if output != name and output in outputs and name not in told and output not in told.values():
                told[name] = output
    return told


def _with_values(file: OnnxFile, properties: Mapping[str, str]) -> OnnxFile:
    """The file with inputs that are always one number as constants."""
    told = {key.removeprefix(VALUE): text for key, text in properties.items() if key.startswith(VALUE)}
    inputs = {port.name: port for port in file.inputs}
    fixed: list[StoredTensor] = []
    for name, text in told.items():
        port = inputs.pop(name, None)
        if port is None or port.dtype is None:
            raise UsageError(f"{file.path}: the property '{VALUE}{name}' names no input; the file has {_few(inputs)}")
        shape = port.shape or ()
        if any(size != 1 for size in shape):
            raise UsageError(f"{file.path}: input '{name}' is {list(shape)}; '{VALUE}{name}' is for one element")
        try:
            value = torch.tensor(float(text)).to(port.dtype)
        except ValueError:
            raise UsageError(
                f"{file.path}: the property '{VALUE}{name}' is '{text}', and '{text}' is no number"
            ) from None
        data = value.reshape(1).view(torch.uint8).numpy().tobytes()
        fixed.append(StoredTensor(name, port.dtype, port.kind, tuple(1 for _ in shape), data))
    return replace(file, inputs=tuple(inputs.values()), weights=(*file.weights, *fixed)) if told else file


def _few(names: Mapping[str, Any]) -> str:
    return ", ".join(list(names)[:6]) + (" and others" if len(names) > 6 else "")


def _integers(inputs: Inputs) -> list[str]:
    ports = [*inputs.plain.values(), *inputs.states.values()]
    return [p.name for p in ports if p.dtype is not None and not (p.dtype.is_floating_point or p.dtype.itemsize == 1)]


def _range(file: OnnxFile, name: str, properties: Mapping[str, str]) -> tuple[int, int]:
    """Bounds of an integer input: what its property says, else as many as the smallest table that it picks from has."""
    text = properties.get(RANGE + name)
    if text is not None:
        try:
            low, high = (int(word) for word in text.split())
        except ValueError:
            raise UsageError(f"{file.path}: the property '{RANGE}{name}' is '{text}'; give 'LOW HIGH'") from None
        return low, high
    return 0, max(min(_picked_from(file, name), default=1), 1)


_KEEPS = ("Cast", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Identity", "Concat", "Transpose", "Slice")


def _picked_from(file: OnnxFile, name: str) -> list[int]:
    """The sizes of the axes of weights and inputs that the input called ``name`` picks places of."""
    shapes: dict[str, tuple[Any, ...]] = {tensor.name: tensor.shape for tensor in file.weights}
    shapes |= {port.name: port.shape for port in file.inputs if port.shape is not None}
    same, sizes = {name}, list[int]()
    for node in file.nodes:
        if node.op in _KEEPS and same & set(node.inputs[:1]):
            same |= set(node.outputs)
        elif node.op in ("Gather", "GatherElements", "ScatterElements", "ScatterND", "GatherND"):
            sizes += _size_of_axis(node, same, shapes)
    return sizes


def _size_of_axis(node: FileNode, same: set[str], shapes: dict[str, tuple[Any, ...]]) -> list[int]:
    shape = shapes.get(node.inputs[0], ())
    axis = node.attributes.get("axis", 0)
    if node.inputs[1] not in same or not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
        return []
    return [shape[axis]] if isinstance(shape[axis], int) else []


def _hint(port: FilePort, ranges: dict[str, tuple[int, int]], state: bool) -> InputHint:
    descriptor = ""
    if state and port.note:
        try:
            descriptor = str(parse_descriptor(port.note))
        except CompileError:
            descriptor = ""  # a note of somebody else's
    return InputHint("cache" if state else "input", ranges.get(port.name), descriptor)


def _arguments(inputs: Inputs, ranges: dict[str, tuple[int, int]], seed: int, length: int | None) -> Arguments:
    def made(port: FilePort, kind: str) -> Tensor:
        assert port.dtype is not None and port.shape is not None
        shape = tuple(int(size) for size in port.shape)
        return seeded_tensor(port.name, shape, port.dtype, kind, seed, ranges.get(port.name))

    plain = tuple(made(port, "input") for port in inputs.plain.values())
    states = {name: made(port, "cache") for name, port in inputs.states.items()}
    return (*plain, states) if inputs.states else plain, {}
