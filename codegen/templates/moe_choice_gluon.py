# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""The choice of a token's experts by one warp, which can begin with the one that it needs first.

Other warps do not choose for themselves: the router's row would be read by all of them at once, out of one place.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

NOTHING = gl.constexpr(-0x80000000)


@gluon.jit
def ranked_experts(logits, bias, LOGIT_STRIDE: gl.constexpr, BIAS_STRIDE: gl.constexpr, EXPERTS: gl.constexpr,
                   EACH: gl.constexpr):  # fmt: skip
    """Experts, their scores, and keys that rank as score and bias do: ``EACH`` a lane of the one warp that chooses."""
    LANES: gl.constexpr = gl.BlockedLayout([EACH], [32], [gl.num_warps()], [0])
    expert = gl.arange(0, 32 * EACH, layout=LANES)
    inside = expert < EXPERTS
    logit = gl.load(logits + expert * LOGIT_STRIDE[1], mask=inside, other=0.0, cache_modifier=".cg")
    score = 1.0 / (1.0 + gl.exp(-logit.to(gl.float32)))
    choice = score
    if bias is not None:
        choice += gl.load(bias + expert * BIAS_STRIDE, mask=inside, other=0.0, cache_modifier=".cg").to(gl.float32)
    # Order of fp32 as that of int32: NaN ranks as -inf, both zeros are one.
    choice = gl.where(choice != choice, float("-inf"), gl.where(choice == 0.0, 0.0, choice))
    bits = choice.to(gl.int32, bitcast=True)
    return expert, score, gl.where(inside, gl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), NOTHING)


@gluon.jit
def without_best(expert, key, EACH: gl.constexpr):
    """The first expert of the largest key, and the keys without it: a maximum is one instruction."""
    best = gl.max(key, 0)
    place = gl.min(gl.where(key == best, expert, 32 * EACH), 0)
    return place, gl.where(expert == place, NOTHING, key)


@gluon.jit
def expert_of_rank(expert, key, rank, EACH: gl.constexpr):
    """The expert of which ``rank`` others are better."""
    place = rank * 0
    for _ in range(rank + 1):
        place, key = without_best(expert, key, EACH)
    return place


@gluon.jit
def best_experts(expert, score, key, EXPERTS: gl.constexpr, PICKS: gl.constexpr, EACH: gl.constexpr):
    """The experts of the largest keys, the best first, and the sum of their scores."""
    chosen = ()
    for _ in gl.static_range(PICKS):
        place, key = without_best(expert, key, EACH)
        chosen = chosen + (place,)
    total = gl.sum(gl.where((key == NOTHING) & (expert < EXPERTS), score, 0.0), 0)
    return chosen, total


@gluon.jit
def at_place(values, place):
    """The ``place``-th of a tuple of scalars; ``place`` may be a tensor."""
    value = values[0] + place * 0
    for number in gl.static_range(1, len(values)):
        value = gl.where(place == number, values[number], value)
    return value
