# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""The order of launches that overlap, and of programs of one launch that wait for one another.

A program may start before the launches ahead of it have ended, and lines that their programs read may then stand in the
L1 cache it shares with them: load past that cache (".cg") what an earlier launch wrote.
"""

import triton
import triton.language as tl


@triton.jit
def let_next_launch_start():
    """The next launch may take free multiprocessors once every program has come here; it waits for the end itself."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for_earlier_launch():
    """Wait until the launches before this one have ended and what they wrote can be read."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def arrive_and_wait(arrivals, target):
    """Wait until ``target`` programs have come here, those of earlier meetings included; the counter starts at 0.

    What any of them wrote before can then be read past the L1 cache. All of them must run at once. One thread looks, so
    that the counter's place in the L2 cache stays free for arrivals.
    """
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred other, short;
        .reg .b32 seen;
        mov.u32 seen, %tid.x;
        setp.ne.u32 other, seen, 0;
        @other bra done;
        red.release.gpu.global.add.u32 [$1], 1;
        again:
        ld.acquire.gpu.global.u32 seen, [$1];
        setp.lt.u32 short, seen, $2;
        @short bra again;
        done:
        } // $0
        """,
        "=r,l,r",
        [arrivals.to(tl.uint64, bitcast=True), target],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()
