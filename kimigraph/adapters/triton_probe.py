# pyright: basic
# Reason: kernel text, and Triton's compiler, whose API carries few types.
"""What the installed Triton does, found out by running it, for ``kimigraph doctor``; a process of its own runs this.

``python -m kimigraph.adapters.triton_probe interpreter|compiler`` prints a JSON list of ``{name, ok, detail}``.
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def copy_kernel(source, target, count, BLOCK: tl.constexpr):
    """``target`` becomes ``source`` in the type of ``target``."""
    places = tl.arange(0, BLOCK)
    inside = places < count
    tl.store(target + places, tl.load(source + places, mask=inside, other=0.0), mask=inside)


@triton.jit
def dot_kernel(left, right, target, BLOCK: tl.constexpr):
    """A [BLOCK, BLOCK] product in the operands' type, as fp32."""
    rows = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(target + rows, tl.dot(tl.load(left + rows), tl.load(right + rows)).to(tl.float32))


@triton.jit
def sort_kernel(source, target, BLOCK: tl.constexpr):
    """The values in descending order."""
    places = tl.arange(0, BLOCK)
    tl.store(target + places, tl.sort(tl.load(source + places), descending=True))


@triton.jit
def unguarded_kernel(source, target, count, BLOCK: tl.constexpr):
    """A masked load without ``other``: the lanes outside are undefined on a device."""
    places = tl.arange(0, BLOCK)
    tl.store(target + places, tl.load(source + places, mask=places < count))


def launch(kernel: Any, *arguments: Any, **constants: int) -> None:
    """One program of a kernel."""
    kernel[(1,)](*arguments, **constants)


def runs() -> str:
    """A copy of fp32 values. An empty text when it is right, else what is wrong."""
    source, target = torch.randn(16), torch.zeros(16)
    launch(copy_kernel, source, target, 16, BLOCK=16)
    return "" if torch.equal(source, target) else "a copy of fp32 values differs from its source"


def dot(dtype: torch.dtype) -> Callable[[], str]:
    """A probe of products in one type."""

    def probe() -> str:
        left, right = torch.randn(16, 16).to(dtype), torch.randn(16, 16).to(dtype)
        target = torch.zeros(16, 16)
        launch(dot_kernel, left, right, target, BLOCK=16)
        error = (target - left.float() @ right.float()).abs().max().item()
        return (
            ""
            if error < 1e-3
            else f"a 16x16 product is off by {error:.3g}: kernels widen to fp32 under the interpreter"
        )

    return probe


def rounding(dtype: torch.dtype) -> Callable[[], str]:
    """A probe of casts from fp32."""

    def probe() -> str:
        source = torch.linspace(-3, 3, 64) * 1.2345
        target = torch.zeros(64, dtype=dtype)
        launch(copy_kernel, source, target, 64, BLOCK=64)
        wrong = int((target.float() != source.to(dtype).float()).sum())
        return "" if not wrong else f"{wrong} of 64 casts are not rounded to nearest even: compare with a tolerance"

    return probe


def not_a_number() -> str:
    """A sort of values with a NaN among them."""
    source = torch.tensor([1.0, float("nan"), 3.0, 2.0])
    target = torch.zeros(4)
    launch(sort_kernel, source, target, BLOCK=4)
    kept = int(target.isnan().sum()) == 1 and sorted(target[~target.isnan()].tolist()) == [1.0, 2.0, 3.0]
    return "" if kept else f"sorting [1, NaN, 3, 2] gives {target.tolist()}: kernels sort packed integers instead"


def undefined_lanes() -> str:
    """Whether an unguarded load shows."""
    source, target = torch.ones(8), torch.full((8,), 7.0)
    launch(unguarded_kernel, source, target, 4, BLOCK=8)
    hidden = target[4:].tolist() == [0.0] * 4
    return "a masked load without `other` reads 0, which hides what a device would leave undefined" if hidden else ""


INTERPRETER = {
    "runs kernels": runs,
    "fp32 products": dot(torch.float32),
    "fp16 products": dot(torch.float16),
    "bf16 products": dot(torch.bfloat16),
    "casts to bf16": rounding(torch.bfloat16),
    "casts to fp8 (e4m3)": rounding(torch.float8_e4m3fn),
    "sorts with NaN": not_a_number,
    "undefined lanes show": undefined_lanes,
}


def builds() -> str:
    """A cubin for sm_90. An empty text when it was built."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {"source": "*fp32", "target": "*fp32", "count": "i32", "BLOCK": "constexpr"}
    source = ASTSource(fn=copy_kernel, signature=signature, constexprs={(3,): 16})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    return "" if compiled.asm.get("cubin") else "no cubin came out"


PROBES: dict[str, dict[str, Callable[[], str]]] = {"interpreter": INTERPRETER, "compiler": {"builds for sm_90": builds}}


def results(kind: str) -> Iterator[dict[str, Any]]:
    """Run the probes of one kind; one that raises failed with its error."""
    for name, probe in PROBES[kind].items():
        torch.manual_seed(0)
        try:
            detail = probe()
        except Exception as error:
            detail = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        yield {"name": name, "ok": not detail, "detail": detail}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(list(results(sys.argv[1]))))
