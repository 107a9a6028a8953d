# pyright: basic, reportCallIssue=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""A router's choice for one token: the best experts by score and bias, ties to the smaller index, and their weights."""

import triton
import triton.language as tl

NOTHING = tl.constexpr(-0x8000000000000000)


@triton.jit
def ranked(value, place, LAST: tl.constexpr):
    """fp32 values -> int64 keys of their order: of equal ones the smaller place is the larger, NaN ranks as -inf."""
    value = tl.where(value != value, float("-inf"), tl.where(value == 0.0, 0.0, value))
    bits = value.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (LAST - place).to(tl.int64)


@triton.jit
def keep_best_groups(choice, inside, GROUPS: tl.constexpr, KEPT: tl.constexpr):
    """Scores [groups, experts of one], -inf outside the KEPT groups whose two best experts have the largest sum."""
    member = tl.arange(0, choice.shape[1])[None, :]
    ordered = tl.where(inside & (choice == choice), choice, float("-inf"))
    first = tl.max(ordered, 1)
    place = tl.min(tl.where(ordered == first[:, None], member, choice.shape[1]), 1)
    second = tl.max(tl.where(member == place[:, None], float("-inf"), ordered), 1)
    group = tl.arange(0, choice.shape[0])
    key = tl.where(group < GROUPS, ranked(first + second, group, 0x7FFFFFFF), NOTHING)
    for _ in tl.static_range(KEPT):
        key = tl.where(key == tl.max(key, 0), NOTHING, key)
    kept = (key == NOTHING)[:, None] & inside
    return tl.where(kept, choice, float("-inf"))


@triton.jit
def choose(logits, bias, token, place, LOGIT_STRIDE: tl.constexpr, BIAS_STRIDE: tl.constexpr, GROUPS: tl.constexpr,
           MEMBERS: tl.constexpr, GROUP_PICKS: tl.constexpr, PICKS: tl.constexpr, RENORMALIZE: tl.constexpr,
           SCALE: tl.constexpr, GROUP_BLOCK: tl.constexpr, MEMBER_BLOCK: tl.constexpr):  # fmt: skip
    """The expert that ``token`` chose as its ``place``-th (one or several), and its weight.

    Experts lie in a tile [groups, members]; each round takes the largest key left.
    """
    group, member = tl.arange(0, GROUP_BLOCK)[:, None], tl.arange(0, MEMBER_BLOCK)[None, :]
    expert = group * MEMBERS + member
    inside = (group < GROUPS) & (member < MEMBERS)
    logit = tl.load(logits + token * LOGIT_STRIDE[0] + expert * LOGIT_STRIDE[1], mask=inside, other=0.0)
    score = 1.0 / (1.0 + tl.exp(-logit.to(tl.float32)))
    choice = score
    if bias is not None:
        choice += tl.load(bias + expert * BIAS_STRIDE, mask=inside, other=0.0).to(tl.float32)
    if GROUPS > GROUP_PICKS:
        choice = keep_best_groups(choice, inside, GROUPS, GROUP_PICKS)
    key = tl.where(inside, ranked(choice, expert, 0x7FFFFFFF), NOTHING)
    mine = NOTHING
    for number in tl.static_range(PICKS):
        best = tl.max(tl.max(key, 1), 0)
        mine = tl.where(place == number, best, mine)
        key = tl.where(key == best, NOTHING, key)
    chosen = tl.where(mine == NOTHING, 0, 0x7FFFFFFF - (mine & 0x7FFFFFFF)).to(tl.int32)
    again = tl.load(logits + token * LOGIT_STRIDE[0] + chosen * LOGIT_STRIDE[1]).to(tl.float32)
    weight = 1.0 / (1.0 + tl.exp(-again))
    if RENORMALIZE:
        picked = inside & (key == NOTHING)
        weight = weight / (tl.sum(tl.sum(tl.where(picked, score, 0.0), 1), 0) + 1e-20)
    return chosen, weight * SCALE
