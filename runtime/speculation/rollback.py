"""What is kept of recurrent states while drafts are verified, so that a rejected one leaves no trace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kimigraph.ir.descriptors import ConvDescriptor, StateDescriptor, parse_descriptor
from kimigraph.ir.errors import UsageError
from kimigraph.runtime.sequence.errors import SequenceError

Counts = Tensor | Sequence[int] | int
"""Accepted tokens of each sequence, the last one before the drafts included: a tensor is not looked at on the host."""


class Rollback(Protocol):
    """Recurrent states of ``rows`` sequences in all layers, with what a step of ``tokens`` tokens keeps beside them.

    A round is: a step over ``states`` and ``log`` (which writes the log alone), then ``commit`` or ``abort``. Steps of
    other kinds write ``states`` between rounds.
    """

    rows: int
    tokens: int
    states: dict[str, Tensor]
    """The states by flat name, [rows, ..] each; they stay where they are."""

    def log(self, rows: int) -> dict[str, Tensor]:
        """What a step over the first ``rows`` sequences writes, by flat name."""
        ...

    def verified(self, rows: int) -> None:
        """A step over the first ``rows`` sequences has written the log."""
        ...

    def commit(self, accepted: Counts) -> None:
        """Take the first ``accepted`` tokens of each sequence into its states: of those verified, or of all rows.

        0 leaves a sequence as it was. SequenceError where nothing was verified since the last commit.
        """
        ...

    def abort(self) -> None:
        """Forget what was verified: states are as before the round."""
        ...

    @property
    def bytes_held(self) -> int:
        """Bytes of states and log."""
        ...

    @property
    def bytes_moved(self) -> int:
        """Bytes of states and log that rounds have read and written so far, as if all tokens were accepted."""
        ...


@dataclass(frozen=True)
class StateShape:
    """The recurrent states of a model's KDA layers: ``layers`` by name, what all of them have, the window's type."""

    layers: tuple[str, ...]
    state: StateDescriptor
    conv: ConvDescriptor
    conv_dtype: torch.dtype

    @classmethod
    def of(cls, caches: Mapping[str, tuple[str, torch.dtype]]) -> "StateShape | None":
        """From descriptor and type of a model's caches by flat name; None where it has no recurrent layer.

        UsageError where layers differ: one launch folds all of them.
        """
        states = {name: parse_descriptor(text) for name, (text, _) in caches.items() if name.endswith(".kda")}
        convs = {name: parse_descriptor(caches[name][0]) for name in caches if name.endswith(".conv")}
        if not states:
            return None
        kinds, windows = set(states.values()), set(convs.values())
        [dtype] = {caches[name][1] for name in convs}
        layers = tuple(name.split(".")[1] for name in states)
        state, conv = kinds.pop(), windows.pop()
        if kinds or windows or not isinstance(state, StateDescriptor) or not isinstance(conv, ConvDescriptor):
            raise UsageError(
                "drafts and logs need recurrent layers of one shape: heads, dims or convolutions differ here"
            )
        return cls(layers, state, conv, dtype)

    def of_rank(self, ways: int) -> "StateShape":
        """What each of ``ways`` ranks has, which share out the heads."""
        state = replace(self.state, heads=self.state.heads // ways)
        return replace(self, state=state, conv=replace(self.conv, channels=self.conv.channels // ways))

    @property
    def state_sizes(self) -> tuple[int, int, int]:
        """Sizes of one state: [H, K, V] or [H, V, K]."""
        form = self.state
        last = (form.key_dim, form.value_dim) if form.layout == "kv" else (form.value_dim, form.key_dim)
        return form.heads, *last

    def stacks(self, rows: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Zeroed states [L, rows, H, ..] and convolution states [L, rows, C, N]."""
        shape = (len(self.layers), rows, *self.state_sizes)
        state = torch.zeros(shape, dtype=getattr(torch, self.state.dtype), device=device)
        window = (len(self.layers), rows, self.conv.channels, self.conv.columns)
        return state, torch.zeros(window, dtype=self.conv_dtype, device=device)


class Round:
    """Whether a log holds what was verified: it is consumed once."""

    def __init__(self, rows: int, device: torch.device | str) -> None:
        self.rows, self.open_rows = rows, 0
        self.accepted: Tensor = torch.zeros(rows, dtype=torch.int32, device=device)

    def verified(self, rows: int) -> None:
        """The log was written, for the first ``rows`` sequences."""
        if not 1 <= rows <= self.rows:
            raise SequenceError(f"{rows} sequences were verified, the log has room for 1 to {self.rows}")
        self.open_rows = rows

    def consume(self, accepted: Counts) -> Tensor:
        """The counts int32 [rows], in a tensor that stays where it is; sequences that were not verified have 0."""
        rows = self.open_rows
        if not rows:
            raise SequenceError("nothing was verified since the last commit: a log is folded once")
        given = torch.as_tensor([accepted] if isinstance(accepted, int) else accepted)
        if given.dim() != 1 or given.shape[0] not in (rows, self.rows) or given.is_floating_point():
            raise SequenceError(f"accepted counts {list(given.shape)} for {rows} sequences: give one integer each")
        self.open_rows = 0
        self.accepted.zero_()
        self.accepted[:rows].copy_(given[:rows], non_blocking=True)
        return self.accepted

    def close(self) -> None:
        """Forget what was verified."""
        self.open_rows = 0

    def require_closed(self, what: str) -> None:
        """SequenceError while something is verified and not committed."""
        if self.open_rows:
            raise SequenceError(f"{what} between verification and commit: commit or abort the round first")


def nbytes(*tensors: Tensor) -> int:
    """Bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
