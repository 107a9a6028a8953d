"""Requests of kernels at the widths of Kimi K3.1, for the tests of what a compiler makes of them."""

from kimigraph.codegen.kernel import KernelRequest, TensorSpec
from kimigraph.ir.descriptors import IndexKeyDescriptor, LatentDescriptor


def tensor(*shape: int, dtype: str = "bfloat16") -> TensorSpec:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return TensorSpec(shape, tuple(strides[: len(shape)]), dtype)


PACKED_KEYS = str(IndexKeyDescriptor("paged", "float8_e4m3fn", 128, page_size=64, scales="power2"))
PACKED_ROWS = str(LatentDescriptor("contiguous", "float8_e4m3fn", 512, 64, 0, 1, 128, "scales_rope", "power2"))


def packed_indexer(batch, total=32768, tokens=1) -> KernelRequest:
    """fp8 queries over pages of fp8 keys: what the forms on Hopper are for."""
    tensors = {
        "q": tensor(batch, tokens, 64, 128, dtype="float8_e4m3fn"),
        "keys": tensor(batch * total // 64, 64, 132, dtype="uint8"),
        "weights": tensor(batch, tokens, 64, dtype="float32"),
        "lengths": tensor(batch, dtype="int32"),
        "mask": None,
        "block_table": tensor(batch, total // 64, dtype="int32"),
    }
    attributes = {"k": 2048, "scale": 0.088, "descriptor": PACKED_KEYS}
    return KernelRequest("lightning_indexer", tensors, attributes, "cuda:sm_90")


def packed_attention(batch, heads=64) -> KernelRequest:
    tensors = {
        "q_latent": tensor(batch, 1, heads, 512),
        "q_rope": tensor(batch, 1, heads, 64),
        "latent": tensor(batch, 32768, 656, dtype="uint8"),
        "rope": None,
        "indices": tensor(batch, 1, 2048, dtype="int32"),
        "block_table": None,
    }
    return KernelRequest("sparse_attention", tensors, {"scale": 0.07, "descriptor": PACKED_ROWS}, "cuda:sm_90")


def dense_attention(batch, packed=False, target="cuda:sm_90") -> KernelRequest:
    listed = packed_attention(batch, 32) if packed else attention(batch=batch, heads=32, total=8192)
    tensors = {name: spec for name, spec in listed.tensors.items() if name != "indices"}
    tensors |= {"lengths": tensor(batch, dtype="int32"), "sink": tensor(32, dtype="float32")}
    return KernelRequest("latent_attention", tensors, listed.attributes, target)


def indexer(batch=8, tokens=1, dtype="bfloat16", paged=False, total=32768) -> KernelRequest:
    tensors = {
        "q": tensor(batch, tokens, 64, 128, dtype=dtype),
        "keys": tensor(batch * total // 64, 64, 128, dtype=dtype) if paged else tensor(batch, total, 128, dtype=dtype),
        "weights": tensor(batch, tokens, 64, dtype="float32"),
        "lengths": tensor(batch, dtype="int32"),
        "mask": tensor(batch, tokens, total, dtype="bool") if paged else None,
        "block_table": tensor(batch, total // 64, dtype="int32") if paged else None,
    }
    return KernelRequest("lightning_indexer", tensors, {"k": 2048, "scale": 0.088, "descriptor": ""})


def attention(batch=1, heads=64, width=512, dtype="bfloat16", paged=False, picks=2048, total=32768) -> KernelRequest:
    rows = (batch * total // 64, 64) if paged else (batch, total)
    tensors = {
        "q_latent": tensor(batch, 1, heads, width, dtype=dtype),
        "q_rope": tensor(batch, 1, heads, 64, dtype=dtype),
        "latent": tensor(*rows, width, dtype=dtype),
        "rope": tensor(*rows, 64, dtype=dtype),
        "indices": tensor(batch, 1, picks, dtype="int32"),
        "block_table": tensor(batch, total // 64, dtype="int32") if paged else None,
    }
    return KernelRequest("sparse_attention", tensors, {"scale": 0.07, "descriptor": ""})


def delta(tokens=1, layout="vk", lower_bound=-5.0, side=128, batch=1, target="cpu") -> KernelRequest:
    heads, channels = 32, 3 * 32 * side
    tensors = {
        "qkv": tensor(batch, tokens, channels),
        "conv_weight": tensor(channels, 4),
        "conv_state": tensor(batch, channels, 3),
        "gate": tensor(batch, tokens, heads * side),
        "dt_bias": tensor(heads * side, dtype="float32"),
        "a_log": tensor(heads, dtype="float32"),
        "beta": tensor(batch, tokens, heads),
        "state": tensor(batch, heads, side, side, dtype="float32"),
        "out_gate": tensor(batch, tokens, heads, side),
        "norm_weight": tensor(side),
    }
    options = {"scale": 0.088, "l2_eps": 1e-6, "lower_bound": lower_bound, "norm_eps": 1e-5, "state_layout": layout}
    return KernelRequest("kda_decode", tensors, options, target)


def prefill(
    tokens=4096, heads=32, raw=True, lower_bound=-5.0, dtype="bfloat16", sequences=0, target="cuda:sm_90"
) -> KernelRequest:
    side, logits = 128, dtype if raw else "float32"
    run = (1, tokens, heads)
    tensors = {
        **{name: tensor(*run, side, dtype=dtype) for name in "qkv"},
        "g": tensor(*run, side, dtype=logits),
        "beta": tensor(*run, dtype=logits),
        "initial_state": tensor(max(sequences, 1), heads, side, side, dtype="float32"),
        "a_log": tensor(heads, dtype="float32") if raw else None,
        "dt_bias": tensor(heads * side, dtype="float32") if raw else None,
        "cu_seqlens": tensor(sequences + 1, dtype="int64") if sequences else None,
    }
    options = {"scale": 0.088, "l2_norm": True, "l2_eps": 1e-6, "lower_bound": lower_bound, "state_layout": "vk"}
    return KernelRequest("kda_prefill", tensors, options, target)


def convolution() -> KernelRequest:
    tensors = {
        "x": tensor(1, 4096, 12288),
        "weight": tensor(12288, 1, 4, dtype="float32"),
        "initial_state": tensor(1, 12288, 3),
    }
    return KernelRequest("short_conv", tensors, {"activation": True})


def residual(tokens, sources, op="attention_residual"):
    """Attention residuals of width 7168; of the history, eight queries."""
    width = 7168
    tensors = {f"sources_{number}": tensor(tokens, width) for number in range(sources)}
    if op == "attention_residual_history":
        tensors |= {f"{name}_{number}": tensor(width) for name in ("queries", "norm_weights") for number in range(8)}
        return KernelRequest(op, tensors, {"eps": 1e-5}, "cuda:sm_90")
    if op == "attention_residual_merge":
        tensors = {"history": tensor(tokens, width, dtype="float32"), "lse": tensor(tokens, dtype="float32")}
        tensors["partial"] = tensor(tokens, width)
    tensors |= {name: tensor(width) for name in ("query", "norm_weight", "out_norm_weight")}
    return KernelRequest(op, tensors, {"eps": 1e-5, "out_eps": 1e-5}, "cuda:sm_90")


def experts(tokens, follows=True, target="cuda:sm_90") -> KernelRequest:
    """Routed experts of Kimi K3.1; what follows them only for a few tokens."""
    width, inner, outer, count = 1152, 1024, 2304, 256
    tensors: dict[str, TensorSpec | None] = {
        "x": tensor(tokens, width),
        "logits": tensor(tokens, count, dtype="float32"),
        "bias": tensor(count, dtype="float32"),
        "gate_up": tensor(count, 2 * inner, width),
        "down": tensor(count, width, inner),
    }
    behind = {"norm_weight": tensor(width), "up": tensor(outer, width), "shared_down": tensor(outer, inner)}
    behind |= {name: tensor(tokens, inner) for name in ("shared_gate", "shared_up")}
    order = ("norm_weight", "up", "shared_gate", "shared_up", "shared_down")
    tensors |= {name: behind[name] if follows else None for name in order}
    attributes = {"picks": 8, "renormalize": True, "scale": 1.0, "groups": 1, "group_picks": 1}
    attributes |= {"activation": "situ", "beta": 4.0, "linear_beta": 25.0, "limit": None, "eps": 1e-5}
    return KernelRequest("moe_experts", tensors, attributes, target)
