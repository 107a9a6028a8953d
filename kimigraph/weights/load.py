"""Fills a model's tensors from a checkpoint, where they lie, one published tensor at a time."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from kimigraph.ir.errors import UsageError
from kimigraph.ir.program import InputSpec
from kimigraph.weights.checkpoint import Checkpoint
from kimigraph.weights.layout import Layout
from kimigraph.weights.packed import PackedTensors
from kimigraph.weights.plan import Copy, Wanted, make_plan
from kimigraph.weights.rank_parts import RankParts

Target = Callable[[str], Tensor]
"""Gives the model's tensor of that name, to be filled."""
Watch = Callable[[int, int], None]
"""Is told the bytes that have been read, and those that will be."""


def unwatched(done: int, total: int) -> None:
    """A ``Watch`` that shows nothing."""


def load_module(
    module: nn.Module, directory: Path, layout: Layout, watch: Watch = unwatched, partly: bool = False
) -> None:
    """Fill the state dict of ``module`` from the directory's checkpoint, in place and in the types that it has.

    Tied tensors are filled once. ``partly``: the checkpoint has more than the module. Raises one UsageError that lists
    all missing, surplus and misshapen tensors, and those of ``Checkpoint.open``; then nothing has changed.
    """
    state = module.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    wanted = {
        first: Wanted(tuple(state[first].shape), state[first].dtype, tuple(others)) for first, *others in names.values()
    }
    _fill(directory, layout, wanted, lambda name: state[name].detach(), not partly, watch)


def read_weights(
    directory: Path,
    specs: Sequence[InputSpec],
    layout: Layout,
    device: torch.device | str = "cpu",
    watch: Watch = unwatched,
    packed: Mapping[str, str] | None = None,
    rank: int = 0,
) -> dict[str, Tensor]:
    """The tensors that ``specs`` describe, by source name, made on ``device`` in the strides of the specs.

    ``packed`` gives sources other names under which they may come in the bytes of ``mxfp4_quantize``: those that the
    checkpoint holds in MXFP4 are read so, byte by byte, under these names.

    Of tensors that several ranks share out, only the part of ``rank`` is read. Published tensors that the specs do not
    ask for are left: a program needs not all of its model. Errors as in ``load_module``.
    """
    sources = {spec.source for spec in specs}
    wanted: dict[str, Wanted] = {}
    for spec in specs:
        aliases = tuple(
            b for pair in layout.tied for a, b in (pair, pair[::-1]) if a == spec.source and b not in sources
        )
        wanted[spec.source] = Wanted(spec.whole_shape, getattr(torch, spec.dtype), aliases)
    described = {spec.source: spec for spec in specs}
    tensors: dict[str, Tensor] = {}
    codes = PackedTensors(packed or {}, described, device)

    def target(name: str) -> Tensor:
        if name not in tensors:
            spec = described[name]
            dtype = getattr(torch, spec.dtype)
            tensors[name] = torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=device)
        return tensors[name]

    shares = {spec.source: spec.shared for spec in specs if spec.shared is not None}
    _fill(directory, layout, wanted, target, False, watch, codes, RankParts(shares, wanted, rank))
    return tensors | codes.tensors


def _fill(
    directory: Path,
    layout: Layout,
    wanted: Mapping[str, Wanted],
    target: Target,
    strict: bool,
    watch: Watch,
    packed: PackedTensors | None = None,
    parts: RankParts | None = None,
) -> None:
    checkpoint = Checkpoint.open(directory)
    plan = make_plan(checkpoint, layout, wanted, strict)
    plan.check(checkpoint)
    if parts is not None:
        plan.copies = parts.of(plan.copies)
    if packed is not None:
        packed.choose(plan.copies)
    done, total = 0, plan.total
    watch(done, total)
    with torch.no_grad():
        for copy in plan.copies:
            if packed is None or not packed.take(copy):
                _region(target(copy.name), copy).copy_(_values(copy))
            done += copy.bytes
            watch(done, total)
        if strict:
            _check_tied(target, plan.compared)


def _region(target: Tensor, copy: Copy) -> Tensor:
    return target[copy.put] if copy.put else target


def _values(copy: Copy) -> Tensor:
    """The published values that go to their place; what lies behind them is zero or an error."""
    values, piece = copy.stored.read(), copy.piece
    if piece.take is not None:
        values = values[piece.take[0] : piece.take[1]]
    elif piece.padded:
        values = _unpadded(values, copy)
    return values if copy.part is None else values.narrow(copy.part[0], copy.part[1], copy.part[2] - copy.part[1])


def _unpadded(values: Tensor, copy: Copy) -> Tensor:
    flat, count = values.reshape(-1), math.prod(copy.region)
    if flat[count:].count_nonzero():
        raise UsageError(
            f"{copy.stored.path}: {copy.piece.source} has {flat.numel()} values for the {count} of the "
            "configuration, and those behind are not the zeros of padding: give the configuration of this checkpoint"
        )
    return flat[:count].reshape(copy.region)


def _check_tied(target: Target, compared: list[Copy]) -> None:
    for copy in compared:
        region = _region(target(copy.name), copy)
        if not torch.equal(region, _values(copy).to(region)):
            raise UsageError(
                f"{copy.stored.path}: {copy.piece.source} differs from {copy.name}, and the configuration ties them: "
                "set tie_word_embeddings to false"
            )
