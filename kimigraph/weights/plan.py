"""What is to be copied where, and everything that stands against it, before anything is read."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from kimigraph.ir.errors import UsageError
from kimigraph.ir.tensor_file import DTYPES
from kimigraph.weights.checkpoint import Checkpoint
from kimigraph.weights.layout import Layout, Piece
from kimigraph.weights.quantized import Source, real_tensors

REAL = ("F64", "F32", "F16", "BF16")
"""What floating tensors are published in; they are converted to the type that the model has."""
SHOWN = 20
"""Names that an error lists of each kind."""


@dataclass(frozen=True)
class Wanted:
    """A tensor of the model. ``aliases`` are other names of the same tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Copy:
    """``piece`` of the model's tensor ``name`` comes from ``stored``.

    Where a rank has a part of the tensor: of the piece's values, of shape ``region``, it takes ``part`` (dim, first,
    behind the last) to ``place`` in its own.
    """

    name: str
    piece: Piece
    stored: Source
    region: tuple[int, ...] = ()
    part: tuple[int, int, int] | None = None
    place: tuple[int | slice, ...] | None = None

    @property
    def put(self) -> tuple[int | slice, ...]:
        """Where in the tensor that is filled the values go."""
        return self.piece.put if self.place is None else self.place

    @property
    def bytes(self) -> int:
        """Bytes that are read."""
        size = self.stored.end - self.stored.begin
        if self.part is None:
            return size
        dim, begin, behind = self.part
        return size * (behind - begin) // max(self.region[dim], 1)


@dataclass
class Plan:
    """The copies that fill the model, in the order in which the files hold their sources, and what is wrong.

    ``compared`` are published tensors that must equal the model's, for the model ties them.
    """

    copies: list[Copy] = field(default_factory=lambda: [])
    compared: list[Copy] = field(default_factory=lambda: [])
    missing: list[str] = field(default_factory=lambda: [])
    misfits: list[str] = field(default_factory=lambda: [])
    surplus: list[str] = field(default_factory=lambda: [])

    @property
    def total(self) -> int:
        """Bytes that are read."""
        return sum(copy.bytes for copy in self.copies)

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise one UsageError with all that is wrong; nothing if all is right."""
        found: list[str] = []
        for verb, names in (("lacks", self.missing), ("has no use for", self.surplus), ("has misshapen", self.misfits)):
            if names:
                more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
                what = "weight" if len(names) == 1 else "weights"
                found.append(f"{verb} {len(names)} {what}: {', '.join(sorted(names)[:SHOWN])}{more}")
        if found:
            raise UsageError(
                f"{checkpoint.directory} does not hold this model. It {'; it '.join(found)}. Give the weights that "
                "belong to the configuration, or use --random-weights"
            )


def make_plan(checkpoint: Checkpoint, layout: Layout, wanted: Mapping[str, Wanted], strict: bool) -> Plan:
    """The plan that fills ``wanted`` from ``checkpoint``. ``strict``: published tensors without a use are wrong.

    Layers behind the model's last are no surplus: published models end in layers for prediction of further tokens, and
    ``num_hidden_layers`` may have been lowered. Raises UsageError, which names the format, for quantized weights in one
    that is not read.
    """
    plan, finder = Plan(), _Finder(real_tensors(checkpoint), layout, wanted)
    for name in wanted:
        finder.place(name, plan)
    if strict:
        plan.surplus = finder.surplus()
    plan.copies.sort(key=lambda copy: (copy.stored.path.name, copy.stored.begin))
    return plan


_Attempt = tuple[str, list[Copy], list[str], list[str]]
"""A name of the model's tensor; the copies that one form of it takes, the names that it lacks, and complaints."""


def _wrongness(attempt: _Attempt) -> tuple[bool, float]:
    """Least for a form without complaint, else for the one of which most is there."""
    _, copies, missing, misfits = attempt
    return bool(missing or misfits), -len(copies) / (len(copies) + len(missing))


