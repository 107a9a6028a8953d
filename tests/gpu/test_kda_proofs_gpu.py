"""KDA at full width against fp64, token by token: after many steps, at any cut, with keys and gates at their worst."""

import importlib.util
from typing import Any

import pytest
import torch
from triton.runtime.autotuner import Autotuner

from kimigraph.bench import kda_decode, kda_prefill
from kimigraph.bench.kernels import kernel_for
from kimigraph.bench.peers import adaptor
from kimigraph.bench.protocol import relative_error
from kimigraph.bench.reference import delta_rule, log_decay, unit

pytestmark = pytest.mark.gpu

STEPS = (1, 64, 1024, 16384)
CHANCE = 1.25  # by which two equal errors of a few hundred numbers may differ
needs_fla = pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs fla-core")
Operands = dict[str, Any]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def few_configurations(monkeypatch: pytest.MonkeyPatch):
    """fla tunes for minutes what is compared for its errors here alone."""
    monkeypatch.setattr(Autotuner, "prune_configs", lambda tuner, _: tuner.configs[:1])


def expected_prefill(given: Operands, attributes: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Read-outs [T, H, V] and last state [H, V, K] of one sequence in fp64."""
    q, k, v, g, strength = (given[name][0].double() for name in ("q", "k", "v", "g", "beta"))
    if given["a_log"] is not None:
        g = log_decay(g, given["a_log"].double(), given["dt_bias"].double(), attributes["lower_bound"])
        strength = strength.sigmoid()
    return delta_rule(q, k, v, g, strength, given["initial_state"][0].double())


def given_decay(tokens: int, gate: float, strength: float, heads: int = 2) -> Operands:
    """Operands whose log-decay and write strength are the same everywhere."""
    given = kda_prefill.operands(heads, (tokens,))
    like = torch.ones(1, tokens, heads, kda_prefill.SIDE, device="cuda")
    return given | {"g": gate * like, "beta": strength * like[..., 0], "a_log": None, "dt_bias": None}


def check_prefill(given: Operands, attributes: Operands, out_bound: float, state_bound: float) -> None:
    out, state = kernel_for("kda_prefill", given, attributes).launch(*given.values())
    wanted, wanted_state = expected_prefill(given, attributes)
    assert out.isfinite().all() and state.isfinite().all()
    assert relative_error(out[0], wanted) < out_bound
    assert relative_error(state[0], wanted_state) < state_bound


@pytest.mark.parametrize("tokens", STEPS)
def test_prefill_after_many_tokens(tokens):
    check_prefill(kda_prefill.operands(2, (tokens,)), kda_prefill.ATTRIBUTES, 4.5e-3, 4e-3)


@needs_fla
@pytest.mark.parametrize("tokens", STEPS)
def test_prefill_is_no_further_off_than_fla(few_configurations, tokens):
    given = kda_prefill.operands(2, (tokens,))
    wanted = dict(zip(("out", "final_state"), expected_prefill(given, kda_prefill.ATTRIBUTES), strict=True))
    out, state = kda_prefill.ours(given)()
    call, written = adaptor("fla_chunk").prefill(given, kda_prefill.ATTRIBUTES)
    call()
    for name, ours in (("out", out), ("final_state", state)):
        assert relative_error(ours[0], wanted[name]) <= CHANCE * relative_error(written[name][0], wanted[name])


@pytest.mark.parametrize("strength", [0.998, 1.9])
def test_identical_keys_without_decay(strength):
    """What 16-bit operands lose here grows with the chunk; strengths near two make entries of the inverse alternate."""
    given = given_decay(2048, 0.0, strength)
    given["k"] = given["k"][:, :1].expand_as(given["k"]).contiguous()
    bounds = (4e-3, 3e-3) if strength < 1 else (6e-2, 8e-2)
    check_prefill(given, kda_prefill.ATTRIBUTES, *bounds)


@pytest.mark.parametrize(("gate", "lower_bound"), [(0.0, -5.0), (-5.0, -5.0), (-6.0, None), (0.0, None)])
@pytest.mark.parametrize("strength", [0.0, 1.0, 2.0])
def test_strong_and_absent_decay(gate, lower_bound, strength):
    given = given_decay(300, gate, strength)
    # Where a decay leaves nothing of a state, its last token's share is all there is.
    check_prefill(given, kda_prefill.ATTRIBUTES | {"lower_bound": lower_bound}, 8e-3, 8e-3)


def test_half_of_the_channels_at_the_bound():
    given = kda_prefill.operands(2, (1024,))
    lane = torch.arange(kda_prefill.SIDE, device="cuda") % 2 == 0
    given["g"] = torch.where(lane, 300.0, -300.0).expand(given["g"].shape).bfloat16().contiguous()
    check_prefill(given, kda_prefill.ATTRIBUTES, 6e-3, 5e-3)


def test_a_run_of_130_tokens_cut_anywhere():
    """Two packed runs, the state handed on, for every position of the cut."""
    given = kda_prefill.operands(2, (130,)) | {"cu_seqlens": torch.tensor([0, 130], device="cuda")}
    launch = kernel_for("kda_prefill", given, kda_prefill.ATTRIBUTES).launch
    wanted, wanted_state = expected_prefill(given, kda_prefill.ATTRIBUTES)
    whole, _ = launch(*given.values())
    assert relative_error(whole[0], wanted) < 4.5e-3
    for cut in range(131):
        head, state = launch(*(given | {"cu_seqlens": torch.tensor([0, cut], device="cuda")}).values())
        rest = {"cu_seqlens": torch.tensor([cut, 130], device="cuda"), "initial_state": state}
        tail, last = launch(*(given | rest).values())
        assert relative_error(torch.cat([head[0, :cut], tail[0, cut:]]), wanted) < 4.5e-3, cut
        assert relative_error(last[0], wanted_state) < 4e-3, cut


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_corrected_deltas_at_width(lower_bound):
    """u = beta (v - S' k) of every token, of sequences that begin and end inside chunks."""
    lengths = (70, 0, 33)
    given = kda_prefill.operands(2, lengths)
    g = log_decay(given["g"][0].double(), given["a_log"].double(), given["dt_bias"].double(), -5.0)
    strength = given["beta"].double().sigmoid()
    given |= {"g": g.float().unsqueeze(0), "beta": strength.float(), "a_log": None, "dt_bias": None}
    attributes = kda_prefill.ATTRIBUTES | {"lower_bound": lower_bound}
    deltas = torch.full(given["v"].shape, torch.nan, device="cuda")
    plain, plain_state = kernel_for("kda_prefill", given, attributes).launch(*given.values())
    out, state = kernel_for("kda_prefill", given, attributes).launch(*given.values(), deltas=deltas)
    assert relative_error(out, plain) < 1e-3 and relative_error(state, plain_state) < 1e-3
    k, v = unit(given["k"][0].double()), given["v"][0].double()
    for first, last, memory in ((0, 70, given["initial_state"][0]), (70, 103, given["initial_state"][2])):
        memory, wanted = memory.double(), []
        for token in range(first, last):
            memory = memory * g[token].exp().unsqueeze(-2)
            update = strength[0, token].unsqueeze(-1) * (v[token] - (memory @ k[token].unsqueeze(-1)).squeeze(-1))
            memory = memory + update.unsqueeze(-1) * k[token].unsqueeze(-2)
            wanted.append(update)
        assert relative_error(deltas[0, first:last], torch.stack(wanted)) < 6e-3


def steps_of(given: Operands, count: int) -> Any:
    """The step's number, with fresh inputs written into ``given`` in place."""
    for step in range(1, count + 1):
        for name in ("qkv", "gate", "beta", "out_gate"):
            given[name].normal_()
        yield step


def test_decode_after_many_steps():
    given = kda_decode.operands(1, 1)
    launch = kda_decode.ours(given)
    states = {name: given[name].double() for name in ("state", "conv_state")}
    for step in steps_of(given, STEPS[-1]):
        wanted, states["state"], states["conv_state"] = kda_decode.expected(given | states)
        out = launch(*given.values())
        if step in STEPS:
            assert relative_error(out, wanted) < 2e-3, step
            assert relative_error(given["state"], states["state"]) < 6e-7, step
            assert torch.equal(given["conv_state"].double(), states["conv_state"]), step


@needs_fla
def test_decode_is_no_further_off_than_fla(few_configurations):
    given = kda_decode.operands(1, 1)
    launch, (call, written) = kda_decode.ours(given), adaptor("fla").decode(given, kda_decode.ATTRIBUTES)
    states = {name: given[name].double() for name in ("state", "conv_state")}
    for step in steps_of(given, STEPS[-1]):
        wanted, states["state"], states["conv_state"] = kda_decode.expected(given | states)
        call()
        out = launch(*given.values())
        if step in STEPS:
            assert relative_error(out, wanted) <= CHANCE * relative_error(written["out"], wanted), step
            theirs = relative_error(written["state"], states["state"])
            assert relative_error(given["state"], states["state"]) <= CHANCE * theirs, step


def test_a_slot_is_reused():
    """A finished sequence's entry takes a new one's state; NaN fills entries that are nobody's."""
    given = kda_decode.operands(2, 2)
    alone = {name: tensor.clone() for name, tensor in given.items()}
    pooled = dict(given)
    for name in ("state", "conv_state"):
        pooled[name] = torch.full((5, *given[name].shape[1:]), torch.nan, device="cuda", dtype=given[name].dtype)
        pooled[name][[3, 1]] = given[name]
    slots = torch.tensor([3, 1], device="cuda", dtype=torch.int32)
    launch = kernel_for("kda_decode", pooled | {"slots": slots}, kda_decode.ATTRIBUTES).launch
    launch(*pooled.values(), slots)
    for name in ("state", "conv_state"):
        pooled[name][3] = alone[name][0]
    again = launch(*pooled.values(), slots)
    wanted = kda_decode.ours(alone)(*alone.values())
    assert relative_error(again[0], wanted[0]) < 1e-3
    assert relative_error(pooled["state"][3], alone["state"][0]) < 1e-6
    assert pooled["state"][[0, 2, 4]].isnan().all() and pooled["conv_state"][[0, 2, 4]].isnan().all()
