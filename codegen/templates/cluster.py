# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Programs of one cluster, which run at once on neighbouring multiprocessors and read one another's shared memory.

To the language they are one program whose tensors each of them holds; they differ by ``rank_in_cluster``, and store
with ``put``, since the language would let one of them store for all.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def everywhere(each, lanes, warps, programs):
    """The layout of a tensor that every program of a cluster holds whole, last dim first."""
    bases = [[0] * len(each)] * (programs.bit_length() - 1)
    return gl.BlockedLayout(each, lanes, warps, list(range(len(each)))[::-1], bases)


@triton.jit
def rank_in_cluster():
    """The number of this program among those of its cluster."""
    return tl.inline_asm_elementwise("mov.u32 $0, %cluster_ctarank;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def meet_cluster():
    """Wait until all threads of the cluster have come here; what they wrote to shared memory can then be read.

    The release waits for global memory, too. Fences of shared memory alone were no faster, and a launch failed.
    """
    tl.inline_asm_elementwise(
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; // $0",
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def done_with_cluster():
    """This thread reads no other program's memory any more: a release, so that no read is still on its way."""
    tl.inline_asm_elementwise(
        "barrier.cluster.arrive.release.aligned; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def leave_cluster():
    """As ``done_with_cluster``, at a fourth of its time, for a thread that has computed with all that it read."""
    tl.inline_asm_elementwise(
        "barrier.cluster.arrive.relaxed.aligned; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for_cluster():
    """Wait until every thread of the cluster is ``done_with_cluster``: its memory must stay until then."""
    tl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire.aligned; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def put(place, value, live):
    """Store an int32 at each place that is ``live``."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred live;
        setp.ne.s32 live, $3, 0;
        @live st.global.b32 [$1], $2;
        } // $0
        """,
        "=r,l,r,r",
        [place.to(tl.uint64, bitcast=True), value, live.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