class _Finder:
    def __init__(self, tensors: Mapping[str, Source], layout: Layout, wanted: Mapping[str, Wanted]) -> None:
        self._tensors, self._layout, self._wanted = tensors, layout, wanted
        named = ((name, *want.aliases) for name, want in wanted.items())
        self._shapes = {name: wanted[names[0]].shape for names in named for name in names}
        self._used: set[str] = set()
        self._prefix = self._likeliest_prefix()

    def place(self, name: str, plan: Plan) -> None:
        """Add the copies of one of the model's tensors to the plan, or what is wrong."""
        names = (name, *self._wanted[name].aliases)
        forms = [(each, pieces) for each in names for pieces in self._layout.forms(each, self._shapes)]
        attempts: list[_Attempt] = [(each, *self._attempt(name, pieces)) for each, pieces in forms]
        chosen, copies, missing, misfits = min(attempts, key=_wrongness)
        self._used.update(self._prefix + copy.piece.source for copy in copies)
        plan.copies += copies
        plan.misfits += misfits
        plan.missing += missing if copies else [name]
        for other, found, absent, wrong in attempts:
            if other != chosen and found and not absent and not wrong:
                self._used.update(self._prefix + copy.piece.source for copy in found)
                plan.compared += found

    def surplus(self) -> list[str]:
        """The published tensors that found no use."""
        last = max((_layer(name) for name in self._shapes), default=-1)
        left = (name for name in self._tensors if name not in self._used and not self._layout.ignores(name))
        return [name for name in left if last < 0 or _layer(name) <= last]

    def _attempt(self, name: str, pieces: Iterable[Piece]) -> tuple[list[Copy], list[str], list[str]]:
        """Copies for the pieces that the checkpoint has, the names of those that it lacks, and complaints."""
        copies: list[Copy] = []
        missing: list[str] = []
        misfits: list[str] = []
        for piece in pieces:
            stored = self._tensors.get(self._prefix + piece.source)
            if stored is None:
                missing.append(piece.source)
                continue
            copies.append(Copy(name, piece, stored, _region(self._wanted[name].shape, piece)))
            if complaint := _complaint(self._wanted[name], piece, stored):
                misfits.append(f"{self._prefix}{piece.source} is {complaint}")
        return copies, missing, misfits

    def _likeliest_prefix(self) -> str:
        """The prefix under which the checkpoint has most of the model's own names."""
        found = {
            prefix: sum(prefix + name in self._tensors for name in self._shapes) for prefix in self._layout.prefixes
        }
        return max(found, key=lambda prefix: found[prefix])


def _complaint(want: Wanted, piece: Piece, stored: Source) -> str:
    """What is wrong with the published tensor as that piece of the model's; empty when it fits."""
    region, shape = _region(want.shape, piece), stored.shape
    if piece.take is not None:
        shape = (piece.take[1] - piece.take[0], *shape[1:]) if shape and piece.take[1] <= shape[0] else ()
    fits = shape == region or (piece.padded and _fits_padded(shape, region))
    if not fits:
        return f"{stored.shape}, the configuration asks for {region}"
    right = stored.dtype in REAL if want.dtype.is_floating_point else DTYPES.get(stored.dtype) == want.dtype
    return "" if right else f"{stored.dtype}, the model has {want.dtype}"


def _fits_padded(shape: tuple[int, ...], region: tuple[int, ...]) -> bool:
    """Whether the region is the front of the tensor's elements; only a tensor along one dim can have padding."""
    along = [size for size in shape if size != 1]
    return math.prod(shape) == math.prod(region) or (len(along) == 1 and along[0] > math.prod(region))


def _region(shape: tuple[int, ...], piece: Piece) -> tuple[int, ...]:
    kept = tuple(
        len(range(size)[part]) for part, size in zip(piece.put, shape, strict=False) if isinstance(part, slice)
    )
    return kept + shape[len(piece.put) :]


def _layer(name: str) -> int:
    match = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return int(match[1]) if match else -1
