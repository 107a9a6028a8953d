# pyright: basic
# Reason: torch.compile's result has no type of its own.
"""torch.compile of KDA in plain PyTorch: a decode step as one function; prefill as chunks, then a loop of steps."""

from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from kimigraph.bench.peers import PeerUnavailableError, Prepared
from kimigraph.ir.reference.kda_decode import kda_decode

TITLE = "torch.compile"
CHUNK = 32
MOST_STEPS = 64  # (sequence, head) pairs of a decode step
MOST_TOKENS, MOST_HEADS = 4096, 12


def decode(given: dict[str, Tensor], attributes: dict[str, Any]) -> tuple[Prepared, dict[str, Tensor]]:
    """The reference's step with states of its own, updated in place."""
    batch, heads = given["state"].shape[:2]
    if batch * heads > MOST_STEPS:
        raise PeerUnavailableError(f"{TITLE}: timed up to {MOST_STEPS} heads in all; every size is compiled by itself")
    written = {"state": given["state"].clone(), "conv_state": given["conv_state"].clone()}
    operands = given | written
    step = torch.compile(kda_decode, dynamic=False)

    def call() -> Tensor:
        written["out"] = step(**operands, **attributes)
        return written["out"]

    return guarded(call), written


def guarded(call: Prepared) -> Prepared:
    """The call; PeerUnavailableError says why where it does not compile."""

    def attempt() -> Any:
        try:
            return call()
        except TorchDynamoException as error:
            reason = str(error).strip().splitlines()
            raise PeerUnavailableError(f"{TITLE} fails: {reason[0] if reason else type(error).__name__}") from error

    return attempt


def chunks_alone(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, a_log: Tensor, bias: Tensor, lower_bound: float, scale: float
) -> tuple[Tensor, ...]:
    """What chunks [N, H, C, K] need from no other chunk, in fp32 with products in bf16; ``beta`` [N, H, C, 1]."""
    q, k, g, beta = q.float(), k.float(), g.float(), beta.float().sigmoid()
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * scale
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    g = lower_bound * torch.sigmoid(a_log.exp()[:, None, None] * (g + bias[:, None]))
    total, since = g.sum(-2, keepdim=True), g.cumsum(-2)
    middle = total / 2
    ahead, behind = (since - middle).exp(), (middle - since).exp()
    keys = (k * behind).bfloat16().transpose(-1, -2)
    strict = ((k * ahead).bfloat16() @ keys).float().tril(-1) * beta
    pairs = ((q * ahead).bfloat16() @ keys).tril()
    one = torch.eye(CHUNK, device=q.device).expand_as(strict)
    solved = torch.linalg.solve_triangular(one + strict, one, upper=False, unitriangular=True)
    solved = (solved * beta.transpose(-1, -2)).bfloat16()
    recall, read, write = k * since.exp(), q * since.exp(), k * (total - since).exp()
    return recall.bfloat16(), read.bfloat16(), write.bfloat16(), pairs, solved, total.exp()


def chunk_step(
    state: Tensor,
    value: Tensor,
    recall: Tensor,
    read: Tensor,
    write: Tensor,
    pairs: Tensor,
    solved: Tensor,
    decay: Tensor,
) -> tuple[Tensor, Tensor]:
    """One chunk of all heads: the new state [H, V, K] and read-outs [H, C, V]."""
    narrow = state.bfloat16().transpose(-1, -2)
    delta = solved @ (value - recall @ narrow)
    return state * decay + delta.transpose(-1, -2) @ write, read @ narrow + pairs @ delta


def prefill(given: dict[str, Any], attributes: dict[str, Any]) -> tuple[Prepared, dict[str, Tensor]]:
    """Both parts compiled by themselves; the loop over chunks stays in Python, and in the graph that is captured."""
    tokens, heads, side = given["q"].shape[1:]
    if given["cu_seqlens"] is not None or tokens % CHUNK or tokens > MOST_TOKENS or heads > MOST_HEADS:
        raise PeerUnavailableError(
            f"{TITLE}: its loop takes one sequence of whole chunks, up to {MOST_TOKENS} tokens and {MOST_HEADS} heads"
        )
    alone = torch.compile(chunks_alone, dynamic=False)
    step = torch.compile(chunk_step, dynamic=False)
    written: dict[str, Tensor] = {}

    def in_chunks(name: str) -> Tensor:
        return given[name].reshape(tokens // CHUNK, CHUNK, heads, -1).transpose(1, 2)

    def call() -> Tensor:
        with torch.no_grad():
            parts = alone(
                in_chunks("q"), in_chunks("k"), in_chunks("g"), in_chunks("beta"), given["a_log"],
                given["dt_bias"].view(heads, side), attributes["lower_bound"], attributes["scale"],
            )  # fmt: skip
            state, values, outs = given["initial_state"][0], in_chunks("v").contiguous(), []
            for number in range(tokens // CHUNK):
                state, out = step(state, values[number], *(part[number] for part in parts))
                outs.append(out)
            written["out"] = torch.stack(outs).transpose(1, 2).reshape(given["v"].shape).to(given["v"].dtype)
            written["final_state"] = state.unsqueeze(0)
        return written["out"]

    return guarded(call), written
