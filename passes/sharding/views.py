"""Where the shared dim of a tensor goes when it is viewed in another shape."""

from collections.abc import Iterator, Sequence
from math import prod

from kimigraph.ir.shares import Share
from kimigraph.passes.sharding.placement import NotCarried


def viewed(share: Share, before: Sequence[int], after: Sequence[int]) -> Share:
    """The share of a tensor of shape ``before``, whole, when it is viewed as ``after``.

    NotCarried where no dim of the view holds it: the shared dim is merged behind another, or split unevenly.
    """
    for inner, outer in _groups(before, after):
        if share.dim not in inner:
            continue
        if len(inner) == len(outer) == 1:
            return share.at(outer[0])
        sized = [dim for dim in inner if before[dim] > 1]
        if sized[:1] != [share.dim]:
            raise NotCarried(f"view of {list(before)} as {list(after)} merges dim {share.dim} behind another")
        leading = next((dim for dim in outer if after[dim] > 1), outer[0])
        if share.blocks == 1 and after[leading] % share.ways == 0:
            return share.at(leading)
        raise NotCarried(f"view of {list(before)} as {list(after)} splits what {share.ways} ranks share unevenly")
    raise NotCarried(f"view of {list(before)} as {list(after)} loses dim {share.dim}")


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The least groups of dims of equal extent on both sides, in order; dims of size 1 belong to the next group."""
    i = j = 0
    while i < len(before) or j < len(after):
        inner, outer = [i] if i < len(before) else [], [j] if j < len(after) else []
        i, j = i + len(inner), j + len(outer)
        while (left := prod(before[d] for d in inner)) != (right := prod(after[d] for d in outer)) or not (
            inner and outer
        ):
            if (left < right or not inner) and i < len(before):
                inner.append(i)
                i += 1
            elif j < len(after):
                outer.append(j)
                j += 1
            else:
                break
        yield inner, outer
