"""``kimigraph bench kda``: the decode step and prefill; correctness first, peers on the same operands."""

import platform
from collections.abc import Callable, Sequence
from statistics import geometric_mean
from typing import Any

import torch
import triton

from kimigraph.bench import kda_decode, kda_prefill
from kimigraph.bench.peers import DECODE_PEERS, PREFILL_PEERS, PeerUnavailableError, adaptor
from kimigraph.bench.protocol import Timing, ceilings, relative_error, require_gpu, sets_for_cold_cache, time_in_graph
from kimigraph.bench.timeline import time_on_device
from kimigraph.ir.errors import NumericsError

DECODE_POINTS = tuple((heads, batch) for heads in (24, 32, 48, 96) for batch in (1, 8, 64, 256))
PREFILL_POINTS = (
    *((heads, (tokens,)) for heads in (12, 24, 32, 96) for tokens in (4096, 8192, 32768)),
    *((heads, (6016, 2048, 4500, 3333, 5000, 2500, 4000, 5371)) for heads in (32, 96)),  # 8 x 4k, ragged
)
TOLERANCE = {"out": 1e-2, "state": 1e-2, "final_state": 1e-2, "conv_state": 1e-6}
STATE_BYTES_AT_RATE = 4.3e6  # bytes a microsecond that a copy streams


def run(peers: Sequence[str], say: Callable[[str], None], decode: bool = True, prefill: bool = True) -> dict[str, Any]:
    """All points; ``peers`` names adaptors. The document for ``--json``.

    Raises UsageError without a GPU and NumericsError when our result is wrong at a point.
    """
    require_gpu()
    torch.manual_seed(0)
    document: dict[str, Any] = {"machine": machine(), "decode": [], "prefill": []}
    for heads, batch in DECODE_POINTS if decode else ():
        document["decode"].append(decode_point(heads, batch, peers))
        say(line(document["decode"][-1]))
    for heads, lengths in PREFILL_POINTS if prefill else ():
        document["prefill"].append(prefill_point(heads, lengths, peers))
        say(line(document["prefill"][-1]))
    for row, ratios in ratios_by_row(document).items():
        document.setdefault("rows", {})[row] = {
            "geometric_mean": round(geometric_mean(ratios), 3),
            "worst": min(ratios),
        }
        say(f"{row}: geometric mean of the ratios {geometric_mean(ratios):.3f}, worst {min(ratios):.3f}")
    return document


def ratios_by_row(document: dict[str, Any]) -> dict[str, list[float]]:
    """The peers' times over ours, of the points that a claim is made about together."""
    rows: dict[str, list[float]] = {}
    for point in document["decode"]:
        for name, peer in point["peers"].items():
            part = "" if name == "vllm" else " B 1 and 8" if point["batch"] <= 8 else " B 64 and more"
            if "ratio" in peer:
                rows.setdefault(f"decode, {name}{part}", []).append(peer["ratio"])
    for point in document["prefill"]:
        several = f" N {len(point['lengths'])}" if len(point["lengths"]) > 1 else ""
        for name, peer in point["peers"].items():
            if "ratio" in peer:
                rows.setdefault(f"prefill H {point['heads']}{several}, {name}", []).append(peer["ratio"])
    return rows


def machine() -> dict[str, Any]:
    """What the numbers were taken on, ceilings included."""
    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    return {"gpu": torch.cuda.get_device_name(), **versions, **ceilings()}


def decode_point(heads: int, batch: int, peers: Sequence[str]) -> dict[str, Any]:
    """One decode shape: cold states, one launch of ours a call."""
    nbytes = kda_decode.state_bytes(heads, batch)
    given = [kda_decode.operands(heads, batch) for _ in range(sets_for_cold_cache(nbytes))]
    launch = kda_decode.ours(given[0])
    pristine, checked = kda_decode.copies(given[0]), kda_decode.copies(given[0])
    out = launch(*checked.values())
    found = {"out": out, "state": checked["state"], "conv_state": checked["conv_state"]}
    names = ["out", "state", "conv_state"]
    wanted = dict(zip(names, kda_decode.expected(given[0]), strict=True))
    errors = compare(f"decode H {heads} B {batch}", found, wanted)
    time = time_in_graph([bound(launch, one) for one in given])
    floor = 2 * nbytes / STATE_BYTES_AT_RATE
    point: dict[str, Any] = {
        "heads": heads,
        "batch": batch,
        "ours": entry(time, errors),
        "floor_us": round(floor, 2),
        "peers": {},
    }
    for name in DECODE_PEERS:
        if name in peers:
            prepare = bound_adaptor(name, "decode", kda_decode.ATTRIBUTES)
            point["peers"][name] = peer_entry(prepare, pristine, given, wanted, time, 20)
    return point


