"""Generated pointwise kernels: each form alone, and random programs whose regions run as kernels."""

import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from kimigraph.codegen.pointwise import build_nodes, build_region
from kimigraph.codegen.pointwise.tiles import Tiles
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import CompileError
from kimigraph.ir.program import CapturedProgram, InputSpec, OutputSpec
from kimigraph.ir.purity import mutated_arguments, storage_root
from kimigraph.passes import PassContext, Pipeline, run_pipeline
from kimigraph.passes.fuse_pointwise import FusePointwise

PROGRAMS = Path(__file__).parents[1] / "passes" / "pointwise" / "random_programs.py"
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}
NUMBER = itertools.count()
BF16 = torch.bfloat16


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


RANDOM = load(PROGRAMS)


@pytest.fixture
def kernel_of(tmp_path: Path) -> Callable[[str], ModuleType]:
    """The module of a kernel's text; what it allocates starts as NaN or as another strange number."""

    def make(text: str) -> ModuleType:
        path = tmp_path / f"pointwise_{next(NUMBER)}.py"
        path.write_text(text, encoding="utf-8")
        module = load(path)
        vars(module)["torch"] = Poisoned()
        return module

    return make


class Poisoned:
    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty_strided(self, *arguments: Any, **options: Any) -> Tensor:
        tensor = torch.empty_strided(*arguments, **options)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else 77)


def compare(found: Any, wanted: Any) -> None:
    for ours, eager in zip(found, wanted, strict=True):
        assert ours.dtype is eager.dtype and ours.shape == eager.shape and ours.stride() == eager.stride()
        limit = TOLERANCE.get(eager.dtype, 0.0)
        torch.testing.assert_close(ours, eager, rtol=limit, atol=limit, equal_nan=True)


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.float()).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = x.view(2, 1, 4, 16).transpose(1, 2)
    a, b = heads[..., :8], heads[..., 8:]
    return heads * cos + torch.cat([-b, a], -1) * sin


def situ(gate: Tensor, up: Tensor) -> Tensor:
    wide, linear = gate.float(), up.float()
    activated = 4.0 * torch.tanh(wide / 4.0) * torch.sigmoid(wide)
    return (activated * (25.0 * torch.tanh(linear / 25.0))).to(gate.dtype)


