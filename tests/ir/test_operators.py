"""What holds for every semantic operator: schema, documentation, reference, fake implementation and cost agree."""

import inspect
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.utils._pytree import tree_leaves, tree_map_only

from kimigraph.ir.operators import OPERATORS, Cost, cost_of, operator_of
from kimigraph.ir.operators.shapes import check
from kimigraph.ir.reference import kda_decode as reference_module

NAMES = sorted(OPERATORS)


def test_the_operators_of_this_language():
    assert NAMES == [
        "attention_residual",
        "attention_residual_history",
        "attention_residual_merge",
        "exchange_picks",
        "fp8_quantize",
        "hadamard_rows",
        "index_key_write",
        "index_scores",
        "kda_decode",
        "kda_decode_logged",
        "kda_prefill",
        "kda_prefill_deltas",
        "kda_replay",
        "kda_verify",
        "kda_verify_states",
        "latent_attention",
        "latent_write",
        "lightning_indexer",
        "moe_experts",
        "mxfp4_quantize",
        "mxfp8_quantize",
        "rank_gather",
        "rank_sum",
        "rms_norm",
        "short_conv",
        "sparse_attention",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_schema_reference_fake_and_cost_take_the_same_arguments(name):
    operator = OPERATORS[name]
    declared = [(a.name, a.has_default_value()) for a in operator.overload._schema.arguments]
    for function in (operator.reference, operator.fake):
        taken = [(p.name, p.default is not p.empty) for p in inspect.signature(function).parameters.values()]
        assert taken == declared
    assert str(operator.overload._schema).startswith(f"kimigraph::{name}(")


@pytest.mark.parametrize("name", NAMES)
def test_the_documentation_says_what_an_operator_must_say(name):
    operator = OPERATORS[name]
    for part in ("Shapes:", "Source:", "Errors:", "Returns"):
        assert part in operator.documentation, part
    for argument in operator.overload._schema.arguments:
        known = argument.name == "descriptor" or re.search(rf"\b{argument.name}\b", operator.documentation)
        assert known, argument.name
    assert 0 < len(operator.summary) < 80
    source = inspect.getsource(inspect.getmodule(operator.reference))
    shared = source.replace("from kimigraph.ir.reference.", "")  # their text comes along into a program
    assert "import kimigraph" not in shared and "from kimigraph" not in shared


def tensors_in(value):
    return [item for item in tree_leaves(value) if isinstance(item, torch.Tensor)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", NAMES)
def test_fake_and_reference_agree(name, seed, example):
    """Shapes, dtypes and contiguity, at random shapes with every optional operand given and left out."""
    args, kwargs = example(name, seed)
    mode = FakeTensorMode()
    fakes, fake_kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
    before = tree_map_only(torch.Tensor, torch.clone, args)
    with mode:
        expected = OPERATORS[name].overload(*fakes, **fake_kwargs)
    got = OPERATORS[name].overload(*args, **kwargs)
    if expected is None:
        assert got is None
    else:
        pairs = zip(got, expected, strict=True) if isinstance(expected, tuple | list) else [(got, expected)]
        for real, fake in pairs:
            assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())
    written = {a.name for a in OPERATORS[name].overload._schema.arguments if a.alias_info and a.alias_info.is_write}
    for argument, old, new in zip(OPERATORS[name].overload._schema.arguments, before, args, strict=False):
        if argument.name not in written:
            assert all(torch.equal(a, b) for a, b in zip(tensors_in(old), tensors_in(new), strict=True)), argument.name
    cost = OPERATORS[name].cost(*fakes, **fake_kwargs)
    assert isinstance(cost, Cost) and cost.bytes > 0 and cost.flops >= 0


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name, seed, example):
    args, kwargs = example(name, seed)
    torch.library.opcheck(
        OPERATORS[name].overload,
        args,
        kwargs,
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


@pytest.mark.parametrize("name", NAMES)
def test_export_captures_one_node(name, example):
    args, kwargs = example(name, 1)

    class Model(torch.nn.Module):
        def forward(self, *tensors):
            result = OPERATORS[name].overload(*tensors, **kwargs)
            return tensors_in(tensors)[0] + 0 if result is None else result

    with torch.no_grad():
        exported = torch.export.export(Model(), args, strict=False)
    calls = [node for node in exported.graph.nodes if operator_of(node) is OPERATORS[name]]
    assert len(calls) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_replaced_reference_is_what_runs(name, example, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("the reference ran")

    monkeypatch.setattr(OPERATORS[name], "reference", fail)
    args, kwargs = example(name, 1)
    with pytest.raises(RuntimeError, match="the reference ran"):
        OPERATORS[name].overload(*args, **kwargs)


def test_costs_of_a_known_size():
    """One sequence, 32 heads of 128 over 1024 bf16 keys: 256 KiB of keys dominate."""
    mode = FakeTensorMode()
    with mode:
        q = torch.empty(1, 1, 32, 128, dtype=torch.bfloat16)
        keys, weights = q.new_empty(1, 1024, 128), q.new_empty(1, 1, 32)
    cost = OPERATORS["lightning_indexer"].cost(q, keys, weights, k=128, scale=1.0)
    assert cost == Cost(bytes=1024 * 128 * 2 + 32 * 128 * 2 + 32 * 2 + 128 * 4, flops=1024 * 32 * (2 * 128 + 2))
    with mode:
        state = torch.empty(1, 2, 4, 4)
        qkv, weight, window = torch.empty(1, 1, 24), torch.empty(24, 4), torch.empty(1, 24, 3)
        gate, bias, rate, beta = torch.empty(1, 1, 8), torch.empty(8), torch.empty(2), torch.empty(1, 1, 2)
    cost = OPERATORS["kda_decode"].cost(qkv, weight, window, gate, bias, rate, beta, state, scale=1.0)
    assert cost.bytes == 4 * (2 * (32 + 72) + 24 + 96 + 8 + 8 + 2 + 2 + 8)


def test_cost_of_reads_a_node(build):
    program = build(
        lambda x, w: torch.ops.kimigraph.short_conv(x, w, None, activation=True)[0],
        {"x": torch.randn(1, 3, 2), "w": torch.randn(2, 4)},
    )
    nodes = list(program.graph_module.graph.nodes)
    node = next(node for node in nodes if operator_of(node))
    assert cost_of(node).flops == 2 * 3 * 2 * 4
    with pytest.raises(ValueError, match="no semantic operator"):
        cost_of(nodes[0])
    assert operator_of(Graph().call_function(torch.ops.aten.add.Tensor, (1, 2))) is None


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("lightning_indexer", {"keys": torch.zeros(1, 5, 7)}, "keys is [1, 5, 7], want [B, T, D] with B = 1, D = 4"),
        ("lightning_indexer", {"weights": torch.zeros(1, 2, 2)}, "weights is [1, 2, 2], want [B, S, H]"),
        ("lightning_indexer", {"lengths": torch.zeros(1)}, "lengths is torch.float32, want an integer type"),
        ("lightning_indexer", {"mask": torch.zeros(1, 1, 5)}, "mask is torch.float32, want torch.bool"),
        ("lightning_indexer", {"scale": -1.0}, "want scale > 0"),
        (
            "lightning_indexer",
            {"block_table": torch.zeros(2, 2, dtype=torch.int32)},
            "block_table is [2, 2], want [B, N]",
        ),
    ],
)
def test_shapes_that_do_not_fit(name, change, message):
    arguments = {"q": torch.zeros(1, 1, 2, 4), "keys": torch.zeros(1, 5, 4), "weights": torch.zeros(1, 1, 2)}
    with pytest.raises(ValueError) as caught:
        OPERATORS[name].fake(**{**arguments, "k": 2, "scale": 1.0, **change})
    assert message in str(caught.value) and str(caught.value).startswith(name)


