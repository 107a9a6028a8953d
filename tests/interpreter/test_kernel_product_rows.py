"""Generated kernels of products of few rows, with what is done to rows and columns: each form, random programs."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from kimigraph.codegen.pointwise import build_nodes
from kimigraph.codegen.pointwise.product_tiles import ProductTiles
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.pointwise import Unfusable, lower

_PATH = Path(__file__).with_name("test_kernel_pointwise.py")
_SPEC = importlib.util.spec_from_file_location("pointwise_cases", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
SHARED: Any = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = SHARED
_SPEC.loader.exec_module(SHARED)
kernel_of = SHARED.kernel_of
BF16 = torch.bfloat16


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape).to(dtype)


def weight(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(shape) * shape[-1] ** -0.5).to(dtype)


def rms(x: Tensor, factor: Tensor) -> Tensor:
    return OPERATORS["rms_norm"].overload(x, factor, None, eps=1e-5)


def mixed(sources: list[Tensor], query: Tensor, factor: Tensor) -> Tensor:
    return OPERATORS["attention_residual"].overload(sources, query, factor, factor, eps=1e-5, out_eps=1e-5)


def gated(x: Tensor, both: Tensor) -> Tensor:
    gate, up = F.linear(x, both).chunk(2, -1)
    return F.silu(gate) * torch.tanh(up.float()).to(BF16)


def tail(x: Tensor, factor: Tensor, up: Tensor, s: Tensor, down: Tensor, residual: Tensor) -> Tensor:
    return (F.linear(rms(x, factor), up).view(residual.shape) + F.linear(torch.tanh(s) * 0.5, down)) + residual


def by_head(x: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    out = torch.bmm(x.transpose(0, 1), v.transpose(1, 2)).transpose(0, 1)
    return out.reshape(gate.shape) * torch.sigmoid(gate)


def of_two_widths(
    a: Tensor, b: Tensor, query: Tensor, factor: Tensor, w: Tensor, wide: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    x = mixed([a, b], query, factor)
    logits = F.linear(x.float(), wide)
    return F.linear(x, w), torch.sigmoid(logits), torch.sigmoid(logits) + 1


def written(x: Tensor, w: Tensor, state: Tensor) -> Tensor:
    product = F.linear(x, w)
    state.copy_(product + state)
    return product.relu()


CASES: dict[str, tuple[Callable[..., Any], Callable[[int], list[Tensor]]]] = {
    "residual": (lambda x, w, r: r + F.linear(x, w), lambda n: [randn(n, 1, 40), weight(50, 40), randn(n, 1, 50)]),
    "both used": (
        lambda x, w, r: (F.linear(x, w), (r + F.linear(x, w)).float()),
        lambda n: [randn(n, 40), weight(50, 40), randn(n, 50)],
    ),
    "gated": (gated, lambda n: [randn(n, 40), weight(48, 40)]),
    "bias": (
        lambda x, w, b: F.silu(F.linear(x, w, b)),
        lambda n: [randn(n, 40, dtype=torch.float32), weight(9, 40, dtype=torch.float32), torch.randn(9)],
    ),
    "norm": (lambda x, f, w: F.linear(rms(x, f), w), lambda n: [randn(n, 40), randn(40), weight(70, 40)]),
    "norm, kept": (
        lambda x, f, w: (rms(x, f), F.linear(rms(x, f), w) * 2),
        lambda n: [randn(n, 40), randn(40), weight(70, 40)],
    ),
    "tail": (
        tail,
        lambda n: [randn(n, 40), randn(40), weight(70, 40), randn(n, 1, 24), weight(70, 24), randn(n, 1, 70)],
    ),
    "by head": (by_head, lambda n: [randn(n, 4, 40), weight(4, 24, 40), randn(n, 1, 96)]),
    "mixed": (
        lambda a, b, q, f, w: F.linear(mixed([a, b], q, f), w),
        lambda n: [randn(n, 40), randn(n, 40), torch.randn(40), randn(40), weight(70, 40)],
    ),
    "two widths": (
        of_two_widths,
        lambda n: [
            *(randn(n, 40), randn(n, 40), torch.randn(40), randn(40)),
            *(weight(70, 40), weight(9, 40, dtype=torch.float32)),
        ],
    ),
    "written": (written, lambda n: [randn(n, 40), weight(50, 40), randn(n, 50)]),
    "gathered": (
        lambda x, w, i: torch.gather(x, 1, i).float() @ w.t(),
        lambda n: [
            randn(n, 40, dtype=BF16),
            randn(50, 24, dtype=torch.float32),
            torch.arange(24).mul(3).remainder(40).expand(n, 24).clone(),
        ],
    ),
    "columns first": (
        lambda x, w, r: x @ w + r,
        lambda n: [
            randn(n, 40, dtype=torch.float16),
            weight(40, 50, dtype=torch.float16),
            randn(n, 50, dtype=torch.float16),
        ],
    ),
}


def build(function: Callable[..., Any], operands: list[Tensor], tiles: ProductTiles | None = None) -> str:
    nodes = list(make_fx(function, tracing_mode="fake")(*(t.clone() for t in operands)).graph.nodes)
    twice: dict[Any, Any] = {}
    for node in nodes:  # equal calls are one node, as after canonicalize
        key = (node.target, tuple(node.args), tuple(node.kwargs.items())) if node.op == "call_function" else node
        first = twice.setdefault(str(key), node)
        if first is not node:
            node.replace_all_uses_with(first)
    members = [node for node in nodes if node.op == "call_function" and node in twice.values()]
    return build_nodes(members, nodes[-1].args[0], [n for n in nodes if n.op == "placeholder"], tiles).text


@pytest.mark.parametrize("lines", [1, 2, 5, 8])
@pytest.mark.parametrize("name", CASES)
def test_a_product_with_its_neighbours_is_what_eager_computes(name: str, lines: int, kernel_of: Any) -> None:
    torch.manual_seed(lines)
    function, operands = CASES[name]
    given = operands(lines)
    SHARED.check(build(function, given), function, given, kernel_of)


@pytest.mark.parametrize(
    ("name", "lines", "tiles"),
    [
        ("norm", 1, ProductTiles("held", 4, (64,), 4, 3, (6,), 2)),
        ("norm", 2, ProductTiles("held", 16, (64,), 4, 2, (3,))),
        ("tail", 1, ProductTiles("held", 4, (64, 32), 4, 4, (4,), 9)),
        ("two widths", 1, ProductTiles("held", 8, (64,), 4, 3, (3, 1), 2)),
        ("gated", 1, ProductTiles("stream", 4, (16,), 4, 3)),
        ("residual", 1, ProductTiles("stream", 4, (64,), 4, 1, early=True)),
        ("by head", 5, ProductTiles("stream", 2, (64,), 4, 1, early=True)),
        ("gated", 5, ProductTiles("stream", 2, (32,), 4, 3)),
        ("gated", 5, ProductTiles("dot", 16, (16,), 4, 3)),
        ("residual", 8, ProductTiles("dot", 64, (32,), 4, 3)),
    ],
)
def test_any_tiles_give_the_same(name: str, lines: int, tiles: ProductTiles, kernel_of: Any) -> None:
    torch.manual_seed(0)
    function, operands = CASES[name]
    given = operands(lines)
    SHARED.check(build(function, given, tiles), function, given, kernel_of)


def test_what_lies_outside_a_prepared_row_counts_for_nothing(kernel_of: Any) -> None:
    """The logarithm of the zeros beyond a row of 40 is infinite."""
    given = [torch.rand(1, 40) + 0.5, weight(70, 40, dtype=torch.float32)]
    SHARED.check(build(lambda x, w: F.linear(x.log(), w), given), lambda x, w: F.linear(x.log(), w), given, kernel_of)


@pytest.mark.parametrize(
    ("function", "operands", "reason"),
    [
        (lambda x, w: F.silu(F.linear(x, w)), [randn(9, 40), weight(50, 40)], "9 rows, more than 8"),
        (
            lambda x, v, w: F.linear(F.linear(x, v), w),
            [randn(1, 40), weight(50, 40), weight(9, 50)],
            "every element of",
        ),
        (lambda x, w: F.linear(x * 2, w), [randn(8, 2048), weight(9, 2048)], "fit into registers"),
        (lambda x, w: F.linear(x, w).t() * 1, [randn(2, 40), weight(50, 40)], "once for each row|once for each column"),
        (lambda x, w: F.linear(x, w).expand(3, 1, 50) * 1, [randn(1, 40), weight(50, 40)], "more than once"),
    ],
)
def test_what_a_kernel_of_products_cannot_be(function: Any, operands: list[Tensor], reason: str) -> None:
    nodes = list(make_fx(function, tracing_mode="fake")(*operands).graph.nodes)
    members = [node for node in nodes if node.op == "call_function"]
    with pytest.raises(Unfusable, match=reason):
        lower(members, [members[-1]])


@dataclass(frozen=True)
class Program:
    """Steps on a hidden row block; reads and writes ``state`` in between. ``lines`` may be too many for a kernel."""

    steps: tuple[tuple[str, int], ...]
    lines: int
    dtype: torch.dtype = torch.float32

    def tensors(self, device: str = "cpu") -> list[Tensor]:
        torch.manual_seed(len(self.steps))
        shapes = [(self.lines, 12), (self.lines, 12), (12,), (12, 12), (24, 12), (12, 20)]
        return [
            torch.randn(shape, device=device) * (shape[-1] ** -0.5 if i > 2 else 1) for i, shape in enumerate(shapes)
        ]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        x, state, factor, square, double, down = tensors
        values = [x]
        for name, back in self.steps:
            a = values[-1 - back % len(values)]
            values.append(self._step(name, a, state, factor, (square, double, down)))
        return (*values[-2:], state * 1)

    def _step(self, name: str, a: Tensor, state: Tensor, factor: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        square, double, down = weights
        if name == "write":
            return state.copy_(a.tanh()).clone()
        table: dict[str, Callable[[], Tensor]] = {
            "norm": lambda: rms(a, factor),
            "linear": lambda: F.linear(a, square),
            "gate": lambda: torch.sigmoid(F.linear(a, double)[:, :12]) * F.linear(a, double)[:, 12:],
            "down": lambda: F.linear(F.pad(a, (0, 8)).relu(), down),
            "add": lambda: a + state,
            "mix": lambda: mixed([a, state], factor, factor),
        }
        return table[name]()


@st.composite
def programs(draw: st.DrawFn) -> Program:
    names = st.sampled_from(("norm", "linear", "gate", "down", "add", "mix", "write"))
    steps = draw(st.lists(st.tuples(names, st.integers(0, 2)), min_size=2, max_size=7))
    return Program(tuple(steps), draw(st.sampled_from((1, 1, 2, 3, 9))))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=programs())
def test_random_programs_with_products_on_kernels(program: Program, kernel_of: Any) -> None:
    SHARED.check_program(program, kernel_of, "cpu")
