"""``kimigraph bench moe``: routed experts of Kimi K3.1, in bf16 and in MXFP4, against their weights' floor and torch's
grouped product."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kimigraph.bench.kda import machine
from kimigraph.bench.kernels import kernel_for
from kimigraph.bench.protocol import relative_error, require_gpu, time_in_graph
from kimigraph.ir.errors import NumericsError
from kimigraph.ir.reference.moe_experts import choose_experts, gated
from kimigraph.ir.reference.mxfp4_quantize import mxfp4_dequantize, mxfp4_quantize

WIDTH, INNER, OUTER, EXPERTS, PICKS = 1152, 1024, 2304, 256, 8
FEW = 8  # tokens up to which what follows the experts is part of the operator, as the compiler has it
POINTS = {"decode": (1, 8, 64), "prefill": (1024, 8192)}
ATTRIBUTES: dict[str, Any] = {
    "picks": PICKS, "renormalize": True, "scale": 1.0, "groups": 1, "group_picks": 1, "activation": "situ",
    "beta": 4.0, "linear_beta": 25.0, "limit": None, "eps": 1e-5,
}  # fmt: skip
TOLERANCE = 1e-2
AT_ONCE = 32  # experts that are packed at once, which bounds the memory that it takes
NAMES = ("norm_weight", "up", "shared_gate", "shared_up", "shared_down")


def run(parts: tuple[str, ...], peers: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """The points of ``parts``: the document for ``--json``.

    Raises UsageError without a GPU and NumericsError when a result is wrong.
    """
    require_gpu()
    torch.manual_seed(0)
    document: dict[str, Any] = {"machine": machine(), "moe": []}
    rate = document["machine"]["copy_tb_per_s"]
    for part in parts:
        for tokens in POINTS[part]:
            document["moe"].append({"part": part, **point(tokens, peers, rate)})
            say(line(document["moe"][-1]))
            torch.cuda.empty_cache()
    return document


def point(tokens: int, peers: bool, rate: float) -> dict[str, Any]:
    """The experts alone, with what follows them for a few tokens, and torch's way, on the same random routing."""
    given, codes = packed(operands(tokens))
    logits = [torch.randn(tokens, EXPERTS, device="cuda") for _ in range(_sets(tokens))]
    bare = {name: None if name in NAMES else tensor for name, tensor in given.items()}
    forms = {"experts": _ours(bare, logits), "experts, MXFP4": _ours(bare | codes, logits)}
    if tokens <= FEW:
        forms["whole block"] = _ours(given, logits)
        forms["whole block, MXFP4"] = _ours(given | codes, logits)
    if peers:
        forms["grouped products"] = _products(given, logits)
        forms["torch"] = [partial(grouped, given, row) for row in logits]
    _check(given, bare, logits[0], forms)
    least, replays = (20, 11) if tokens <= 64 else (4, 5)
    times = {form: time_in_graph(calls, least, replays) for form, calls in forms.items()}
    busy = sum(int(chosen_of(given, row).unique().numel()) for row in logits) / len(logits)
    nbytes = busy * 6 * INNER * WIDTH
    floor = nbytes / rate / 1e6
    row: dict[str, Any] = {
        "tokens": tokens,
        "experts read": round(busy, 1),
        "floor_us": round(floor, 2),
        "of_floor": round(floor / times["experts"].median, 3),
        "tflops": round(6 * tokens * PICKS * INNER * WIDTH / times["experts"].median / 1e6, 1),
        "mxfp4": round(times["experts"].median / times["experts, MXFP4"].median, 3),
        "us": {form: time.as_dict() for form, time in times.items()},
    }
    if peers:
        row["ratio"] = {
            form: round(times[form].median / times["experts"].median, 3) for form in ("grouped products", "torch")
        }
    return row


def line(row: dict[str, Any]) -> str:
    """One point for people."""
    times = ", ".join(f"{form} {time['median']:.1f}" for form, time in row["us"].items())
    ratio = "".join(f", {ratio:.2f} of {form}" for form, ratio in row.get("ratio", {}).items())
    return f"N {row['tokens']:5}: {times} us; {row['of_floor']:.0%} of the floor {row['floor_us']:.1f}{ratio}"


def operands(tokens: int) -> dict[str, Tensor | None]:
    """The operator's tensors in schema order, weights of standard deviation 1 over the root of their width."""

    def normal(*sizes: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16) * scale

    return {
        "x": normal(tokens, WIDTH),
        "logits": torch.randn(tokens, EXPERTS, device="cuda"),
        "bias": torch.randn(EXPERTS, device="cuda") * 0.02,
        "gate_up": normal(EXPERTS, 2 * INNER, WIDTH, scale=WIDTH**-0.5),
        "down": normal(EXPERTS, WIDTH, INNER, scale=INNER**-0.5),
        "norm_weight": normal(WIDTH),
        "up": normal(OUTER, WIDTH, scale=WIDTH**-0.5),
        "shared_gate": normal(tokens, INNER),
        "shared_up": normal(tokens, INNER),
        "shared_down": normal(OUTER, INNER, scale=INNER**-0.5),
    }


