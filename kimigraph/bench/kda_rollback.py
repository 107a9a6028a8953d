"""``kimigraph bench rollback``: drafts verified and committed by replay, against a state behind every token.

A call is a round of all KDA layers of K3.1 at width: a verifying launch a layer, then one launch that folds what was
accepted. The other way is a launch a layer that writes the states; its commit is held to cost nothing, as if the next
round found the right one by an index.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kimigraph.bench import kda_decode
from kimigraph.bench.kda import bound, entry, machine
from kimigraph.bench.kernels import kernel_for
from kimigraph.bench.protocol import relative_error, require_gpu, sets_for_cold_cache, time_in_graph
from kimigraph.ir.errors import NumericsError
from kimigraph.ir.operators.registry import nbytes

SIDE, HEADS, LAYERS, DRAFTS = kda_decode.SIDE, 32, 6, 7
BATCHES = (1, 32, 128)
LAST = ("out_gate", "norm_weight")


def run(say: Callable[[str], None], batches: tuple[int, ...] = BATCHES) -> dict[str, Any]:
    """All batches. The document for ``--json``.

    Raises UsageError without a GPU and NumericsError when a fold is not decoding to the bit.
    """
    require_gpu()
    torch.manual_seed(0)
    document: dict[str, Any] = {"machine": machine(), "layers": LAYERS, "drafts": DRAFTS, "points": []}
    for batch in batches:
        document["points"].append(point(batch))
        say(line(document["points"][-1]))
        torch.cuda.empty_cache()
    return document


def operands(batch: int, tokens: int) -> dict[str, Tensor]:
    """Operands of ``kda_decode`` with ``tokens`` tokens a sequence."""
    one = kda_decode.operands(HEADS, batch)
    wide = {name: torch.randn(batch, tokens, *one[name].shape[2:], device="cuda") for name in ("qkv", "gate", "beta")}
    gate = torch.randn(batch, tokens, HEADS, SIDE, device="cuda")
    return one | {name: value.bfloat16() for name, value in {**wide, "out_gate": gate}.items()}


class Stack:
    """The layers of one input set: states in one tensor, as the fold takes them, with the log or the snapshots."""

    def __init__(self, batch: int, tokens: int, snapshots: bool) -> None:
        self.layers = [operands(batch, tokens) for _ in range(LAYERS)]
        self.state, self.conv = (torch.stack([one[name] for one in self.layers]) for name in ("state", "conv_state"))
        for number, one in enumerate(self.layers):
            one["state"], one["conv_state"] = self.state[number], self.conv[number]
        rows = (LAYERS, batch, tokens)

        def kept(*last: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*rows, *last, dtype=dtype, device="cuda")

        self.kept: dict[str, Tensor] = (
            {"states": kept(HEADS, SIDE, SIDE)}
            if snapshots
            else {name: kept(HEADS, SIDE) for name in ("keys", "decays", "deltas")}
        )
        self.kept["inputs"] = kept(3 * HEADS * SIDE, dtype=torch.bfloat16)
        self.accepted = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")

    def verifying(self, number: int) -> dict[str, Tensor]:
        """Operands of one layer's verifying launch, in schema order."""
        one = self.layers[number]
        first = {name: value for name, value in one.items() if name not in LAST}
        return first | {name: value[number] for name, value in self.kept.items()} | {name: one[name] for name in LAST}

    def folding(self) -> dict[str, Tensor]:
        """Operands of the fold, in schema order."""
        return {"state": self.state, "conv_state": self.conv, **self.kept, "accepted": self.accepted}

    def bytes_held(self) -> int:
        """Bytes of states and what is kept beside them."""
        return nbytes(self.state, self.conv, *self.kept.values())


