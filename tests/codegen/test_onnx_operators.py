"""Translations to ONNX, operator by operator: what onnxruntime computes is what torch computes."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kimigraph.ir.operators
from kimigraph.adapters.onnx_file import read_onnx
from kimigraph.adapters.onnx_model import OnnxSession, model_proto, write_model
from kimigraph.capture import capture_module, load_source
from kimigraph.codegen.onnx.model import OnnxModel, translate_program
from kimigraph.codegen.onnx.scope import OPSET
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import CompileError
from kimigraph.ir.onnx_format import DOMAIN

OPS = torch.ops.kimigraph
assert kimigraph.ir.operators.OPERATORS  # importing it defines them


class Formula(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


def exported(function: Callable[..., Any], tensors: tuple[Tensor, ...], flat: bool = False) -> OnnxModel:
    copies = tuple(tensor.clone() for tensor in tensors)
    return translate_program(capture_module(Formula(function), copies, {}, CompileConfig()), flat)


def run_both(
    path: Path, function: Callable[..., Any], tensors: tuple[Tensor, ...], flat: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Results, then new states, by onnxruntime and by torch."""
    model = exported(function, tensors, flat)
    write_model(model_proto(model, DOMAIN, OPSET), path / "model.onnx", None)
    got = OnnxSession(path / "model.onnx", 1).run(dict(zip([p.name for p in model.inputs], tensors, strict=True)))
    copies = [tensor.clone() for tensor in tensors]
    with torch.no_grad():
        result = function(*copies)
    want = list(result) if isinstance(result, tuple) else [result]
    want += [copies[[p.name for p in model.inputs].index(name)] for name in model.states]
    return list(got.values()), want


def check(path: Path, function: Callable[..., Any], *tensors: Tensor, flat: bool = False) -> None:
    got, want = run_both(path, function, tensors, flat)
    assert len(got) == len(want) > 0
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)
    if not (flat and any(node.op == "Scan" for node in read_onnx(path / "model.onnx").nodes)):
        for mine, theirs in zip(read_back(path / "model.onnx", tensors), want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)


