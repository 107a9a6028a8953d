"""What this machine's GPU can do, as a device file (``kimigraph.ir.device``) has it."""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

import torch

from kimigraph.adapters.device_kernels import run_nothing, run_polynomial, run_signals
from kimigraph.bench.protocol import time_in_graph
from kimigraph.ir.device import Device
from kimigraph.ir.errors import UsageError

EDGE = 8192
"""Rows, columns and depth of the matrix products."""

SMALL = 4096
"""Elements of the kernel whose latency is taken: one block, in the cache."""

CHAIN = 4
"""Small kernels on each of the two branches between which the cost of a fork and a join is taken."""

SIGNALS = 64
"""Answers that two programs of one launch give each other while the time of a signal is taken."""


def measure(notify: Callable[[str], None]) -> Device:
    """The device file's figures of the current CUDA device; UsageError where there is none."""
    if not torch.cuda.is_available():
        raise UsageError("measure-device needs a CUDA device, and torch finds none here: run it where there is one")
    properties = torch.cuda.get_device_properties()
    notify("measuring the copy rate")
    copy = _copy_rate()
    notify("measuring matrix products")
    products = _product_rates()
    notify("measuring launches")
    launch = _seconds(run_nothing, 200)
    tile = torch.ones(SMALL, device="cuda")
    small = _seconds(lambda: torch.neg(tile, out=tile), 200)
    return Device(
        name=properties.name,
        bytes_per_second=copy,
        flops_per_second=products,
        vector_flops_per_second=_vector_rate(),
        launch_seconds=launch,
        latency_seconds=max(small - launch, 0.0),
        event_seconds=_event_seconds(small),
        signal_seconds=_signal_seconds(),
        units=properties.multi_processor_count,
        cache_bytes=properties.L2_cache_size,
        sources={
            "bytes_per_second": "measured: negation of 2-byte elements, bytes read and written",
            "flops_per_second": f"measured: product of {EDGE}-cubed random matrices; no rate, no product of that type",
            "vector_flops_per_second": "measured: a polynomial of high degree over 32-bit elements",
            "launch_seconds": "measured: an empty kernel node of a CUDA graph",
            "latency_seconds": f"measured: a kernel on {SMALL} elements that waits for another, less launch_seconds",
            "event_seconds": f"measured: {CHAIN} small kernels on each of two branches, less one branch alone",
            "signal_seconds": f"measured: {SIGNALS} answers between two programs of one launch, by direction",
            "measured": f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}",
        },
    )


def _seconds(call: Callable[[], object], at_least: int) -> float:
    return _rounded(time_in_graph([call], at_least=at_least).median * 1e-6)


def _event_seconds(small: float) -> float:
    """Half of what a fork and a join add to a branch of ``CHAIN`` kernels between two others of ``small`` seconds."""
    tiles = [torch.ones(SMALL, device="cuda") for _ in range(3)]
    side = torch.cuda.Stream()

    def step(number: int) -> None:
        torch.neg(tiles[number], out=tiles[number])

    def forked() -> None:
        step(0)
        side.wait_stream(torch.cuda.current_stream())
        for _ in range(CHAIN):
            step(1)
        with torch.cuda.stream(side):
            for _ in range(CHAIN):
                step(2)
        torch.cuda.current_stream().wait_stream(side)
        step(0)

    return _rounded(max(_seconds(forked, 50) - (CHAIN + 2) * small, 0.0) / 2)


def _signal_seconds() -> float:
    """Until one program sees what another of the same launch wrote."""
    flags = torch.zeros(2, dtype=torch.int32, device="cuda")
    one, many = (_seconds(partial(run_signals, flags, count), 20) for count in (1, 1 + SIGNALS))
    return _rounded(max(many - one, 0.0) / (2 * SIGNALS))


def _copy_rate() -> float:
    source = torch.empty(2**30, dtype=torch.int16, device="cuda").random_()
    target = torch.empty_like(source)
    return _rounded(4 * source.numel() / _seconds(lambda: torch.neg(source, out=target), 10))


def _product_rates() -> dict[str, float]:
    """FLOPs per second by type; a type that the device or this torch cannot multiply is left out."""
    rates: dict[str, float] = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        left, right = (torch.randn(EDGE, EDGE, device="cuda", dtype=dtype) for _ in range(2))
        rates[str(dtype)[6:]] = _rounded(2 * EDGE**3 / _seconds(lambda a=left, b=right: torch.mm(a, b), 5))
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        rate = _scaled_product_rate(dtype)
        if rate is not None:
            rates[str(dtype)[6:]] = rate
    return rates


def _scaled_product_rate(dtype: torch.dtype) -> float | None:
    left = torch.randn(EDGE, EDGE, device="cuda").to(dtype)
    right = torch.randn(EDGE, EDGE, device="cuda").to(torch.float8_e4m3fn).t()  # two e5m2 operands are not supported
    one = torch.ones((), device="cuda")
    try:
        seconds = _seconds(lambda: torch.ops.aten._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16), 5)
    except RuntimeError:
        return None
    return _rounded(2 * EDGE**3 / seconds)


def _vector_rate() -> float:
    """Fused multiply-adds of one generated kernel whose loads and stores are few against them."""
    values = torch.rand(2**22, device="cuda")
    out = torch.empty_like(values)
    seconds = _seconds(lambda: run_polynomial(values, out, 512), 5)
    return _rounded(2.0 * 512 * values.numel() / seconds)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
