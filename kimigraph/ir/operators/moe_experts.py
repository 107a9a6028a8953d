"""``moe_experts``: a router's choice of experts, their products for the tokens that chose them, and what follows.

With s = sigmoid(logits) and c = s + bias (the bias steers the choice alone), for each token n:

    P_n = the first ``picks`` experts by (c desc, index asc), NaN as -inf; with ``groups`` > 1 only those of the
          ``group_picks`` groups whose two largest c have the largest sum (E / groups experts each, in order)
    p_i = s_i / (sum of s over P_n + 1e-20) if ``renormalize`` else s_i;  times ``scale``
    h_i = act(gate_up_i[:I] x_n, gate_up_i[I:] x_n);  routed_n = sum_i p_i down_i h_i
    out_n = up (norm_weight * routed_n * rsqrt(mean(routed_n^2) + eps))      (``up`` alone without ``norm_weight``)
    out_n = out_n + shared_down act(shared_gate_n, shared_up_n)              (the shared experts, with shared_down)
    out_n = out_n + residual_n                                               (with ``residual``)

act(g, u) = silu(g) u as ``swiglu``; beta tanh(g / beta) sigmoid(g) linear_beta tanh(u / linear_beta) as ``situ``, where
``linear_beta`` None leaves u as it is. A ``limit`` bounds g from above and u on both sides first. Norm and ``up`` come
behind the weighted sum: the norm is not linear.

Shapes: x [N, D]; logits [N, E]; bias [E]; gate_up [E, 2 I, D]; down [E, D, I]; norm_weight [D]; up [d, D];
shared_gate and shared_up [N, J]; shared_down [d, J]; residual [N, d]; d = D without ``up``. Logits and bias in fp32,
the rest in one float type; gate_up and down also as MXFP4, both, in the bytes of ``mxfp4_quantize`` (uint8 [E, 2 I,
17 D / 32] and [E, D, 17 I / 32]). Arithmetic in fp32, one rounding. Returns (out [N, d] in the type of x, the chosen
experts int32 [N, picks] in the order of the choice).

Source: the Kimi K3 technical report, equation 11, and the router of DeepSeek-V3. Errors: none at run time; the fake
implementation raises ValueError for operands that do not fit each other, more picks than experts and an unknown
``activation``.
"""

import torch
from torch import Tensor

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.operators.shapes import check
from kimigraph.ir.reference.moe_experts import moe_experts
from kimigraph.ir.reference.mxfp4_quantize import GROUP, ROW_BYTES, mxfp4_columns

ACTIVATIONS = ("swiglu", "situ")
_NAME = "moe_experts"


