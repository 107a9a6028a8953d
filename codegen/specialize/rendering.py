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
    inline_shared_text(tree, lines, set())
    return "\n".join(lines[tree.body[0].end_lineno :]).strip() + "\n"


def inline_shared_text(tree: ast.Module, lines: list[str], seen: set[str]) -> None:
    """Replace each import of a template, in ``lines``, by the functions of that template and of those it imports."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_TEMPLATE_PACKAGE):
            assert node.end_lineno is not None
            for number in range(node.lineno - 1, node.end_lineno):
                lines[number] = ""
            name = (node.module or "").removeprefix(_TEMPLATE_PACKAGE)
            if name not in seen:
                seen.add(name)
                lines[node.lineno - 1] = "\n" + _functions(name, seen) + "\n"


def _functions(name: str, seen: set[str]) -> str:
    """A shared template without its docstring and its imports; the templates that it imports come first."""
    source = (_TEMPLATES / f"{name}.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    lines = source.splitlines()
    for node in tree.body:
        is_own = isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_TEMPLATE_PACKAGE)
        if isinstance(node, ast.Import | ast.ImportFrom) and not is_own:
            assert node.end_lineno is not None
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    inline_shared_text(tree, lines, seen)
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines[tree.body[0].end_lineno :])).strip()


def is_hopper(target: str) -> bool:
    """Whether kernels for ``target`` run on compute capability 9.0; for "cuda" that is up to the device here."""
    if target == "cuda":
        return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return target == "cuda:sm_90"


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
    return KernelLaunch(function, types, {**absent, **constants}, divisible=tuple(types), options=options)
