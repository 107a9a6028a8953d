"""``kimigraph bench kda-logged``: decoding whose states are written with every sixth token, against plain decoding.

A call is one KDA layer of 32 heads. Rows are at different places of their logs, as those of running sequences are, so
that a sixth of them writes its state in each call; or all at the same place, and a call is the mean over all places.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kimigraph.bench import kda_decode
from kimigraph.bench.kda import bound, entry, machine
from kimigraph.bench.kernels import kernel_for
from kimigraph.bench.protocol import relative_error, require_gpu, sets_for_cold_cache, times_in_turn
from kimigraph.ir.errors import NumericsError
from kimigraph.state_logs import LENGTH

SIDE, HEADS = kda_decode.SIDE, 32
BATCHES = (1, 8, 32, 64, 128, 256)
LOG = ("keys", "decays", "deltas", "filled")
LAST = ("out_gate", "norm_weight")


def run(say: Callable[[str], None], batches: tuple[int, ...] = BATCHES) -> dict[str, Any]:
    """All batches. The document for ``--json``.

    Raises UsageError without a GPU and NumericsError when a written state is not that of decoding to the bit.
    """
    require_gpu()
    torch.manual_seed(0)
    document: dict[str, Any] = {"machine": machine(), "heads": HEADS, "length": LENGTH, "points": []}
    for batch in batches:
        document["points"].append(point(batch))
        say(line(document["points"][-1]))
        torch.cuda.empty_cache()
    return document


def operands(batch: int, length: int = LENGTH) -> dict[str, Tensor]:
    """Operands of ``kda_decode_logged`` in schema order, the rows at different places of their logs."""
    one = kda_decode.operands(HEADS, batch)

    def records() -> Tensor:
        return torch.randn(batch, length, HEADS, SIDE, device="cuda") * SIDE**-0.5

    log = {"keys": records(), "decays": records().sigmoid(), "deltas": records()}
    filled = torch.arange(batch, dtype=torch.int32, device="cuda") % length
    first = {name: value for name, value in one.items() if name not in LAST}
    return first | log | {"filled": filled} | {name: one[name] for name in LAST}


def plain(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """What ``kda_decode`` takes of them."""
    return {name: value for name, value in given.items() if name not in LOG}


def ours(given: dict[str, Tensor]) -> Callable[..., Tensor]:
    """The compiled kernel's launch."""
    return kernel_for("kda_decode_logged", dict(given), kda_decode.ATTRIBUTES).launch


def point(batch: int, length: int = LENGTH) -> dict[str, Any]:
    """One batch: both ways, in turn."""
    check(batch, length)
    sets = sets_for_cold_cache(kda_decode.state_bytes(HEADS, batch), most=16)
    given = [operands(batch, length) for _ in range(sets)]
    decode, logged = kda_decode.ours(plain(given[0])), ours(given[0])
    places = [torch.full((batch,), place, dtype=torch.int32, device="cuda") for place in range(length)]
    together = [one | {"filled": filled} for filled in places for one in given]
    times = times_in_turn(
        {
            "decode": [bound(decode, plain(one)) for one in given],
            "logged": [bound(logged, one) for one in given],
            "together": [bound(logged, one) for one in together],
        }
    )
    return {
        "batch": batch,
        **{name: entry(time, {}) for name, time in times.items()},
        "ratio": round(times["decode"].median / times["logged"].median, 3),
        "ratio_together": round(times["decode"].median / times["together"].median, 3),
    }


def check(batch: int, length: int) -> None:
    """NumericsError unless states, whenever they are written, are those of decoding, and outputs those up to bf16."""
    given = operands(batch, length)
    given["filled"].zero_()
    other = {name: value.clone() for name, value in plain(given).items()}
    decode, logged = kda_decode.ours(other), ours(given)
    for step in range(2 * length):
        for name in ("qkv", "gate", "beta", "out_gate"):
            given[name].normal_()
            other[name].copy_(given[name])
        wanted, out = decode(*other.values()), logged(*given.values())
        if relative_error(out, wanted) > 1e-2:
            raise NumericsError(f"kda-logged B {batch}: the output of step {step} is not that of decoding")
        given["filled"].add_(1).remainder_(length)
    if not (torch.equal(given["state"], other["state"]) and torch.equal(given["conv_state"], other["conv_state"])):
        raise NumericsError(f"kda-logged B {batch}: the written states are not those of decoding to the bit")


def line(found: dict[str, Any]) -> str:
    """A point for people."""
    times = {name: found[name]["us"]["median"] for name in ("decode", "logged", "together")}
    told = ", ".join(f"{name} {time:.1f} us" for name, time in times.items())
    return f"B {found['batch']}: {told}: ratio {found['ratio']:.2f}, rows in step {found['ratio_together']:.2f}"