def _fake(
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    norm_weight: Tensor | None = None,
    up: Tensor | None = None,
    shared_gate: Tensor | None = None,
    shared_up: Tensor | None = None,
    shared_down: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    picks: int,
    renormalize: bool,
    scale: float = 1.0,
    groups: int = 1,
    group_picks: int = 1,
    activation: str = "swiglu",
    beta: float = 1.0,
    linear_beta: float | None = None,
    limit: float | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    packed = _packed(gate_up, down)
    inner = gate_up.shape[1] // 2
    sizes = check(
        _NAME,
        x=(x, "N D"),
        logits=(logits, "N E"),
        bias=(bias, "E"),
        gate_up=(gate_up, f"E II {_row(x.shape[-1], packed)}" if packed else "E II D"),
        down=(down, f"E D {_row(inner, packed)}"),
        norm_weight=(norm_weight, "D"),
        up=(up, "d D"),
        shared_gate=(shared_gate, "N J"),
        shared_up=(shared_up, "N J"),
        shared_down=(shared_down, "d J" if up is not None else "D J"),
        residual=(residual, "N d" if up is not None else "N D"),
    )
    _check_operands(gate_up, norm_weight, up, (shared_gate, shared_up, shared_down))
    if activation not in ACTIVATIONS:
        raise ValueError(f"{_NAME}: activation {activation!r}, want one of {', '.join(ACTIVATIONS)}")
    _check_choice(sizes["E"], picks, groups, group_picks)
    outer = sizes["D"] if up is None else sizes["d"]
    return x.new_empty(sizes["N"], outer), logits.new_empty(sizes["N"], picks, dtype=torch.int32)


def _packed(gate_up: Tensor, down: Tensor) -> bool:
    """Whether the experts' weights are MXFP4."""
    packed = {tensor.dtype == torch.uint8 for tensor in (gate_up, down)}
    if len(packed) > 1:
        raise ValueError(f"{_NAME}: gate_up is {gate_up.dtype} and down {down.dtype}, want MXFP4 for both or neither")
    return packed.pop()


def _row(columns: int, packed: bool) -> int:
    """Elements of a row of weights."""
    if packed and columns % GROUP:
        raise ValueError(f"{_NAME}: rows of {columns} are no MXFP4, want a multiple of {GROUP}")
    return columns // GROUP * ROW_BYTES if packed else columns


def _check_operands(
    gate_up: Tensor, norm_weight: Tensor | None, up: Tensor | None, shared: tuple[Tensor | None, ...]
) -> None:
    if gate_up.shape[1] % 2:
        raise ValueError(f"{_NAME}: gate_up is {list(gate_up.shape)}, want as many rows for the gate as for up")
    if norm_weight is not None and up is None:
        raise ValueError(f"{_NAME}: norm_weight goes with up, which is not given")
    if len({tensor is None for tensor in shared}) > 1:
        raise ValueError(f"{_NAME}: give shared_gate, shared_up and shared_down together")


def _check_choice(experts: int, picks: int, groups: int, group_picks: int) -> None:
    if not 0 < picks <= experts:
        raise ValueError(f"{_NAME}: picks is {picks}, want 1 to {experts}, the experts")
    if groups < 1 or experts % groups or (groups > 1 and experts // groups < 2):
        raise ValueError(f"{_NAME}: {experts} experts do not make {groups} groups of two or more")
    if not 0 < group_picks <= groups:
        raise ValueError(f"{_NAME}: group_picks is {group_picks}, want 1 to {groups}, the groups")


def _cost(
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    norm_weight: Tensor | None = None,
    up: Tensor | None = None,
    shared_gate: Tensor | None = None,
    shared_up: Tensor | None = None,
    shared_down: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    picks: int,
    **attributes: object,
) -> Cost:
    (tokens, width), experts = x.shape, logits.shape[1]
    inner, pairs = down.shape[2], tokens * picks
    if down.dtype == torch.uint8:
        inner = mxfp4_columns(inner)
    # Under uniform routing an expert is left alone by all tokens with this likelihood.
    busy = experts * (1.0 - (1.0 - picks / experts) ** tokens)
    weights = round(busy / experts * nbytes(gate_up, down))
    outer = width if up is None else up.shape[0]
    dense = (0 if up is None else up.numel()) + (0 if shared_down is None else shared_down.numel())
    moved = nbytes(x, logits, bias, norm_weight, up, shared_gate, shared_up, shared_down, residual)
    written = tokens * outer * x.element_size() + 4 * pairs
    flops = 6 * pairs * inner * width + 2 * tokens * dense + 8 * pairs * inner + 4 * tokens * experts
    return Cost(bytes=weights + moved + written, flops=flops)


OPERATOR = register(
    Operator(
        name=_NAME,
        signature=(
            "(Tensor x, Tensor logits, Tensor? bias, Tensor gate_up, Tensor down, Tensor? norm_weight=None,"
            " Tensor? up=None, Tensor? shared_gate=None, Tensor? shared_up=None, Tensor? shared_down=None,"
            " Tensor? residual=None, *, int picks, bool renormalize, float scale=1.0, int groups=1, int group_picks=1,"
            " str activation='swiglu', float beta=1.0, float? linear_beta=None, float? limit=None,"
            " float eps=1e-5) -> (Tensor, Tensor)"
        ),
        summary="routed experts of a step, with what follows their weighted sum",
        documentation=__doc__,
        reference=moe_experts,
        fake=_fake,
        cost=_cost,
    )
)