def packed(given: dict[str, Tensor | None]) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """The operands with the numbers that MXFP4 leaves of the experts, and these in MXFP4: both are the same weights."""
    real, codes = dict(given), dict[str, Tensor | None]()
    for name in ("gate_up", "down"):
        weight = _of(given, name)
        planes = torch.cat([mxfp4_quantize(some) for some in weight.split(AT_ONCE)])
        codes[name] = planes
        real[name] = torch.cat([mxfp4_dequantize(some).to(weight.dtype) for some in planes.split(AT_ONCE)])
    return real, codes


def grouped(given: dict[str, Tensor | None], logits: Tensor) -> Tensor:
    """The experts as the model writes them: picks sorted by expert, ``grouped_mm`` twice, a weighted sum."""
    x, bias, gate_up, down = (_of(given, name) for name in ("x", "bias", "gate_up", "down"))
    scores = torch.sigmoid(logits)
    picks = torch.topk(scores + bias, PICKS, dim=-1, sorted=False).indices
    weights = scores.gather(-1, picks)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    order = torch.argsort(picks.reshape(-1), stable=True)
    gate, up = _product(x[order // PICKS], gate_up, picks).chunk(2, dim=-1)
    hidden = gated(gate.float(), up.float(), "situ", 4.0, 25.0, None).to(x.dtype)
    outputs = _product(hidden, down, picks)[torch.argsort(order)].unflatten(0, picks.shape)
    return (outputs.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def chosen_of(given: dict[str, Tensor | None], logits: Tensor) -> Tensor:
    """The experts of each token, as the operator chooses them."""
    return choose_experts(torch.sigmoid(logits) + _of(given, "bias"), PICKS, 1, 1)


def exact(given: dict[str, Tensor | None], logits: Tensor) -> Tensor:
    """The block in fp64 on the same operands, expert by expert."""
    chosen, scores = chosen_of(given, logits), torch.sigmoid(logits).double()
    weights = scores.gather(1, chosen)
    weights = weights / weights.sum(1, keepdim=True)
    x, gate_up, down = (_of(given, name) for name in ("x", "gate_up", "down"))
    routed = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in chosen.unique().tolist():
        token, place = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ gate_up[expert].double().t()).chunk(2, dim=1)
        hidden = gated(gate, up, "situ", 4.0, 25.0, None) * weights[token, place, None]
        routed.index_add_(0, token, hidden @ down[expert].double().t())
    if given["up"] is None:
        return routed
    norm, up, gate, linear, down = (_of(given, name).double() for name in NAMES)
    root = torch.rsqrt(routed.square().mean(-1, keepdim=True) + ATTRIBUTES["eps"])
    return (routed * root * norm) @ up.t() + gated(gate, linear, "situ", 4.0, 25.0, None) @ down.t()


def _ours(given: dict[str, Tensor | None], logits: list[Tensor]) -> list[Callable[[], Any]]:
    launch = kernel_for("moe_experts", given, ATTRIBUTES).launch
    return [partial(launch, *(given | {"logits": row}).values()) for row in logits]


def _products(given: dict[str, Tensor | None], logits: list[Tensor]) -> list[Callable[[], Any]]:
    """The two grouped products alone: rows sorted beforehand, no activation, no sum."""
    calls: list[Callable[[], Any]] = []
    for row in logits:
        picks = chosen_of(given, row)
        rows = _of(given, "x")[torch.argsort(picks.reshape(-1), stable=True) // PICKS]
        hidden = torch.randn(picks.numel(), INNER, device="cuda", dtype=torch.bfloat16)
        calls.append(partial(_both, given, rows, hidden, _ends(picks)))
    return calls


def _both(given: dict[str, Tensor | None], rows: Tensor, hidden: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    gate_up, down = (_of(given, name).transpose(-2, -1) for name in ("gate_up", "down"))
    return F.grouped_mm(rows, gate_up, offs=ends), F.grouped_mm(hidden, down, offs=ends)


def _product(rows: Tensor, weight: Tensor, picks: Tensor) -> Tensor:
    return F.grouped_mm(rows, weight.transpose(-2, -1), offs=_ends(picks))


def _ends(picks: Tensor) -> Tensor:
    return F.one_hot(picks.reshape(-1), EXPERTS).sum(0).cumsum(0, dtype=torch.int32)


def _check(
    given: dict[str, Tensor | None],
    bare: dict[str, Tensor | None],
    logits: Tensor,
    forms: dict[str, list[Callable[[], Any]]],
) -> None:
    """Each form that computes the block, on the first routing, against fp64."""
    ours = {"experts": bare, "whole block": given}
    both = {f"{form}{kind}": of for form, of in ours.items() for kind in ("", ", MXFP4")}
    for form, operands_of in {**both, "torch": bare}.items():
        if form not in forms:
            continue
        found = forms[form][0]()
        error = relative_error(found if form == "torch" else found[0], exact(operands_of, logits))
        if not error <= TOLERANCE:
            raise NumericsError(f"bench moe, {form}: {logits.shape[0]} tokens are off by {error:.1e}")


def _sets(tokens: int) -> int:
    """Routings that take turns, so that the next call's experts are not in the cache."""
    return 16 if tokens == 1 else 4 if tokens <= 64 else 2


def _of(given: dict[str, Tensor | None], name: str) -> Tensor:
    tensor = given[name]
    assert tensor is not None
    return tensor
