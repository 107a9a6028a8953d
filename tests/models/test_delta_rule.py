import pytest
import torch

from kimigraph.ir.reference.kda_decode import kda_decode
from kimigraph.models.kimi_k31 import delta_rule
from kimigraph.models.kimi_k31.delta_rule import (
    chunk_kimi_delta_attention,
    kimi_delta_attention_step,
    log_decay,
    short_convolution,
)


def recurrence(q, k, v, g, beta, state):
    """The delta rule as the Kimi Linear report states it, one token, head and sequence at a time."""
    batch, tokens, heads, width = q.shape
    out, state = torch.zeros_like(v), state.transpose(-1, -2).clone()
    for b in range(batch):
        for h in range(heads):
            s = state[b, h]
            for t in range(tokens):
                key = k[b, t, h] / (k[b, t, h].square().sum() + 1e-6).sqrt()
                query = q[b, t, h] / (q[b, t, h].square().sum() + 1e-6).sqrt() / width**0.5
                s = torch.diag(g[b, t, h].exp()) @ s
                s = s + torch.outer(key, beta[b, t, h] * (v[b, t, h] - s.T @ key))
                out[b, t, h] = s.T @ query
            state[b, h] = s
    return out, state.transpose(-1, -2)


def operands(tokens, strength, dtype=torch.float64, heads=2, width=8, value_width=6):
    shape = (2, tokens, heads)
    q, k, g = (torch.randn(*shape, width, dtype=dtype) for _ in range(3))
    v = torch.randn(*shape, value_width, dtype=dtype)
    beta = torch.rand(*shape, dtype=dtype)
    state = torch.randn(2, heads, value_width, width, dtype=dtype)
    return q, k, v, -strength * g.abs(), beta, state


@pytest.mark.parametrize("strength", [0.0, 1.0, 5.0, 300.0])
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 63, 64, 65, 130])
def test_chunks_equal_the_recurrence(tokens, strength):
    args = operands(tokens, strength)
    initial = args[-1].clone()
    got, state = chunk_kimi_delta_attention(*args)
    want, last = recurrence(*args)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(state, last, rtol=1e-10, atol=1e-11)
    assert torch.equal(args[-1], initial)


def test_chunks_of_parts_equal_chunks_of_the_whole():
    *args, state = operands(100, 1.0)
    want, last = chunk_kimi_delta_attention(*args, state)
    first, state = chunk_kimi_delta_attention(*(x[:, :37] for x in args), state)
    second, state = chunk_kimi_delta_attention(*(x[:, 37:] for x in args), state)
    torch.testing.assert_close(torch.cat([first, second], 1), want, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(state, last, rtol=1e-10, atol=1e-11)


def test_strong_gates_stay_exact_in_fp32():
    """A chunk of gates near -100 a token spans e^-6000; no factor of it may overflow."""
    args = operands(64, 100.0)
    want, last = recurrence(*args)
    got, state = chunk_kimi_delta_attention(*(x.float() for x in args))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.double(), last, rtol=1e-4, atol=1e-5)


def test_equal_keys_do_not_lose_the_triangular_system():
    """One key repeated at full strength without decay makes the system's inverse alternate between large terms."""
    q, k, v, g, beta, state = operands(64, 0.0)
    k, beta = k[:, :1].expand_as(k), torch.ones_like(beta)
    want, _ = recurrence(q, k, v, g, beta, state)
    got, _ = chunk_kimi_delta_attention(*(x.float() for x in (q, k, v, g, beta, state)))
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_no_decay_over_many_chunks_stays_finite():
    q, k, v, g, beta, state = (x.float() for x in operands(256, 0.0))
    beta = torch.full_like(beta, 0.9)
    want, last = recurrence(*(x.double() for x in (q, k, v, g, beta, state)))
    got, new = chunk_kimi_delta_attention(q, k, v, g, beta, state)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(new.double(), last, rtol=1e-4, atol=1e-4)


def test_step_equals_the_recurrence():
    q, k, v, g, beta, state = operands(1, 1.0)
    want, last = recurrence(q, k, v, g, beta, state)
    got, new = kimi_delta_attention_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0].unsqueeze(-1), state)
    torch.testing.assert_close(got, want[:, 0])
    torch.testing.assert_close(new, last)


