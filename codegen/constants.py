"""``constants.bin``: the tensors that belong to the program and not to a checkpoint, in the safetensors format."""

import torch
from torch.fx import GraphModule

from kimigraph.ir.errors import CompileError
from kimigraph.ir.program import CapturedProgram

CONSTANTS_FILE = "constants.bin"


def folded_constants(program: CapturedProgram) -> dict[str, torch.Tensor]:
    """Constants by name: placeholders of kind ``constant`` by that name, get_attr tensors by their target."""
    constants = {spec.name: _value(program, spec.name) for spec in program.inputs if spec.kind == "constant"}
    for node in program.graph_module.graph.nodes:
        if node.op == "get_attr":
            constants[str(node.target)] = _attribute(program.graph_module, str(node.target), node.name)
    return constants


def _value(program: CapturedProgram, name: str) -> torch.Tensor:
    if name not in program.tensors:
        raise CompileError(f"constant {name} has no value: a captured program holds the tensors of its constants")
    return program.tensors[name]


def _attribute(module: GraphModule, target: str, name: str) -> torch.Tensor:
    value: object = module
    for part in target.split("."):
        value = getattr(value, part, None)
    if not isinstance(value, torch.Tensor):
        raise CompileError(
            f"node {name} reads {target}, which is no tensor of the graph module: fold it or make it an input"
        )
    return value
