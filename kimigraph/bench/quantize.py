"""``kimigraph bench quantize``: the quantisers alone, against the copy rate, torch.compile and vLLM's quantiser."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kimigraph.bench.kda import machine
from kimigraph.bench.kernels import kernel_for
from kimigraph.bench.peers import PeerUnavailableError, adaptor
from kimigraph.bench.protocol import Timing, require_gpu, sets_for_cold_cache, time_in_graph
from kimigraph.ir.errors import NumericsError
from kimigraph.ir.operators import OPERATORS

WIDTH = 7168
TOKENS = (64, 2048, 8192)
PEERS = ("torch_compile", "vllm")
LEAST = 1e-4


@dataclass(frozen=True)
class Subject:
    """One quantiser: its operator and attributes; ``group`` elements share a scale of ``scale_bytes``."""

    name: str
    op: str
    attributes: dict[str, Any]
    group: int
    scale_bytes: int

    def moved(self, tokens: int) -> int:
        """Bytes read and written."""
        return tokens * WIDTH * 3 + tokens * (WIDTH // self.group) * self.scale_bytes


SUBJECTS = (
    Subject("mxfp8, group 32", "mxfp8_quantize", {"group": 32, "rounding": "rceil", "rotate": False}, 32, 1),
    Subject("fp8, tile 128, power2", "fp8_quantize", {"tile": 128, "scales": "power2", "rotate": False}, 128, 4),
    Subject("fp8, tile 128, amax", "fp8_quantize", {"tile": 128, "scales": "amax", "rotate": False}, 128, 4),
)


def run(chosen: Sequence[str], say: Callable[[str], None], tokens: Sequence[int] = TOKENS) -> dict[str, Any]:
    """All subjects, with the peers named in ``chosen``. The document for ``--json``.

    Raises UsageError without a GPU and NumericsError where a kernel's bytes are not those of the reference.
    """
    require_gpu()
    document: dict[str, Any] = {"machine": machine(), "points": []}
    for subject in SUBJECTS:
        for count in tokens:
            document["points"].append(point(subject, count, chosen, document["machine"]["copy_tb_per_s"]))
            say(line(document["points"][-1]))
    return document


def point(subject: Subject, tokens: int, peers: Sequence[str], rate: float) -> dict[str, Any]:
    """One size: bytes checked, then the time of a call on cold input, and of each peer."""
    moved = subject.moved(tokens)
    sets = sets_for_cold_cache(moved, most=64)
    given = [torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    launch = kernel_for(subject.op, {"x": given[0]}, subject.attributes).launch
    check(subject, given[0][:64].clone())
    time = time_in_graph([lambda x=x: launch(x) for x in given])
    found: dict[str, Any] = {
        "subject": subject.name,
        "tokens": tokens,
        "bytes": moved,
        "us": time.as_dict(),
        "of_copy_rate": round(moved / time.median / 1e6 / rate, 3),
        "peers": {},
    }
    for name in peers:
        try:
            other = PREPARE[name](subject, given)
            found["peers"][name] = {"us": other.as_dict(), "ratio": round(other.median / time.median, 3)}
        except PeerUnavailableError as reason:
            found["peers"][name] = {"unavailable": str(reason)}
    return found


def check(subject: Subject, x: torch.Tensor) -> None:
    """NumericsError unless codes and scales are the reference's, bit by bit."""
    launch = kernel_for(subject.op, {"x": x}, subject.attributes).launch
    found, wanted = launch(x), OPERATORS[subject.op].reference(x.cpu(), **subject.attributes)
    for part, want in zip(found, wanted, strict=True):
        if not torch.equal(part.cpu().view(torch.uint8), want.view(torch.uint8)):
            raise NumericsError(f"{subject.name}: bytes differ from the reference's")


def line(record: dict[str, Any]) -> str:
    """A point for people."""
    peers = "".join(
        f"  {name} {peer['us']['median']:.2f} ({peer['ratio']:.2f}x)" if "us" in peer else f"  {name}: none"
        for name, peer in record["peers"].items()
    )
    return (
        f"{record['subject']:22} {record['tokens']:5} tokens {record['bytes'] / 1e6:7.1f} MB "
        f"{record['us']['median']:8.2f} us  {100 * record['of_copy_rate']:.0f} % of the copy rate{peers}"
    )


def _torch_compile(subject: Subject, given: Sequence[torch.Tensor]) -> Timing:
    function = torch.compile(_mxfp8 if subject.op == "mxfp8_quantize" else _fp8, dynamic=False)
    power2 = subject.attributes.get("scales") == "power2"
    return time_in_graph([lambda x=x: function(x, subject.group, power2) for x in given])


def _mxfp8(x: torch.Tensor, group: int, power2: bool) -> tuple[torch.Tensor, torch.Tensor]:
    del power2
    groups = x.float().unflatten(-1, (-1, group))
    bits = groups.abs().amax(-1).view(torch.int32)
    scale = ((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000)).clamp(0, 254)
    inverse = ((254 - scale) << 23).view(torch.float32)
    codes = (groups * inverse.unsqueeze(-1)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.flatten(-2), scale.to(torch.uint8)


def _fp8(x: torch.Tensor, group: int, power2: bool) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.float().unflatten(-1, (-1, group))
    scale = groups.abs().amax(-1).clamp_min(LEAST) / 448.0
    if power2:
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)
    codes = (groups / scale.unsqueeze(-1)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.flatten(-2), scale


def _vllm(subject: Subject, given: Sequence[torch.Tensor]) -> Timing:
    if subject.op == "mxfp8_quantize":
        raise PeerUnavailableError("vLLM's group quantiser writes fp32 scales")
    quantise = adaptor("vllm").group_quantiser(subject.group, LEAST, subject.attributes["scales"] == "power2")
    return time_in_graph([lambda x=x: quantise(x) for x in given])


PREPARE = {"torch_compile": _torch_compile, "vllm": _vllm}