def test_public_functions_agree():
    public = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    q, k, v, g, beta, state = operands(70, 1.0, torch.float32)
    want, last = public.recurrent_kimi_delta_attention(
        q, k, v, g=g, beta=beta, initial_state=state.transpose(-1, -2), output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    got, new = chunk_kimi_delta_attention(q, k, v, g, beta, state)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(new.transpose(-1, -2), last, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bound", [-5.0, -0.5, None])
def test_log_decay_is_negative_and_bounded(bound):
    logits, a_log = torch.randn(2, 3, 4, 8) * 10, torch.rand(4)
    got = log_decay(logits, a_log, bound)
    for h in range(4):
        z = logits[:, :, h].double()
        rate = a_log[h].double().exp()
        want = -rate * torch.log1p(z.exp()) if bound is None else bound / (1 + (-rate * z).exp())
        torch.testing.assert_close(got[:, :, h].double(), want, rtol=1e-5, atol=1e-6)
    assert (got <= 0).all()
    assert bound is None or (got >= bound).all()


@pytest.mark.parametrize("tokens", [1, 2, 3, 9])
def test_short_convolution_continues_from_its_state(tokens):
    x, weight, state = torch.randn(2, tokens, 5), torch.randn(5, 1, 4), torch.randn(2, 5, 3)
    history = torch.cat([state.transpose(1, 2), x], dim=1)
    want = torch.zeros(2, tokens, 5)
    for t in range(tokens):
        for tap in range(4):
            want[:, t] += weight[:, 0, tap] * history[:, t + tap]
    got, last = short_convolution(x, weight, state)
    torch.testing.assert_close(got, want * torch.sigmoid(want))
    assert torch.equal(last, history[:, -3:].transpose(1, 2))


def test_short_convolution_of_bf16_rounds_once():
    x, weight, state = torch.randn(1, 6, 3).bfloat16(), torch.randn(3, 1, 4), torch.zeros(1, 3, 3).bfloat16()
    got, last = short_convolution(x, weight, state)
    assert got.dtype == last.dtype == torch.bfloat16
    assert torch.equal(got, short_convolution(x.float(), weight, state.float())[0].bfloat16())


@pytest.mark.parametrize("bound", [-5.0, None])
def test_layer_step_equals_the_operator_reference(build, bound):
    """The layer's own spelling against the fp32 reference of kimigraph::kda_decode."""
    model = build(linear={"gate_lower_bound": bound})
    layer = model.model.layers[1].self_attn
    x = torch.randn(3, 1, 64)
    state, conv_state = torch.randn(3, 4, 16, 16), torch.randn(3, 192, 3)
    want_state, want_conv = state.clone(), conv_state.clone()
    want = kda_decode(
        torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], dim=-1),
        layer.conv1d.weight, want_conv, layer.f_b_proj(layer.f_a_proj(x)), layer.dt_bias, layer.A_log,
        layer.b_proj(x), want_state, layer.g_proj(x), layer.o_norm.weight,
        scale=16**-0.5, l2_eps=delta_rule.L2_NORM_EPS, lower_bound=bound, norm_eps=1e-5, state_layout="vk",
    )  # fmt: skip
    got = layer(x, state, conv_state)
    torch.testing.assert_close(got, layer.o_proj(want.reshape(3, 1, -1)))
    torch.testing.assert_close(state, want_state)
    assert torch.equal(conv_state, want_conv)


@pytest.mark.parametrize("tokens", [2, 3, 20])
def test_layer_chunks_equal_layer_steps(build, tokens):
    layer = build().model.layers[2].self_attn
    x = torch.randn(2, tokens, 64)
    state, conv_state = torch.randn(2, 4, 16, 16), torch.randn(2, 192, 3)
    other_state, other_conv = state.clone(), conv_state.clone()
    got = layer(x, state, conv_state)
    want = torch.cat([layer(x[:, t : t + 1], other_state, other_conv) for t in range(tokens)], dim=1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, other_state, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(conv_state, other_conv)