def prefill_point(heads: int, lengths: tuple[int, ...], peers: Sequence[str]) -> dict[str, Any]:
    """One prefill shape; inputs and scratch exceed the L2 cache by themselves, so two sets do."""
    given = [kda_prefill.operands(heads, lengths) for _ in range(2 if sum(lengths) <= 8192 else 1)]
    call = kda_prefill.ours(given[0])
    out, final_state = call()
    wanted_out, wanted_state = kda_prefill.expected(given[0], lengths)
    wanted = checked_part({"out": wanted_out.unsqueeze(0), "final_state": wanted_state})
    errors = compare(f"prefill H {heads} T {lengths}", part(out, final_state, wanted), wanted)
    count = 6 if sum(lengths) <= 8192 else 2
    time = time_in_graph([call, *(kda_prefill.ours(one) for one in given[1:])], at_least=count)
    point: dict[str, Any] = {"heads": heads, "lengths": lengths, "ours": entry(time, errors), "peers": {}}
    for name in PREFILL_PEERS:
        if name in peers:
            prepare = bound_adaptor(name, "prefill", kda_prefill.ATTRIBUTES)
            on_device = "prefill" in getattr(adaptor(name), "ON_DEVICE", ())
            point["peers"][name] = peer_entry(prepare, given[0], given, wanted, time, count, on_device=on_device)
    return point


def checked_part(wanted: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Without the state where only a prefix was computed."""
    return {name: tensor for name, tensor in wanted.items() if tensor is not None}


def part(out: torch.Tensor, final_state: torch.Tensor, wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tokens and heads that the reference computed, of the first sequence."""
    tokens, heads = wanted["out"].shape[1:3]
    found = {"out": out[:, :tokens, :heads], "final_state": final_state[0, :heads]}
    return {name: found[name] for name in wanted}


def peer_entry(
    prepare: Callable[[Any], Any],
    pristine: Any,
    given: Sequence[Any],
    wanted: dict[str, torch.Tensor],
    ours: Timing,
    count: int,
    *,
    on_device: bool = False,
) -> dict[str, Any]:
    """The peer's errors and time, or why there are none; ``pristine`` operands have not been stepped on by anyone.

    ``on_device``: it cannot be captured, so its kernels' own times count, and the entry says so.

    Raises NumericsError when the peer computes something else: its time would mean nothing.
    """
    try:
        call, written = prepare(pristine)
        call()
        found = part(written["out"], written["final_state"], wanted) if "final_state" in written else written
        errors = compare(f"a peer of H {pristine['a_log'].numel()}", found, wanted)
        if on_device:
            time = time_on_device(call, count)
        else:
            time = time_in_graph([prepare(one)[0] for one in given], at_least=count)
    except PeerUnavailableError as reason:
        return {"unavailable": str(reason)}
    clock = {"clock": "kernels on the device's timeline, gaps left out"} if on_device else {}
    return {**entry(time, errors), **clock, "ratio": round(time.median / ours.median, 3)}


def bound_adaptor(name: str, phase: str, attributes: dict[str, Any]) -> Callable[[Any], Any]:
    """The peer's preparation of a call on operands."""
    return lambda given: getattr(adaptor(name), phase)(given, attributes)


def compare(where: str, found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative errors; NumericsError names a result that is not the reference's."""
    errors = {name: relative_error(found[name], wanted[name]) for name in wanted}
    for name, error in errors.items():
        if not error <= TOLERANCE[name]:
            raise NumericsError(f"{where}: {name} differs from the fp64 reference by {error:.2e} of its norm")
    return errors


def entry(time: Timing, errors: dict[str, float]) -> dict[str, Any]:
    """A side of a comparison, for JSON."""
    return {"us": time.as_dict(), "errors": {name: float(f"{error:.3g}") for name, error in errors.items()}}


def bound(launch: Callable[..., Any], given: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """The launch on these operands."""
    return lambda: launch(*given.values())


def line(point: dict[str, Any]) -> str:
    """A point for people."""
    shape = f"B {point['batch']}" if "batch" in point else f"T {'+'.join(map(str, point['lengths']))}"
    ours = point["ours"]
    errors = " ".join(f"{name} {error:.1e}" for name, error in ours["errors"].items())
    text = f"H {point['heads']} {shape}: {ours['us']['median']:.2f} us ({errors})"
    for name, peer in point["peers"].items():
        text += f" | {name} " + (
            f"{peer['us']['median']:.2f} us, ratio {peer['ratio']:.2f}" if "us" in peer else peer["unavailable"]
        )
    return text
