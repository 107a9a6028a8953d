"""``kimigraph bench attnres``: attention residuals with the norm behind them; correctness first, then peers."""

from collections.abc import Callable, Sequence
from statistics import geometric_mean
from typing import Any

import torch

from kimigraph.bench.kda import machine
from kimigraph.bench.kernels import kernel_for
from kimigraph.bench.peers import RESIDUAL_PEERS, PeerUnavailableError, adaptor
from kimigraph.bench.protocol import Timing, relative_error, require_gpu, sets_for_cold_cache, time_in_graph
from kimigraph.ir.errors import NumericsError

WIDTH = 7168
POINTS = (*((tokens, sources) for tokens in (1, 64) for sources in (2, 5, 9)), (8192, 9))
EPS = 1e-5
TOLERANCE = 1e-2
BYTES_AT_RATE = 4.3e6  # bytes a microsecond that a copy streams
MOST_SETS = 2048

Operands = dict[str, Any]


def run(peers: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """All points. The document for ``--json``.

    Raises UsageError without a GPU and NumericsError when a result is wrong at a point.
    """
    require_gpu()
    torch.manual_seed(0)
    document: dict[str, Any] = {"machine": machine(), "width": WIDTH, "points": []}
    for tokens, sources in POINTS:
        document["points"].append(point(tokens, sources, peers))
        say(line(document["points"][-1]))
    document["geometric_mean_ratio"] = {}
    for name in peers:
        ratios = [peer["ratio"] for one in document["points"] if "ratio" in (peer := one["peers"].get(name, {}))]
        if ratios:
            document["geometric_mean_ratio"][name] = round(geometric_mean(ratios), 3)
            say(f"{name}: geometric mean of the ratios {geometric_mean(ratios):.3f}, worst {min(ratios):.3f}")
    return document


def operands(tokens: int, sources: int) -> Operands:
    """Random sources of different sizes, as blocks have them, and weights near their initial values."""

    def vector(mean: float, deviation: float) -> torch.Tensor:
        return (mean + deviation * torch.randn(WIDTH, device="cuda")).bfloat16()

    return {
        "sources": [(torch.randn(tokens, WIDTH, device="cuda") * (1 + number)).bfloat16() for number in range(sources)],
        "query": vector(0.0, WIDTH**-0.5),
        "norm_weight": vector(1.0, 0.1),
        "out_norm_weight": vector(1.0, 0.1),
    }


def weights(given: Operands) -> Operands:
    """The operands that are no source."""
    return {name: value for name, value in given.items() if name != "sources"}


def ours(given: Operands) -> Callable[[], torch.Tensor]:
    """The compiled kernel's launch on these operands."""
    return bound(launch_of(given), given)


def launch_of(given: Operands) -> Callable[..., torch.Tensor]:
    """The compiled kernel's launch."""
    flat = {f"sources_{number}": source for number, source in enumerate(given["sources"])}
    return kernel_for("attention_residual", {**flat, **weights(given)}, {"eps": EPS, "out_eps": EPS}).launch


def bound(launch: Callable[..., torch.Tensor], given: Operands) -> Callable[[], torch.Tensor]:
    """The launch on these operands."""
    return lambda: launch(*given.values())


def expected(given: Operands) -> torch.Tensor:
    """The operator in fp64."""
    values = torch.stack([source.double() for source in given["sources"]])
    logits = (values * (given["query"].double() * given["norm_weight"].double())).sum(-1)
    mixture = torch.softmax(logits * torch.rsqrt(values.square().mean(-1) + EPS), dim=0)
    mixed = (mixture.unsqueeze(-1) * values).sum(0)
    return mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + EPS) * given["out_norm_weight"].double()


def checked(where: str, found: torch.Tensor, given: Operands) -> float:
    """The relative error; NumericsError when it is none of rounding."""
    error = relative_error(found, expected(given))
    if not error <= TOLERANCE:
        raise NumericsError(f"{where}: the result differs from the fp64 reference by {error:.2e} of its norm")
    return float(f"{error:.3g}")


def moved(tokens: int, sources: int) -> int:
    """Bytes that must move: every source and weight once, the result once."""
    return 2 * WIDTH * (tokens * (sources + 1) + 3)


def point(tokens: int, sources: int, peers: Sequence[str]) -> dict[str, Any]:
    """One shape: cold sources, one launch of ours a call."""
    nbytes = moved(tokens, sources)
    given = [operands(tokens, sources) for _ in range(sets_for_cold_cache(nbytes, MOST_SETS))]
    launch = launch_of(given[0])
    where = f"attention residual of {sources} sources, {tokens} tokens"
    error = checked(where, launch(*given[0].values()), given[0])
    time = time_in_graph([bound(launch, one) for one in given])
    floor = nbytes / BYTES_AT_RATE
    found: dict[str, Any] = {
        "tokens": tokens,
        "sources": sources,
        "ours": {"us": time.as_dict(), "error": error},
        "floor_us": round(floor, 2),
        "of_floor": round(floor / time.median, 3),
        "peers": {},
    }
    for name in (name for name in RESIDUAL_PEERS if name in peers):
        found["peers"][name] = peer_entry(name, where, given, time)
    return found


def peer_entry(name: str, where: str, given: Sequence[Operands], time: Timing) -> dict[str, Any]:
    """The peer's error and time, or why there are none; NumericsError when it computes something else."""
    try:
        calls = adaptor(name).residual(given, EPS)
        error = checked(f"{where}, {name}", calls[0](), given[0])
        other = time_in_graph(calls)
    except PeerUnavailableError as reason:
        return {"unavailable": str(reason)}
    return {"us": other.as_dict(), "error": error, "ratio": round(other.median / time.median, 3)}


def line(point: dict[str, Any]) -> str:
    """A point for people."""
    us = point["ours"]["us"]
    text = f"T {point['tokens']} sources {point['sources']}: {us['median']:.2f} us ({us['least']:.2f}-{us['most']:.2f})"
    text += f", error {point['ours']['error']:.1e}, floor {point['floor_us']:.2f}"
    for name, peer in point["peers"].items():
        text += f" | {name} " + (
            f"{peer['us']['median']:.2f} us, ratio {peer['ratio']:.2f}" if "us" in peer else peer["unavailable"]
        )
    return text
