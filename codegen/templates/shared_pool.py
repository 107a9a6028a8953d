# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""A program's shared memory where few codes of a row can win: 2048 counters, then a pool of up to 4096 codes with their
positions; later a bit for each position, and how many bits stand before each word.

Lists, notes and counters are those of ``shared_counts``: ``declare_pool`` takes the place of its declaration.
"""

import triton
import triton.language as tl


@triton.jit
def declare_pool():
    """Make the memory known: once, before all else, executed by every thread."""
    tl.inline_asm_elementwise(
        """
        .shared .align 16 .b32 program_counts[10304];
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
def reserve(number):
    """The first of ``number`` places of the pool, for each warp its own: all lanes hold the number."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .pred first;
        .reg .b32 lane, begin;
        mov.u32 lane, %laneid;
        mov.u32 begin, 0;
        setp.eq.u32 first, lane, 0;
        @first atom.shared.add.u32 begin, [program_list+1040], $1;
        shfl.sync.idx.b32 $0, begin, 0, 31, 0xffffffff;
        }
        """,
        "=&r,r",
        [number],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def reserved_by(program):
    """How many places of their pools other programs of the cluster reserved."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 address;
        mov.u32 address, program_list;
        mapa.shared::cluster.u32 address, address, $1;
        ld.shared::cluster.b32 $0, [address+1040];
        }
        """,
        "=r,r",
        [program],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def put_in_pool(place, code, position, live):
    """Store codes and their positions at the places of the pool below 4096 that are ``live``."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred live;
        .reg .b32 address;
        setp.ne.s32 live, $4, 0;
        setp.lt.and.u32 live, $1, 4096, live;
        mov.u32 address, program_counts;
        mad.lo.u32 address, $1, 4, address;
        @live st.shared.b32 [address+8448], $2;
        @live st.shared.b32 [address+24832], $3;
        } // $0
        """,
        "=r,r,r,r,r",
        [place, code, position, live.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def highest_bit(number):
    """Which of the bits of a number that is not 0 is the highest that is set."""
    return tl.inline_asm_elementwise("bfind.u32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def get_word(place):
    """The words of the memory, one at a time."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 address;
        mov.u32 address, program_counts;
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
def mark(position, live):
    """Set the bit of each position that is ``live``, from the first word of the memory on."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred live;
        .reg .b32 address, word, bit;
        setp.ne.s32 live, $2, 0;
        shr.u32 word, $1, 5;
        mov.u32 address, program_counts;
        mad.lo.u32 address, word, 4, address;
        and.b32 word, $1, 31;
        mov.u32 bit, 1;
        shl.b32 bit, bit, word;
        @live red.shared.or.b32 [address], bit;
        } // $0
        """,
        "=r,r,r",
        [position, live.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def ones(word):
    """How many bits are set."""
    return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)
