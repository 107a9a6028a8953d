# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""4096 counters, two short lists and notes in a program's shared memory, which the language has no atomics for.

They are variables of the kernel function: ``declare_counts`` must come once, before all else, and be executed by every
thread. A barrier between writing and reading is the caller's, and one of the cluster before others' are read.
"""

import triton
import triton.language as tl


@triton.jit
def declare_counts():
    """Make them known: counters, lists (each its length, then 128 words, then 128 more), notes."""
    tl.inline_asm_elementwise(
        """
        .shared .align 16 .b32 program_counts[4128];
        .shared .align 16 .b32 program_list[520];
        .shared .align 16 .b32 program_notes[192]; // $0
        """,
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def count(place):
    """Add one to the counter at each place; the places from 4096 on, one a lane, take what is not to be counted."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .b32 address;
        mov.u32 address, program_counts;
        mad.lo.u32 address, $1, 4, address;
        red.shared.add.u32 [address], 1;
        } // $0
        """,
        "=r,r",
        [place],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def set_counts(place, number):
    """Store to four counters in a row at a time: neighbours along the last axis lie in one thread."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .b32 address;
        mov.u32 address, program_counts;
        mad.lo.u32 address, $4, 4, address;
        st.shared.v4.b32 [address], {$8, $9, $10, $11};
        } // $0 $1 $2 $3
        """,
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r",
        [place, number],
        dtype=tl.int32,
        is_pure=False,
        pack=4,
    )


@triton.jit
def get_counts(place):
    """Load four counters in a row at a time."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 address;
        mov.u32 address, program_counts;
        mad.lo.u32 address, $4, 4, address;
        ld.shared.v4.b32 {$0, $1, $2, $3}, [address];
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r,r",
        [place],
        dtype=tl.int32,
        is_pure=False,
        pack=4,
    )


@triton.jit
def set_count(place, number):
    """Store to the counter at each place; the places from 4096 on are nobody's."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .b32 address;
        mov.u32 address, program_counts;
        mad.lo.u32 address, $1, 4, address;
        st.shared.b32 [address], $2;
        } // $0
        """,
        "=r,r,r",
        [place, number],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def get_two_counts(place):
    """Load two counters in a row at a time."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 address;
        mov.u32 address, program_counts;
        mad.lo.u32 address, $2, 4, address;
        ld.shared.v2.b32 {$0, $1}, [address];
        }
        """,
        "=&r,=&r,r,r",
        [place],
        dtype=tl.int32,
        is_pure=False,
        pack=2,
    )


@triton.jit
def empty_lists():
    """Make both lists empty."""
    tl.inline_asm_elementwise(
        "{ .reg .b32 none; mov.u32 none, 0; st.shared.b32 [program_list], none; "
        "st.shared.b32 [program_list+1040], none; } // $0",
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def append(value, label, joins, which):
    """Put each value that ``joins`` (not 0) into a list, with its label, in no particular order; 128 fit."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred none;
        .reg .b32 place, start;
        setp.eq.s32 none, $3, 0;
        @none bra done;
        mov.u32 start, program_list;
        mad.lo.u32 start, $4, 1040, start;
        atom.shared.add.u32 place, [start], 1;
        min.u32 place, place, 127;
        shl.b32 place, place, 2;
        add.u32 place, place, start;
        st.shared.b32 [place+16], $1;
        st.shared.b32 [place+528], $2;
        done:
        } // $0
        """,
        "=r,r,r,r,r",
        [value, label, joins, which],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def listed(place, which):
    """The values of a list."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 address;
        mov.u32 address, program_list;
        mad.lo.u32 address, $1, 4, address;
        mad.lo.u32 address, $2, 1040, address;
        ld.shared.b32 $0, [address+16];
        }
        """,
        "=r,r,r",
        [place, which],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def listed_labels(place, which):
    """The labels of the values, 128 words behind them."""
    return listed(place + 128, which)


@triton.jit
def listed_by(place, program):
    """The values of the first list of other programs of the cluster."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 address;
        mov.u32 address, program_list;
        mad.lo.u32 address, $1, 4, address;
        mapa.shared::cluster.u32 address, address, $2;
        ld.shared::cluster.b32 $0, [address+16];
        }
        """,
        "=r,r,r",
        [place, program],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def set_note(place, number):
    """Store to the note at each place."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .b32 address;
        mov.u32 address, program_notes;
        mad.lo.u32 address, $1, 4, address;
        st.shared.b32 [address], $2;
        } // $0
        """,
        "=r,r,r",
        [place, number],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def note_three(live, first, second, third):
    """Store to the first three notes where it is ``live``: at one place at most."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred live;
        setp.ne.s32 live, $1, 0;
        @live st.shared.b32 [program_notes], $2;
        @live st.shared.b32 [program_notes+4], $3;
        @live st.shared.b32 [program_notes+8], $4;
        } // $0
        """,
        "=r,r,r,r,r",
        [live.to(tl.int32), first, second, third],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def get_note(place):
    """Load the note at each place."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 address;
        mov.u32 address, program_notes;
        mad.lo.u32 address, $1, 4, address;
        ld.shared.b32 $0, [address];
        }
        """,
        "=r,r",
        [place],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def note_of(place, program):
    """The notes of other programs of the cluster."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 address;
        mov.u32 address, program_notes;
        mad.lo.u32 address, $1, 4, address;
        mapa.shared::cluster.u32 address, address, $2;
        ld.shared::cluster.b32 $0, [address];
        }
        """,
        "=r,r,r",
        [place, program],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def count_of(place, program):
    """The counters of other programs of the cluster."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 address;
        mov.u32 address, program_counts;
        mad.lo.u32 address, $1, 4, address;
        mapa.shared::cluster.u32 address, address, $2;
        ld.shared::cluster.b32 $0, [address];
        }
        """,
        "=r,r,r",
        [place, program],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