def test_a_shape_error_says_what_is_known():
    with pytest.raises(ValueError, match=r"op: y is \[3, 5\], want \[A, B\] with A = 3, B = 4"):
        check("op", x=(torch.zeros(3, 4), "A B"), nothing=(None, "A"), y=(torch.zeros(3, 5), "A B"))
    assert check("op", x=(torch.zeros(3, 4), "A B")) == {"A": 3, "B": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state_layout": "kk"}, "state_layout 'kk', want 'kv'"),
        ({"state": torch.zeros(1, 2, 4, 5)}, "kda_decode: qkv has 28 channels"),
        ({"a_log": torch.zeros(3)}, "a_log has 3 elements"),
        ({"conv_state": torch.zeros(1, 28, 2)}, "conv_state holds 2 inputs, a width of 4"),
        ({"gate": torch.zeros(1, 1, 9)}, "gate is [1, 1, 9]"),
    ],
)
def test_decode_shapes_that_do_not_fit(change, message):
    arguments = {
        "qkv": torch.zeros(1, 1, 28),
        "conv_weight": torch.zeros(28, 4),
        "conv_state": torch.zeros(1, 28, 3),
        "gate": torch.zeros(1, 1, 8),
        "dt_bias": torch.zeros(8),
        "a_log": torch.zeros(2),
        "beta": torch.zeros(1, 1, 2),
        "state": torch.zeros(1, 2, 4, 6),
    }
    assert OPERATORS["kda_decode"].fake(**arguments, scale=1.0).shape == (1, 1, 2, 6)
    with pytest.raises(ValueError) as caught:
        OPERATORS["kda_decode"].fake(**{**arguments, **change}, scale=1.0)
    assert message in str(caught.value)
    assert reference_module.kda_decode is OPERATORS["kda_decode"].reference
