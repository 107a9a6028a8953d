# pyright: basic
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""Sums of several tensors in one reduction, for the kernels of a KDA step."""

from triton.experimental import gluon


@gluon.jit
def add_pairs(a, b, c, d):
    """The sum of two pairs, for one reduction of two tensors."""
    return a + c, b + d


@gluon.jit
def add_triples(a, b, c, d, e, f):
    """The sum of two triples."""
    return a + d, b + e, c + f
