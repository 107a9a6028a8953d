import math

import pytest
import torch

PREFILL, DECODE, CONV = (getattr(torch.ops.kimigraph, n) for n in ("kda_prefill", "kda_decode", "short_conv"))


def recurrence(q, k, v, g, beta, state, scale, l2_eps=None):
    """The delta rule in float64 for one sequence and head: q, k, g [T, K], v [T, V], beta [T], state [K, V].

    S_t = (I - beta k k^T) Diag(exp g) S_(t-1) + beta k v^T with explicit matrices.
    """
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    out = []
    for t in range(q.shape[0]):
        key, query = k[t], q[t]
        if l2_eps is not None:
            key, query = key / (key @ key + l2_eps).sqrt(), query / (query @ query + l2_eps).sqrt()
        erase = torch.eye(len(key), dtype=torch.float64) - beta[t] * torch.outer(key, key)
        state = erase @ torch.diag(g[t].exp()) @ state + beta[t] * torch.outer(key, v[t])
        out.append(state.T @ (query * scale))
    return torch.stack(out) if out else v.new_zeros(0, v.shape[1]), state


def operands(tokens=5, batch=2, heads=3, key_dim=8, value_dim=6):
    q, k, g = (torch.randn(batch, tokens, heads, key_dim) for _ in range(3))
    beta = torch.rand(batch, tokens, heads)
    return q, k, torch.randn(batch, tokens, heads, value_dim), -g.abs(), beta


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def check_prefill(q, k, v, g, beta, state, layout="kv", l2=True):
    given = None if state is None else (state if layout == "kv" else state.transpose(-1, -2).contiguous())
    out, final = PREFILL(q, k, v, g, beta, given, scale=0.5, l2_norm=l2, state_layout=layout)
    final = final if layout == "kv" else final.transpose(-1, -2)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            start = torch.zeros(q.shape[-1], v.shape[-1]) if state is None else state[b, h]
            want, want_final = recurrence(
                q[b, :, h], k[b, :, h], v[b, :, h], g[b, :, h], beta[b, :, h], start, 0.5, 1e-6 if l2 else None
            )
            torch.testing.assert_close(out[b, :, h].double(), want, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(final[b, h].double(), want_final, rtol=1e-4, atol=1e-5)
    return out, final


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("sizes", [(8, 16), (16, 16)])
def test_prefill_against_the_definition(tokens, layout, sizes):
    """Equal and different key and value dims: with equal ones a swapped state is silent."""
    key_dim, value_dim = sizes
    inputs = operands(tokens, key_dim=key_dim, value_dim=value_dim)
    check_prefill(*inputs, torch.randn(2, 3, key_dim, value_dim), layout)
    check_prefill(*inputs, None, layout)


@pytest.mark.parametrize("tokens", [1, 16, 17, 63, 64, 65])
def test_lengths_around_a_chunk(tokens):
    """Gates in natural logarithm, strong decay: exp(-G) over 64 tokens of -6 would overflow."""
    q, k, v, _, beta = operands(tokens, batch=1, heads=1)
    for gate in (-1.0, -6.0, -40.0):
        check_prefill(q, k, v, torch.full_like(q, gate), beta, torch.randn(1, 1, 8, 6))


def test_no_decay_at_all_stays_finite():
    q, k, v, g, _ = operands(256, batch=1, heads=1)
    out, final = check_prefill(q, unit(k), v, torch.zeros_like(g), torch.full((1, 256, 1), 0.9), None, l2=False)
    assert out.isfinite().all() and final.isfinite().all()


def test_a_step_of_decay_is_a_factor_e():
    state = torch.ones(1, 1, 1, 1)
    zero = torch.zeros(1, 1, 1, 1)
    _, final = PREFILL(zero, zero, zero, zero - 1, zero[..., 0], state, scale=1.0, l2_norm=False)
    assert final.item() == pytest.approx(math.exp(-1))


def test_a_run_may_be_cut_anywhere():
    inputs = operands(9)
    out, final = PREFILL(*inputs, None, scale=0.5, l2_norm=True, state_layout="vk")
    for cut in (1, 4, 8):
        head, middle = PREFILL(*(x[:, :cut] for x in inputs), None, scale=0.5, l2_norm=True, state_layout="vk")
        tail, end = PREFILL(*(x[:, cut:] for x in inputs), middle, scale=0.5, l2_norm=True, state_layout="vk")
        torch.testing.assert_close(torch.cat([head, tail], 1), out)
        torch.testing.assert_close(end, final)


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_the_callers_state_is_left_alone_and_the_result_has_one_form(tokens):
    state = torch.randn(2, 3, 8, 6)
    before = state.clone()
    result = PREFILL(*operands(tokens), state, scale=0.5, l2_norm=True)
    assert isinstance(result, tuple | list) and len(result) == 2
    assert result[0].shape == (2, tokens, 3, 6) and result[1].shape == (2, 3, 8, 6)
    result[1].zero_()
    assert torch.equal(state, before)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("tokens", [0, 1, 2, 5])
@pytest.mark.parametrize("spare", [0, 3])
def test_convolution_against_the_definition(width, tokens, spare):
    """``spare`` older columns in the state change nothing; width 1 has an empty state."""
    x, weight, state = torch.randn(2, tokens, 3), torch.randn(3, width), torch.randn(2, 3, width - 1 + spare)
    before = state.clone()
    y, final = CONV(x, weight.unsqueeze(1), state, activation=True)
    history = torch.cat([state.transpose(1, 2)[:, spare:], x], 1).double()
    for b in range(2):
        for t in range(tokens):
            for c in range(3):
                total = sum(float(weight[c, j]) * float(history[b, t + j, c]) for j in range(width))
                assert y[b, t, c].item() == pytest.approx(total / (1 + math.exp(-total)), rel=1e-4, abs=1e-6)
    assert torch.equal(final, history[:, history.shape[1] - (width - 1) :].float().transpose(1, 2))
    final.fill_(7.0)
    assert torch.equal(state, before)


def test_chunks_shorter_than_the_window_mix_old_and_new():
    x, weight = torch.randn(1, 8, 4), torch.randn(4, 4)
    whole, final = CONV(x, weight, None, activation=False)
    state, parts = None, []
    for piece in x.split([1, 2, 5], dim=1):
        y, state = CONV(piece, weight, state, activation=False)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert torch.equal(state, final) and torch.equal(state, x[:, 5:].transpose(1, 2))


def step_operands(tokens=3, batch=2, heads=2, key_dim=4, value_dim=6, width=4, spare=0, layout="kv"):
    channels = heads * (2 * key_dim + value_dim)
    state = torch.randn(batch, heads, key_dim, value_dim)
    return {
        "qkv": torch.randn(batch, tokens, channels),
        "conv_weight": torch.randn(channels, 1, width),
        "conv_state": torch.randn(batch, channels, width - 1 + spare),
        "gate": torch.randn(batch, tokens, heads * key_dim),
        "dt_bias": torch.randn(heads * key_dim),
        "a_log": torch.rand(heads),
        "beta": torch.randn(batch, tokens, heads),
        "state": state if layout == "kv" else state.transpose(-1, -2).contiguous(),
        "out_gate": torch.randn(batch, tokens, heads, value_dim),
        "norm_weight": torch.rand(value_dim) + 0.5,
    }


def composed(x, layout, lower_bound):
    """``kda_decode`` from its parts in float64: convolution, gates by hand, the recurrence, gated norm by hand."""
    heads, value_dim = x["a_log"].numel(), x["norm_weight"].numel()
    batch, tokens, channels = x["qkv"].shape
    key_dim = (channels // heads - value_dim) // 2
    width = x["conv_weight"].shape[-1]
    history = torch.cat([x["conv_state"].transpose(1, 2), x["qkv"]], 1).double()
    first = history.shape[1] - tokens - (width - 1)
    mixed = torch.stack(
        [
            sum(history[:, first + t + j] * x["conv_weight"][:, 0, j].double() for j in range(width))
            for t in range(tokens)
        ],
        1,
    )
    mixed = mixed * torch.sigmoid(mixed)
    q, k = (mixed[..., i * heads * key_dim : (i + 1) * heads * key_dim].view(batch, tokens, heads, -1) for i in (0, 1))
    v = mixed[..., 2 * heads * key_dim :].view(batch, tokens, heads, value_dim)
    z = (x["gate"] + x["dt_bias"]).double().view(batch, tokens, heads, key_dim)
    rate = x["a_log"].double().exp().view(heads, 1)
    g = -rate * torch.log1p(z.exp()) if lower_bound is None else lower_bound / (1 + torch.exp(-rate * z))
    state = x["state"] if layout == "kv" else x["state"].transpose(-1, -2)
    out, final = torch.empty_like(v), torch.empty(state.shape, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            beta = 1 / (1 + torch.exp(-x["beta"][b, :, h].double()))
            out[b, :, h], final[b, h] = recurrence(
                q[b, :, h], k[b, :, h], v[b, :, h], g[b, :, h], beta, state[b, h], key_dim**-0.5, 1e-6
            )
    out = out / (out.square().mean(-1, keepdim=True) + 1e-5).sqrt() * x["norm_weight"].double()
    out = out / (1 + torch.exp(-x["out_gate"].double()))
    return out, final if layout == "kv" else final.transpose(-1, -2), history[:, tokens:].transpose(1, 2)


@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize(
    "sizes", [{}, {"tokens": 1, "spare": 3}, {"key_dim": 6}, {"width": 1}, {"heads": 1, "batch": 1}]
)
def test_decode_against_its_parts(layout, lower_bound, sizes):
    x = step_operands(layout=layout, **sizes)
    want, want_state, want_window = composed(x, layout, lower_bound)
    key_dim = x["gate"].shape[-1] // x["a_log"].numel()
    out = DECODE(**x, scale=key_dim**-0.5, lower_bound=lower_bound, state_layout=layout)
    torch.testing.assert_close(out.double(), want, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(x["state"].double(), want_state, rtol=1e-4, atol=1e-5)
    assert torch.equal(x["conv_state"].double(), want_window)


def test_spare_columns_of_the_window_change_nothing():
    wide = step_operands(spare=3)
    narrow = {name: value.clone() for name, value in wide.items()}
    narrow["conv_state"] = wide["conv_state"][..., 3:].clone()
    got, want = DECODE(**wide, scale=0.5), DECODE(**narrow, scale=0.5)
    assert torch.equal(got, want) and torch.equal(wide["state"], narrow["state"])
    assert torch.equal(wide["conv_state"][..., 3:], narrow["conv_state"])


@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_prefill_hands_over_to_decode(layout):
    """Convolution and recurrence over 6 tokens equal 4 of prefill and 2 of decode, with unequal and equal dims."""
    for sizes in ({}, {"key_dim": 6}):
        x = step_operands(tokens=6, batch=1, layout=layout, **sizes)
        x.update(out_gate=None, norm_weight=None)
        whole = {name: None if value is None else value.clone() for name, value in x.items()}
        want = DECODE(**whole, scale=0.5, state_layout=layout)
        mixed, window = CONV(x["qkv"][:, :4], x["conv_weight"], x["conv_state"], activation=True)
        heads = x["a_log"].numel()
        key_dim = x["gate"].shape[-1] // heads
        q, k, v = mixed.split([heads * key_dim, heads * key_dim, mixed.shape[-1] - 2 * heads * key_dim], -1)
        q, k, v = (part.view(1, 4, heads, -1) for part in (q, k, v))
        z = (x["gate"] + x["dt_bias"]).view(1, 6, heads, key_dim)[:, :4]
        g = -x["a_log"].exp().view(heads, 1) * torch.nn.functional.softplus(z)
        head, state = PREFILL(
            q, k, v, g, x["beta"][:, :4].sigmoid(), x["state"], scale=0.5, l2_norm=True, state_layout=layout
        )
        rest = {**x, "conv_state": window, "state": state}
        rest.update({name: x[name][:, 4:] for name in ("qkv", "gate", "beta")})
        tail = DECODE(**rest, scale=0.5, state_layout=layout)
        torch.testing.assert_close(torch.cat([head, tail], 1), want)
        torch.testing.assert_close(state, whole["state"])
        torch.testing.assert_close(window, whole["conv_state"])


def test_a_group_of_tokens_equals_single_steps():
    x = step_operands(tokens=5)
    single = {name: value.clone() for name, value in x.items()}
    want = DECODE(**x, scale=0.5)
    outs = []
    for t in range(5):
        step = {n: v[:, t : t + 1] if n in ("qkv", "gate", "beta", "out_gate") else v for n, v in single.items()}
        outs.append(DECODE(**step, scale=0.5))
    torch.testing.assert_close(torch.cat(outs, 1), want)
    torch.testing.assert_close(single["state"], x["state"])
    assert torch.equal(single["conv_state"], x["conv_state"])


def test_no_tokens_leave_the_states_alone():
    x = step_operands(tokens=0)
    before = {name: value.clone() for name, value in x.items()}
    assert DECODE(**x, scale=0.5).shape == (2, 0, 2, 6)
    assert all(torch.equal(x[name], before[name]) for name in x)


def test_strong_betas_and_gates_stay_bounded():
    """2000 steps with beta near 1 and hardly any decay: the state keeps the size of the values."""
    tokens = 2000
    k = unit(torch.randn(1, tokens, 1, 8))
    v = unit(torch.randn(1, tokens, 1, 8))
    g = torch.full((1, tokens, 1, 8), -5e-4)
    _, final = PREFILL(k, k, v, g, torch.full((1, tokens, 1), 0.999), None, scale=1.0, l2_norm=False)
    assert final.norm() < 20


def test_prefill_with_raw_logits_is_prefill_after_the_gate():
    torch.manual_seed(5)
    q, k, v, logits = torch.randn(4, 2, 5, 2, 4).unbind(0)
    beta, a_log, bias = torch.randn(2, 5, 2), torch.randn(2) * 0.3, torch.randn(8)
    options = {"scale": 0.5, "l2_norm": True}
    for lower_bound in (None, -5.0):
        z = logits + bias.view(2, 4)
        rate = a_log.exp().view(2, 1)
        softplus = torch.nn.functional.softplus
        g = -rate * softplus(z) if lower_bound is None else lower_bound * torch.sigmoid(rate * z)
        wanted = torch.ops.kimigraph.kda_prefill(q, k, v, g, beta.sigmoid(), **options)
        found = torch.ops.kimigraph.kda_prefill(
            q, k, v, logits, beta, a_log=a_log, dt_bias=bias, lower_bound=lower_bound, **options
        )
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_packed_prefill_is_each_sequence_alone():
    torch.manual_seed(6)
    q, k, v = torch.randn(3, 1, 9, 2, 4).unbind(0)
    g, beta, state = -torch.rand(1, 9, 2, 4), torch.rand(1, 9, 2), torch.randn(3, 2, 4, 4)
    edges = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    options = {"scale": 0.5, "l2_norm": True}
    out, final = torch.ops.kimigraph.kda_prefill(q, k, v, g, beta, state, cu_seqlens=edges, **options)
    assert torch.equal(final[1], state[1])
    for sequence, part in ((0, slice(0, 4)), (2, slice(4, 9))):
        alone, last = torch.ops.kimigraph.kda_prefill(
            *(x[:, part] for x in (q, k, v, g, beta)), state[sequence : sequence + 1], **options
        )
        torch.testing.assert_close(out[:, part], alone)
        torch.testing.assert_close(final[sequence], last[0])


def test_prefill_refuses_half_a_gate_and_states_of_other_sequences():
    q, beta = torch.empty(1, 9, 2, 4, device="meta"), torch.empty(1, 9, 2, device="meta")
    options = {"scale": 0.5, "l2_norm": True}
    with pytest.raises(ValueError, match="both or neither"):
        torch.ops.kimigraph.kda_prefill(q, q, q, q, beta, a_log=torch.empty(2, device="meta"), **options)
    edges = torch.empty(4, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="states of"):
        torch.ops.kimigraph.kda_prefill(
            q, q, q, q, beta, torch.empty(2, 2, 4, 4, device="meta"), cu_seqlens=edges, **options
        )
