"""What the builders share: the template's text with its constants filled in, tile sizes, views of a request."""

import ast
import pprint
import re
from pathlib import Path
from typing import Any

import torch

from kimigraph.codegen.kernel import KernelLaunch, KernelRequest, TensorSpec
from kimigraph.ir.errors import CompileError

_TEMPLATES = Path(__file__).parent.parent / "templates"
_TEMPLATE_PACKAGE = "kimigraph.codegen.templates."
TRITON_TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int32": "i32",
    "int64": "i64",
    "bool": "i1",
    "uint8": "u8",
    "float8_e4m3fn": "fp8e4nv",
}


def render(op: str, constants: dict[str, Any]) -> str:
    """The template of ``op`` without its module docstring and type-checker comment, ``CONSTANTS`` written out."""
    source = (_TEMPLATES / f"{op}.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    lines = source.splitlines()
    placeholder = next(
        node for node in tree.body if isinstance(node, ast.AnnAssign) and "CONSTANTS" in ast.dump(node.target)
    )
    lines[placeholder.lineno - 1] = "CONSTANTS: dict[str, Any] = " + pprint.pformat(
        constants, width=116, sort_dicts=False
    )
    shared = _Shared()
    shared.inline(tree, lines)
    own = {text for node in tree.body for text in _imported(node)}
    # After the template's own "import" lines: a file of kernels always has that of torch.
    last = max(node.lineno for node in tree.body if isinstance(node, ast.Import))
    lines[last - 1] = "\n".join([lines[last - 1], *sorted(shared.imports - own)])
    text = "\n".join(lines[tree.body[0].end_lineno :]).strip() + "\n"
    names = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert len(names) == len(set(names)), f"the template {op} and what it shares define a name twice"
    return text


class _Shared:
    """The text that templates have in common: where one imports another, that one's functions stand in its place."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.imports: set[str] = set()

    def inline(self, tree: ast.Module, lines: list[str]) -> None:
        """Replace each import of a template in ``lines``, the text of ``tree``; nothing is written twice."""
        for node in tree.body:
            name = _template(node)
            if name is None:
                continue
            _blank(node, lines)
            if name not in self.seen:
                self.seen.add(name)
                lines[node.lineno - 1] = "\n" + self._functions(name) + "\n"

    def _functions(self, name: str) -> str:
        source = (_TEMPLATES / f"{name}.py").read_text(encoding="utf-8")
        tree = ast.parse(source)
        lines = source.splitlines()
        for node in tree.body:
            if _template(node) is None and (statements := _imported(node)):
                self.imports |= statements
                _blank(node, lines)
        self.inline(tree, lines)
        return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines[tree.body[0].end_lineno :])).strip()


def _imported(node: ast.stmt) -> set[str]:
    """An import statement as one statement a name; nothing for another statement."""
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return set()
    before = f"from {node.module} import" if isinstance(node, ast.ImportFrom) else "import"
    return {f"{before} {alias.name}" + (f" as {alias.asname}" if alias.asname else "") for alias in node.names}


def _template(node: ast.stmt) -> str | None:
    """The name of the template that the statement imports from, if it does."""
    module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
    return module.removeprefix(_TEMPLATE_PACKAGE) if module.startswith(_TEMPLATE_PACKAGE) else None


def _blank(node: ast.stmt, lines: list[str]) -> None:
    last = node.end_lineno or node.lineno
    lines[node.lineno - 1 : last] = [""] * (last - node.lineno + 1)


def is_hopper(target: str) -> bool:
    """Whether kernels for ``target`` run on compute capability 9.0; for "cuda" that is up to the device here."""
    if target == "cuda":
        return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return target == "cuda:sm_90"


def programs_at_once(target: str, each: int) -> int:
    """How many programs a launch on ``target`` may have that wait for one another, ``each`` a multiprocessor.

    A power of two; an H200 is assumed where the device is not here.
    """
    count = 132
    if target == "cuda" and torch.cuda.is_available():
        count = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return 1 << ((count * each).bit_length() - 1)


def padded(size: int, least: int = 1) -> int:
    """The smallest power of two that is no less than ``size`` and ``least``; Triton tiles have such sides only."""
    return max(least, 1 << max(size - 1, 0).bit_length())


def ceil_div(size: int, block: int) -> int:
    """How many blocks cover ``size``."""
    return -(-size // block)


def needed(request: KernelRequest, name: str) -> TensorSpec:
    """The operand's specification; CompileError if the call gives none or its dtype has no Triton type here."""
    spec = request.tensors.get(name)
    if spec is None:
        raise CompileError(f"{describe(request)}: the kernel needs the operand {name!r}; pass it in the model's call")
    if spec.dtype not in TRITON_TYPES:
        raise refuse(request, f"{name} is {spec.dtype}", f"the kernel reads {', '.join(TRITON_TYPES)}")
    return spec


def refuse(request: KernelRequest, reason: str, remedy: str) -> CompileError:
    """The error of a request that a template cannot serve."""
    return CompileError(f"{describe(request)}: {reason}; {remedy}")


def describe(request: KernelRequest) -> str:
    """The operator and its operands' shapes, for messages."""
    shapes = ", ".join(
        f"{name} {list(spec.shape)} {spec.dtype}" for name, spec in request.tensors.items() if spec is not None
    )
    return f"kernel for {request.op} ({shapes})"


def expanded(spec: TensorSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of ``spec`` broadcast to ``shape``; 0 along a broadcast axis."""
    missing = len(shape) - len(spec.shape)
    sizes = (1,) * missing + spec.shape
    strides = (0,) * missing + spec.stride
    return tuple(0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=True))


def ahead_of_time(
    function: str,
    arguments: dict[str, TensorSpec | str | None],
    constants: dict[str, Any],
    options: dict[str, Any],
) -> KernelLaunch:
    """The launch for an ahead-of-time build; an argument is its tensor, a dtype (of scratch or result) or absent."""
    types = {
        name: "*" + TRITON_TYPES[given if isinstance(given, str) else given.dtype]
        for name, given in arguments.items()
        if given is not None
    }
    absent: dict[str, Any] = {name: None for name, given in arguments.items() if given is None}
    divisible = tuple(name for name in types if getattr(arguments[name], "aligned", True))
    return KernelLaunch(function, types, {**absent, **constants}, divisible, options)
