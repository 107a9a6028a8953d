# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Programs of one launch that wait for one another: they must all run at once, as in a cooperative launch."""

import torch
import triton
import triton.language as tl


@triton.jit
def after_all_threads(value):
    """A scalar as it is, once all threads of the program have come here: what they wrote before can be read then.

    ``tl.debug_barrier`` does the same, but a loop that holds one is not pipelined.
    """
    return tl.inline_asm_elementwise(
        "bar.sync 0; mov.b32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def meet(arrivals, SPLITS: tl.constexpr):
    """Wait until the SPLITS programs of a row have come here; what they wrote before is then visible.

    The counter only grows and may wrap around: SPLITS is a power of two.
    """
    tl.debug_barrier()
    if SPLITS > 1:
        seen = (tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") + 1).to(tl.uint32, bitcast=True)
        target = ((seen - 1) & (0xFFFFFFFF - (SPLITS - 1))) + SPLITS
        while (seen - target).to(tl.int32, bitcast=True) < 0:
            seen = tl.atomic_add(arrivals, 0, sem="acquire", scope="gpu").to(tl.uint32, bitcast=True)


def row_state(known, words, device):
    """Memory that a launch finds zeroed and leaves so: no launch has to clear it. ``known`` keeps it, by stream.

    Captured launches share one, made by the first call outside a capture: graphs that hold launches of this kernel must
    not be replayed side by side. Without such a call a capture clears memory of its own each time.
    """
    if device.type != "cuda":  # memory is planned: nothing runs
        return torch.zeros(words, dtype=torch.int32, device=device)
    capturing = torch.cuda.is_current_stream_capturing()
    keys = ["captured"] if capturing else ["captured", torch.cuda.current_stream(device).cuda_stream]
    for key in keys:
        if key not in known:
            state = torch.zeros(words, dtype=torch.int32, device=device)
            if capturing:
                return state
            known[key] = state
    return known[keys[-1]]