def read_back(path: Path, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Results, then new states, of the module that the file is as a source."""
    source = load_source(str(path), CompileConfig())
    module, args, _ = source.build()
    names = [port.name for port in read_onnx(path).inputs]
    given = dict(zip(names, (tensor.clone() for tensor in tensors), strict=True))
    states = args[-1] if args and isinstance(args[-1], dict) else {}
    with torch.no_grad():
        result = module(*(given[name] for name in names if name not in states), *([given] if states else []))
    return [*result, *(given[name] for name in states)]


X = torch.linspace(-3, 3, 24).reshape(2, 3, 4)
POSITIVE = X.abs() + 0.1
IDS = torch.tensor([[2, 0, 1], [1, 1, 2]])
FORMULAS: dict[str, Callable[[Tensor], Any]] = {
    "exp": lambda x: x.exp() + x.neg().sigmoid() - x.tanh() * x.cos() / x.sin(),
    "roots": lambda x: x.abs().sqrt() + (x.square() + 1).rsqrt() + (x.abs() + 1).log() + x.abs().log1p(),
    "activations": lambda x: F.silu(x) + F.softplus(x) + F.gelu(x) + F.gelu(x, approximate="tanh") + F.relu(x),
    "softplus_beta": lambda x: F.softplus(x, beta=2.0),
    "alpha": lambda x: torch.add(x, x.exp(), alpha=0.5) - 2,
    "integers": lambda x: (x.round().int() // 3, x.round().long() % 3, x.round().int().remainder(-2)),
    "rounding": lambda x: (torch.div(x, 0.7, rounding_mode="floor"), torch.div(x, 0.7, rounding_mode="trunc")),
    "remainder": lambda x: x.remainder(0.7),
    "comparisons": lambda x: (x > 0, x <= 1, x == x[0, 0, 0], x.int() != 2, (x > 0) & ~(x > 1), (x > 0) ^ (x > 1)),
    "promotion": lambda x: x.int() + x.long() * 0.5,
    "clamp": lambda x: x.clamp(-1, 1) + x.clamp(min=0) + x.clamp(max=0.5),
    "where": lambda x: torch.where(x > 0, x, 0.5) + x.masked_fill(x > 1, -math.inf).clamp(min=-9),
    "logaddexp": lambda x: torch.logaddexp(x, torch.full_like(x, -math.inf)) + torch.logaddexp(x, -x),
    "nan_to_num": lambda x: (x.log()).nan_to_num(nan=3.0, neginf=-7.0),
    "views": lambda x: x.reshape(6, 4).t().unsqueeze(1).squeeze(1).view(2, 2, 6).permute(2, 0, 1).flatten(1),
    "slices": lambda x: (x[:, 1:], x[..., ::2], x[:, -1], x[1], x.select(2, -2)),
    "splits": lambda x: (*x.split(3, dim=2), *x.split([1, 2], dim=1), *x.chunk(2, dim=2), *x.unbind(0)),
    "joins": lambda x: torch.cat([x, x.new_zeros(2, 0, 4), x + 1], dim=1).sum() + torch.stack([x, x], dim=-1),
    "pads": lambda x: F.pad(x, (1, 0, 2, 1), value=5.0),
    "repeats": lambda x: x.repeat(2, 1, 3) + x.flip(1).repeat_interleave(2, dim=0).repeat(1, 1, 3),
    "expand": lambda x: x[:, :1].expand(2, 3, 4) * torch.arange(4) + torch.ones(3, 1) + torch.full((4,), 2.5),
    "triangles": lambda x: x.triu(1) + x.tril(),
    "reductions": lambda x: (x.sum(-1), x.mean((0, 2), keepdim=True), x.amax(1), x.amin(1), x.sum(), (x > 0).sum(-1)),
    "quantifiers": lambda x: ((x > 0).any(-1), (x > -9).all(1), (x > 0).any()),
    "extremes": lambda x: (*x.max(dim=1), *x.min(dim=-1, keepdim=True), x.argmax(-1), x.argmin(0), x.argmax()),
    "softmax": lambda x: x.softmax(-1) + x.softmax(1),
    "logsumexp": lambda x: x.masked_fill(x < 2, -math.inf).logsumexp(-1),
    "norms": lambda x: F.layer_norm(x, (4,), x[0, 0], x[0, 1]) + F.layer_norm(x, (3, 4)) + F.rms_norm(x, (4,), x[1, 1]),
    "products": lambda x: (x @ x.transpose(1, 2), torch.einsum("abc,dbc->ad", x, x), F.linear(x, x[0], x[0, :, 0])),
    "addmm": lambda x: torch.addmm(x[0], x[0, :, :3], x[1, :3], alpha=0.5, beta=2.0),
    "convolution": lambda x: F.conv1d(x, torch.ones(3, 1, 2), groups=3, padding=1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "masked_attention": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.eye(3).bool(), scale=0.3),
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: (*x.sort(dim=-1, descending=True, stable=True), x.argsort(dim=1, stable=True)),
    "embedding": lambda x: F.embedding(IDS, x[0]) + x[0][IDS],
    "gather": lambda x: x.gather(2, IDS.unsqueeze(1)) + x.index_select(1, IDS[0])[..., :3],
    "index": lambda x: (x[:, IDS], x[IDS.clamp(max=1), IDS], x[IDS.clamp(max=1), :, IDS], x[:, IDS, IDS], x[-1, IDS]),
    "scatter": lambda x: (
        x.scatter(2, IDS.unsqueeze(1), 9.0),
        x.scatter(1, IDS.unsqueeze(-1), -x),
        x.scatter_add(1, IDS[:, :1].unsqueeze(-1), -x),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_has_the_values_of_torch(name: str, tmp_path: Path) -> None:
    check(tmp_path, FORMULAS[name], X)


def written_slice(x: Tensor, state: Tensor) -> Tensor:
    state[:, 1:3] = x[:, :2]
    state[0, 0].mul_(2)
    return state.sum()


def written_rows(x: Tensor, state: Tensor) -> Tensor:
    state.index_copy_(1, torch.tensor([2, 0, 1]), x)
    state[torch.tensor([0, 1]), torch.tensor([1, 2])] = x[:, 0]
    state.index_put_((torch.tensor([1, 1]), torch.tensor([0, 0])), x[:, 1], accumulate=True)
    return state + 1


def written_columns(x: Tensor, state: Tensor) -> Tensor:
    state[:, :, torch.tensor([3, 1])] = x[:, :, :2]
    state[:, ::2] = 0.5
    return x


@pytest.mark.parametrize("step", [written_slice, written_rows, written_columns])
def test_states_that_are_written_in_place_come_out(step: Callable[..., Tensor], tmp_path: Path) -> None:
    check(tmp_path, step, X, X.flip(0).contiguous())


def test_equal_values_are_taken_in_the_order_of_their_places(tmp_path: Path) -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, -0.0, 0.0, 3.0, 1.0], [2.0] * 7])
    got, _ = run_both(tmp_path, lambda x: x.topk(4).indices, (x,))
    assert got[0].tolist() == [[1, 2, 5, 0], [0, 1, 2, 3]]
    got, _ = run_both(tmp_path, lambda x: x.topk(4, largest=False).indices, (x,))
    assert got[0].tolist() == [[3, 4, 0, 6], [0, 1, 2, 3]]


def indexer(q: Tensor, keys: Tensor, weights: Tensor, lengths: Tensor) -> Tensor:
    return OPS.lightning_indexer(q, keys, weights, lengths, k=5, scale=0.5)


def attention(q: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, indices: Tensor) -> Tensor:
    return OPS.sparse_attention(q, q_rope, latent, rope, indices, scale=0.4)


def experts(x: Tensor, logits: Tensor, bias: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return OPS.moe_experts(
        x, logits, bias, gate_up, down, picks=2, renormalize=True, scale=1.5, groups=2, group_picks=1
    )


def decode(*tensors: Tensor) -> Tensor:
    return OPS.kda_decode(*tensors, scale=0.5, state_layout="vk")


def prefill(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    return OPS.kda_prefill(q, k, v, g, beta, state, scale=0.5, l2_norm=True, state_layout="vk")


def convolution(x: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    return OPS.short_conv(x, weight, state, activation=True)


def residual(a: Tensor, b: Tensor, query: Tensor) -> Tensor:
    return OPS.attention_residual([a, b], query, eps=1e-6)


def drawn(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


SEMANTIC: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "LightningIndexer": (
        indexer,
        (*drawn((2, 2, 4, 8), (2, 9, 8), (2, 2, 4)), torch.tensor([3, 8], dtype=torch.int32)),
    ),
    "SparseAttention": (
        attention,
        (
            *drawn((2, 1, 3, 6), (2, 1, 3, 4), (2, 9, 6), (2, 9, 4)),
            torch.tensor([[[0, 3, 8, -1]], [[-1, -1, -1, -1]]], dtype=torch.int32),
        ),
    ),
    "MoeExperts": (experts, drawn((3, 8), (3, 4), (4,), (4, 12, 8), (4, 8, 6))),
    "KdaDecode": (decode, drawn((2, 1, 24), (24, 4), (2, 24, 3), (2, 1, 8), (8,), (2,), (2, 1, 2), (2, 2, 4, 4))),
    "KdaPrefill": (prefill, drawn((2, 6, 2, 4), (2, 6, 2, 4), (2, 6, 2, 3), (2, 6, 2, 4), (2, 6, 2), (2, 2, 3, 4))),
    "ShortConv": (convolution, drawn((2, 6, 8), (8, 4), (2, 8, 3))),
    "AttentionResidual": (residual, drawn((2, 3, 8), (2, 3, 8), (8,))),
}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", SEMANTIC)
def test_a_semantic_operator_is_a_function_whose_body_computes_it(name: str, flat: bool, tmp_path: Path) -> None:
    function, tensors = SEMANTIC[name]
    if name == "KdaPrefill":  # decays, not growth
        tensors = (*tensors[:3], -tensors[3].abs(), tensors[4].sigmoid(), tensors[5])
    check(tmp_path, function, *tensors, flat=flat)
    proto = onnx.load(str(tmp_path / "model.onnx"))
    assert [item.name for item in proto.functions] == ([] if flat else [name])
    domains = {node.domain for node in proto.graph.node}
    assert domains == ({""} if flat else {"", DOMAIN}) or domains == {DOMAIN}


def test_the_indexer_breaks_ties_by_the_smaller_index(tmp_path: Path) -> None:
    q, keys, weights = torch.ones(1, 1, 2, 4), torch.zeros(1, 8, 4), torch.ones(1, 1, 2)
    keys[0, [5, 6, 7]] = 1
    tensors = (q, keys, weights, torch.tensor([8], dtype=torch.int32))
    got, want = run_both(tmp_path, indexer, tensors)
    assert got[0].tolist() == want[0].tolist() == [[[0, 1, 5, 6, 7]]]


def test_equal_calls_share_a_function_and_others_have_their_own(tmp_path: Path) -> None:
    def twice(a: Tensor, b: Tensor, query: Tensor) -> Tensor:
        first = OPS.attention_residual([a, b], query, eps=1e-6)
        second = OPS.attention_residual([first, b], query, eps=1e-6)
        return OPS.attention_residual([a, b, second], query, eps=1e-6)

    model = exported(twice, drawn((2, 8), (2, 8), (8,)))
    assert [item.name for item in model.functions] == ["AttentionResidual", "AttentionResidual_2"]
    check(tmp_path, twice, *drawn((2, 8), (2, 8), (8,)))


def test_a_prompt_of_any_length_has_a_body_of_the_same_size() -> None:
    sizes: list[int] = []
    for tokens in (4, 64):
        q, v = torch.ones(1, tokens, 1, 4), torch.ones(1, tokens, 1, 4)
        model = exported(prefill, (q, q, v, -q, torch.ones(1, tokens, 1), torch.ones(1, 1, 4, 4)))
        (function,) = model.functions
        sizes.append(len(function.ops))
    assert sizes[0] == sizes[1]


def test_operators_without_translation_are_listed_all_at_once() -> None:
    def odd(x: Tensor) -> Tensor:
        return torch.fft.rfft(x).abs() + torch.linalg.matrix_exp(x[:, :3, :3]).sum() + torch.special.i0(x)[..., :3]

    with pytest.raises(CompileError) as caught:
        exported(odd, (X,))
    assert all(name in str(caught.value) for name in ("matrix_exp", "i0", "fft")), caught.value
    assert "operators have no translation" in str(caught.value)


@pytest.mark.parametrize("reader", ["alias", "view", "result", "late"])
def test_a_state_that_is_read_later_is_not_written_early(reader: str, tmp_path: Path) -> None:
    """The old value under another name, through a view, as a result, or after the step: it stays what it was."""
    tensors = SEMANTIC["KdaDecode"][1]
    path = tmp_path / "model.onnx"
    write_model(model_proto(exported(decode, tensors), DOMAIN, OPSET), path, None)
    proto = onnx.load(str(path))
    state = proto.graph.input[7].name
    make, last = onnx.helper.make_node, len(proto.graph.node)
    read = {
        "alias": [(0, make("Identity", [state], ["same"])), (last + 1, make("Neg", ["same"], ["read"]))],
        "view": [(0, make("Transpose", [state], ["turned"])), (last + 1, make("Neg", ["turned"], ["read"]))],
        "result": [(0, make("Identity", [state], ["read"]))],
        "late": [(last, make("Neg", [state], ["read"]))],
    }[reader]
    for place, node in read:
        proto.graph.node.insert(place, node)
    proto.graph.output.append(onnx.ValueInfoProto(name="read"))
    path.write_bytes(proto.SerializeToString())
    old = tensors[7].clone()
    want = {"alias": -old, "view": -old.permute(3, 2, 1, 0), "result": old, "late": -old}[reader]
    values = read_back(path, tensors)
    torch.testing.assert_close(values[1], want)
    copies = [tensor.clone() for tensor in tensors]
    torch.testing.assert_close(values[0], decode(*copies))
    torch.testing.assert_close(values[-1], copies[7])