def updated(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    before = state.sum(-1)
    state.copy_(state * 0.5 + x)
    return before, x * 2


def cached(cache: Tensor, row: Tensor, place: Tensor, x: Tensor) -> Tensor:
    return cache.index_put_([row, place], (x.float() * 2).to(cache.dtype))


def routed(scores: Tensor, picks: Tensor) -> Tensor:
    weights = scores.gather(-1, picks)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5


def tie_count(x: Tensor) -> Tensor:
    third = x / 3
    return (third == third.amax(-1, keepdim=True)).sum(-1)


def constants(x: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    true, half = torch.ones(4, 9, dtype=torch.bool, device=x.device), torch.full((4, 9), 0.5, device=x.device)
    chosen = torch.where(~true, x, half.exp() - half)
    return (
        x * true,
        ~true,
        (m & true) ^ true,
        m | ~true,
        chosen.sum(-1) + x.amax(-1),
        (half > 0.25) & m,
        x + half.tanh(),
    )


def signed_zeros(x: Tensor) -> tuple[Tensor, ...]:
    zero = x * 0.0
    return 1.0 / -zero, 1.0 / (-x * 0.0), (-x.to(torch.int32)) * 2


def divided(x: Tensor) -> tuple[Tensor, ...]:
    """Rounded down, also below 0; what is left is never negative."""
    quotients = x // 64, torch.div(x, 7, rounding_mode="floor"), x // 3, x // 1
    return *quotients, x % 64, x % 7, x.remainder(1) + x, (x // 32) * 4 + x % 4


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


CASES: dict[str, tuple[Callable[..., Any], Callable[[], list[Tensor]]]] = {
    "norm": (norm, lambda: [randn(3, 1, 60, dtype=BF16), randn(60, dtype=BF16)]),
    "rope": (rope, lambda: [randn(2, 1, 64, dtype=BF16), randn(1, 16), randn(1, 16)]),
    "situ": (situ, lambda: [randn(300, dtype=BF16) * 3, randn(300, dtype=BF16) * 30]),
    "router": (lambda x, b: (torch.sigmoid(x), torch.sigmoid(x) + b), lambda: [randn(2, 8), randn(8)]),
    "routed": (routed, lambda: [torch.rand(3, 8), torch.randint(0, 8, (3, 2))]),
    "signed zeros": (signed_zeros, lambda: [torch.tensor([0.0, -0.0, 3.0, -3.0])]),
    "updated": (updated, lambda: [randn(4, 8), randn(4, 8)]),
    "cached": (
        cached,
        lambda: [
            *(randn(2, 16, 8, dtype=BF16), torch.arange(2).unsqueeze(1)),
            *(torch.tensor([[3], [-1]]), randn(2, 1, 8, dtype=BF16)),
        ],
    ),
    "softmax across": (lambda x: torch.softmax(x, 1), lambda: [randn(2, 5, 8)]),
    "softmax turned": (lambda x: torch.softmax(x.mT.float(), -1).to(BF16), lambda: [randn(2, 4, 8, dtype=BF16)]),
    "log softmax": (lambda x: torch.log_softmax(x, -1), lambda: [randn(5, 9, dtype=BF16)]),
    "embedding": (
        lambda w, i: torch.embedding(w, i).float() * 2,
        lambda: [randn(10, 8, dtype=BF16), torch.tensor([[1, 9], [0, 3]])],
    ),
    "ties": (tie_count, lambda: [randn(4, 9, dtype=BF16)]),
    "integers": (
        lambda x: torch.where(x > 0.1, x, -x).to(torch.int32) * torch.arange(9, device=x.device) + (x > 0),
        lambda: [randn(4, 9, dtype=BF16) * 10],
    ),
    "divided": (divided, lambda: [torch.arange(-128, 128, dtype=torch.int32).to(torch.int8)]),
    "divided in 32 bits": (divided, lambda: [torch.tensor([*range(-70, 70), -(2**31), 1 - 2**31, 2**31 - 1]).int()]),
    "divided in 64 bits": (divided, lambda: [torch.tensor([*range(-70, 70), -(2**63), 1 - 2**63, 2**63 - 1])]),
    "join": (lambda x, y: torch.cat([x, y.to(BF16), x * 2], 1).relu(), lambda: [randn(4, 3, dtype=BF16), randn(4, 5)]),
    "pad": (lambda x: F.pad(x, (1, 2), value=0.5) * 2, lambda: [randn(4, 3, dtype=BF16)]),
    "truth": (lambda m, x: (~m & (x > 0)) | (x < -1), lambda: [torch.rand(70) > 0.5, randn(70)]),
    "hidden": (lambda m, x: x.masked_fill(m, -torch.inf).softmax(-1), lambda: [torch.rand(7, 9) > 0.5, randn(7, 9)]),
    "activations": (
        lambda x: (F.gelu(x) + F.gelu(x, approximate="tanh") + F.silu(x) + F.softplus(x)).clamp(-1, 2),
        lambda: [randn(70) * 3],
    ),
    "near zero": (
        lambda x: (torch.tanh(x) / x, torch.log1p(x) / x, torch.exp(x)),
        lambda: [torch.logspace(-6, -1, 50)],
    ),
    "all of it": (lambda x: x.square().sum(), lambda: [randn(70)]),
    "turned": (
        lambda x, g: x.transpose(1, 2).reshape(3, -1) * torch.sigmoid(g),
        lambda: [randn(3, 40, 70), randn(3, 2800)],
    ),
    "turned in steps": (lambda x: (x.t() * 2).contiguous(), lambda: [randn(40, 300, dtype=BF16).t()]),
    "turned, both ways": (lambda x, y: x.mT + y * 2, lambda: [randn(2, 70, 300), randn(2, 300, 70)]),
    "constants": (constants, lambda: [randn(4, 9), torch.rand(4, 9) > 0.5]),
    "one element": (lambda x: (x * 2).sum(-1) + 1, lambda: [randn(1, 1)]),
    "not numbers": (lambda x: (x.relu(), x.clamp(-1, 1), x.amax(-1)), lambda: [randn(3, 4) * torch.nan]),
}


def build(function: Callable[..., Any], operands: list[Tensor], tiles: Tiles | None = None) -> str:
    nodes = list(make_fx(function, tracing_mode="fake")(*(t.clone() for t in operands)).graph.nodes)
    members = [node for node in nodes if node.op == "call_function"]
    return build_nodes(members, nodes[-1].args[0], [n for n in nodes if n.op == "placeholder"], tiles).text


def check(text: str, function: Callable[..., Any], operands: list[Tensor], kernel_of: Any) -> None:
    ours, eager = ([t.clone() for t in operands] for _ in range(2))
    wanted = as_tuple(function(*eager))
    found = as_tuple(kernel_of(text).launch(*ours))
    compare([*found, *ours], [*wanted, *eager])


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_computes_what_eager_does(name: str, kernel_of: Any) -> None:
    torch.manual_seed(0)
    function, operands = CASES[name]
    given = operands()
    check(build(function, given), function, given, kernel_of)


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("name", ["norm", "softmax across", "hidden", "routed", "ties"])
def test_rows_of_any_tile(name: str, rows: int, kernel_of: Any) -> None:
    torch.manual_seed(0)
    function, operands = CASES[name]
    given = operands()
    check(build(function, given, Tiles(rows, 64, 4)), function, given, kernel_of)


@pytest.mark.parametrize(
    "name", ["norm", "softmax across", "log softmax", "hidden", "routed", "ties", "updated", "all of it"]
)
def test_a_row_that_is_read_in_steps(name: str, kernel_of: Any) -> None:
    torch.manual_seed(0)
    function, operands = CASES[name]
    given = operands()
    text = build(function, given, Tiles(1, 4, 4, held=False))
    assert "for start in range(" in text
    check(text, function, given, kernel_of)


@pytest.mark.parametrize("by", [128, 300, 0, -3, 2.0])
@pytest.mark.parametrize("operation", [torch.remainder, torch.floor_divide])
def test_divisors_that_the_type_does_not_hold_are_left_to_eager(operation: Callable[..., Tensor], by: float) -> None:
    with pytest.raises(CompileError, match=r"only integers are divided|is not positive"):
        build(lambda x: operation(x, by), [torch.arange(9, dtype=torch.int8)])


def test_what_lies_beside_a_view_stays(kernel_of: Any) -> None:
    """Operands are slices with strides and offsets of their own; nothing outside is read or written."""
    torch.manual_seed(0)
    store = torch.full((6, 9), torch.nan)
    store[1:5, 2:8] = randn(4, 6)
    x = store[1:5, 2:8]
    nodes = list(make_fx(lambda t: t * 2 + 1, tracing_mode="fake")(x).graph.nodes)
    text = build_nodes([n for n in nodes if n.op == "call_function"], nodes[-1].args[0], nodes[:1]).text
    compare([kernel_of(text).launch(x)], [x * 2 + 1])
    state = make_fx(lambda t, y: t.copy_(y * 2).sum() * 0, tracing_mode="fake")(x, torch.ones(4, 6))
    nodes = [node for node in state.graph.nodes if node.name in ("t_1", "y_1", "mul", "copy_")]
    text = build_nodes(nodes[2:], [], nodes[:2]).text
    kernel_of(text).launch(x, torch.ones(4, 6))
    assert torch.equal(x, torch.full((4, 6), 2.0))
    assert store.isnan().sum() == 6 * 9 - 4 * 6


class WithKernels(Interpreter):
    """Runs a graph with a generated kernel for each region."""

    def __init__(self, module: GraphModule, kernel_of: Callable[[str], ModuleType]) -> None:
        super().__init__(module)
        self.kernel_of, self.regions = kernel_of, 0

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        self.regions += 1
        return self.kernel_of(build_region(self.fetch_attr(target)).text).launch(*args)


def as_program(function: Callable[..., Any], tensors: list[Tensor]) -> CapturedProgram:
    module = make_fx(function, tracing_mode="fake")(*(tensor.clone() for tensor in tensors))
    written = {storage_root(found) for node in module.graph.nodes for found in mutated_arguments(node)}
    inputs = tuple(
        InputSpec(
            *(node.name, "cache" if node in written else "input", node.name, tuple(value.shape), value.stride()),
            str(value.dtype).removeprefix("torch."),
            mutated=node in written,
        )
        for node, value in ((n, n.meta["val"]) for n in module.graph.nodes if n.op == "placeholder")
    )
    results = list(module.graph.nodes)[-1].args[0]
    return CapturedProgram(module, inputs, tuple(OutputSpec(f"out_{n}", f"[{n}]") for n in range(len(results))))


def check_program(program: Any, kernel_of: Any, device: str) -> None:
    """A random program with kernels for its regions against eager, updated state included."""
    tensors = program.tensors(device)
    captured = as_program(program, tensors)
    run_pipeline(captured, Pipeline((FusePointwise(),)), PassContext(CompileConfig()))
    ours, eager = ([t.clone() for t in tensors] for _ in range(2))
    wanted = program(*eager)
    with torch.no_grad():
        found = WithKernels(captured.graph_module, kernel_of).run(*ours)
    scale = max(1.0, *(float(t.float().nan_to_num(0, 0, 0).abs().max()) for t in wanted))
    for new, old in zip([*found, *ours], [*wanted, *eager], strict=True):
        assert new.dtype is old.dtype and new.stride() == old.stride()
        limit = TOLERANCE.get(program.dtype, 0.0) if old.is_floating_point() else 0.0
        torch.testing.assert_close(new.float(), old.float(), rtol=limit, atol=limit * scale, equal_nan=True)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=RANDOM.programs(most=6))
def test_random_programs_on_kernels(program: Any, kernel_of: Any) -> None:
    check_program(program, kernel_of, "cpu")
