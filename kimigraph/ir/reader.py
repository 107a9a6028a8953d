"""A printed program back as a program: the inverse of ``kimigraph.ir.printer``, for reproducers and dumps.

The nodes keep their names. What the text does not hold is lost: where nodes came from, and the selections' names.
"""

import ast
import inspect
import operator
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kimigraph.ir.errors import CompileError
from kimigraph.ir.fake import infer
from kimigraph.ir.program import CapturedProgram, InputSpec, OutputSpec


def read_program(
    step: Callable[..., Any], inputs: Sequence[InputSpec], outputs: Sequence[str], constants: Mapping[str, torch.Tensor]
) -> CapturedProgram:
    """The program whose printed ``step`` function, ``INPUTS``, ``OUTPUTS`` and ``CONSTANTS`` these are.

    Raises CompileError naming the line for a statement that no printed program has.
    """
    reader = _Reader(inspect.unwrap(step).__globals__, constants)
    mode = FakeTensorMode(shape_env=ShapeEnv())  # for sizes that depend on data
    for spec in inputs:
        node = reader.input(spec.name)
        with mode:
            node.meta["val"] = torch.empty_strided(spec.shape, spec.stride, dtype=getattr(torch, spec.dtype))
    for statement in _function(step).body:
        reader.read(statement)
    graph_module = GraphModule(reader.root, reader.graph)
    with enable_python_dispatcher():  # some operators take no symbolic size without it
        for node in reader.graph.nodes:
            if node.op not in ("placeholder", "output"):
                infer(node)
    tensors = {spec.name: constants[spec.source] for spec in inputs if spec.kind == "constant"}
    return CapturedProgram(graph_module, tuple(inputs), tuple(OutputSpec(name, name) for name in outputs), tensors)


class _Reader:
    """Reads statements one by one into a graph; ``_names`` maps variables to nodes."""

    def __init__(self, variables: Mapping[str, Any], constants: Mapping[str, torch.Tensor]) -> None:
        self.graph, self.root = Graph(), torch.nn.Module()
        self._variables, self._constants = dict(variables), constants
        self._names: dict[str, Node] = {}

    def input(self, name: str) -> Node:
        """The next placeholder."""
        self._names[name] = self.graph.placeholder(name)
        return self._names[name]

    def read(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Return) and statement.value is not None:
            self.graph.output(self._value(statement.value))
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            self._names[name] = self._node(statement.value, name)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            self._node(statement.value, None)
        elif not isinstance(statement, ast.Delete | ast.Expr):
            raise _unreadable(statement)

    def _node(self, expression: ast.expr, name: str | None) -> Node:
        if isinstance(expression, ast.Subscript):
            source: Any = expression.value
            if isinstance(source, ast.Name) and source.id == "CONSTANTS":
                return self._constant(self._value(expression.slice))
            target, args, kwargs = operator.getitem, (self._value(source), self._value(expression.slice)), {}
        elif isinstance(expression, ast.Call):
            target = self._value(expression.func)
            args = tuple(self._value(argument) for argument in expression.args)
            kwargs = {str(keyword.arg): self._value(keyword.value) for keyword in expression.keywords}
            if isinstance(target, FunctionType) and target.__name__.startswith("run_"):
                return self._region(target, args, name)
        else:
            raise _unreadable(expression)
        if not isinstance(target, OpOverload) and getattr(target, "__module__", "") not in (
            "_operator",
            "math",
            "torch",
        ):
            raise _unreadable(expression)
        return self.graph.create_node("call_function", target, args, kwargs, name=name)

    def _region(self, function: FunctionType, args: tuple[Any, ...], name: str | None) -> Node:
        """A call of the region that is printed as ``function``; its docstring says what it is called."""
        tree = _function(function)
        title = (ast.get_docstring(tree) or "").removeprefix("Region ").removesuffix(".")
        target, _, kind = title.partition(", ")
        if not hasattr(self.root, target):
            inner = _Reader(self._variables, self._constants)
            for parameter in tree.args.args:
                inner.input(parameter.arg)
            for statement in tree.body:
                inner.read(statement)
            self.root.add_module(target, GraphModule(inner.root, inner.graph))
        node = self.graph.create_node("call_module", target, args, {}, name=name)
        if kind:
            node.meta["region"] = kind
        return node

    def _constant(self, name: str) -> Node:
        attribute = name.replace(".", "_")
        self.root.register_buffer(attribute, self._constants[name])
        return self.graph.get_attr(attribute)

    def _value(self, expression: ast.expr) -> Any:
        """The value of an argument, in which variables are nodes."""
        code = compile(ast.Expression(expression), "<printed program>", "eval")
        return eval(code, self._variables, self._names)


def _function(function: Callable[..., Any]) -> ast.FunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    return tree


def _unreadable(node: ast.stmt | ast.expr) -> CompileError:
    return CompileError(
        f"line {node.lineno} of the printed step, `{ast.unparse(node)}`, is no statement of a printed program, so it "
        "cannot be read back"
    )
