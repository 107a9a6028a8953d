# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""The order of launches that overlap.

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
def bring_to_l2(place, live):
    """Have the lines at each place that is ``live`` on their way to the L2 cache. That may be done before
    ``wait_for_earlier_launch``: what an earlier launch still writes there, it writes to that cache."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred live;
        setp.ne.s32 live, $2, 0;
        @live prefetch.global.L2 [$1];
        } // $0
        """,
        "=r,l,r",
        [place.to(tl.uint64, bitcast=True), live.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