def point(batch: int) -> dict[str, Any]:
    """One batch: both ways, their parts, and what they hold."""
    tokens = 1 + DRAFTS
    check(batch, tokens)
    state_bytes = LAYERS * kda_decode.state_bytes(HEADS, batch)
    sets = sets_for_cold_cache(state_bytes, most=16)
    stacks = [Stack(batch, tokens, snapshots=False) for _ in range(sets)]
    verify = kernel_for("kda_verify", dict(stacks[0].verifying(0)), kda_decode.ATTRIBUTES).launch
    fold = kernel_for("kda_replay", dict(stacks[0].folding()), {"state_layout": "vk"}).launch
    held = {"replay": stacks[0].bytes_held()}

    def verified(stack: Stack) -> None:
        for number in range(LAYERS):
            verify(*stack.verifying(number).values())

    def round_of(stack: Stack) -> None:
        verified(stack)
        fold(*stack.folding().values())

    parts = {
        "verify": time_in_graph([lambda one=one: verified(one) for one in stacks], at_least=4),
        "commit": time_in_graph([bound(fold, one.folding()) for one in stacks], at_least=4),
        "replay": time_in_graph([lambda one=one: round_of(one) for one in stacks], at_least=4),
    }
    del stacks
    torch.cuda.empty_cache()
    others = [Stack(batch, tokens, snapshots=True) for _ in range(min(sets, 4))]
    write = kernel_for("kda_verify_states", dict(others[0].verifying(0)), kda_decode.ATTRIBUTES).launch
    held["snapshots"] = nbytes(*others[0].kept.values())

    def written(stack: Stack) -> None:
        for number in range(LAYERS):
            write(*stack.verifying(number).values())

    parts["snapshots"] = time_in_graph([lambda one=one: written(one) for one in others], at_least=4)
    return {
        "batch": batch,
        **{name: entry(time, {}) for name, time in parts.items()},
        "bytes_held": held,
        "held_ratio": round(held["snapshots"] / held["replay"], 3),
        "ratio": round(parts["snapshots"].median / parts["replay"].median, 3),
    }


def check(batch: int, tokens: int) -> None:
    """NumericsError unless verification and fold leave, for every count, what decoding token by token leaves."""
    stack = Stack(batch, tokens, snapshots=False)
    verify = kernel_for("kda_verify", dict(stack.verifying(0)), kda_decode.ATTRIBUTES).launch
    outs = [verify(*stack.verifying(number).values()) for number in range(LAYERS)]
    stack.accepted = (torch.arange(batch, device="cuda") % (tokens + 1)).int()
    wanted = [stack.state.clone(), stack.conv.clone()]
    for number in range(LAYERS):
        now = {name: stack.layers[number][name].clone() for name in ("state", "conv_state")}
        decode = kernel_for("kda_decode", dict(one_token(stack.layers[number], 0) | now), kda_decode.ATTRIBUTES).launch
        for token in range(tokens):
            given = one_token(stack.layers[number], token) | now
            if relative_error(outs[number][:, token : token + 1], decode(*given.values())) > 1e-2:
                raise NumericsError(f"rollback B {batch}: the output of token {token} is not that of decoding")
            rows = stack.accepted == token + 1
            wanted[0][number, rows], wanted[1][number, rows] = now["state"][rows], now["conv_state"][rows]
    fold = kernel_for("kda_replay", dict(stack.folding()), {"state_layout": "vk"}).launch
    fold(*stack.folding().values())
    if not (torch.equal(stack.state, wanted[0]) and torch.equal(stack.conv, wanted[1])):
        raise NumericsError(f"rollback B {batch}: the folded states are not those of decoding to the bit")


def one_token(given: dict[str, Tensor], token: int) -> dict[str, Tensor]:
    """The operands of a step of one of the tokens."""
    per_token = ("qkv", "gate", "beta", "out_gate")
    return given | {name: given[name][:, token : token + 1].contiguous() for name in per_token}


def line(found: dict[str, Any]) -> str:
    """A point for people."""
    times = {name: found[name]["us"]["median"] for name in ("verify", "commit", "replay", "snapshots")}
    told = ", ".join(f"{name} {time:.1f} us" for name, time in times.items())
    return f"B {found['batch']}: {told}: ratio {found['ratio']:.2f}; memory ratio {found['held_ratio']:.2f}"
