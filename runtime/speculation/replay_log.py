"""Rollback by replay: one checkpoint a sequence and a small log of what each token would add to it."""

from collections.abc import Callable

import torch
from torch import Tensor

from kimigraph.runtime.speculation.rollback import Counts, Round, StateShape, nbytes

Fold = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], object]
"""``kda_replay``: state, conv_state, keys, decays, deltas, inputs, accepted; the first two change in place."""


class ReplayLog:
    """See ``Rollback``. A verifying step reads the checkpoint and writes records (``kda_verify``), a rejected token is
    one that the fold does not reach, and a commit is one launch for all layers (``kda_replay``).

    The fold runs forward in the order of decoding, so the states are to the bit what decoding the accepted tokens would
    have left. Counts stay on the device. ``fold`` is the compiled ``kda_replay`` over these tensors.

    ``copy`` and ``reset`` act on checkpoint, convolution and log of a sequence at once.
    """

    def __init__(
        self, shape: StateShape, rows: int, tokens: int, fold: Fold, device: torch.device | str = "cpu"
    ) -> None:
        self.rows, self.tokens, self._shape, self._fold = rows, tokens, shape, fold
        form, layers = shape.state, len(shape.layers)
        self.state, self.conv = shape.stacks(rows, device)

        def records(*last: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(layers, rows, tokens, *last, dtype=dtype, device=device)

        self.records: dict[str, Tensor] = {
            "keys": records(form.heads, form.key_dim),
            "decays": records(form.heads, form.key_dim),
            "deltas": records(form.heads, form.value_dim),
            "inputs": records(shape.conv.channels, dtype=shape.conv_dtype),
        }
        self.states: dict[str, Tensor] = {
            f"state.{layer}.{part}": stack[number]
            for number, layer in enumerate(shape.layers)
            for part, stack in (("kda", self.state), ("conv", self.conv))
        }
        self._round, self._moved = Round(rows, device), 0

    def log(self, rows: int) -> dict[str, Tensor]:
        """The records of the first ``rows`` sequences: ``log.<layer>.keys|decays|deltas|inputs``."""
        return {
            f"log.{layer}.{part}": stack[number, :rows]
            for number, layer in enumerate(self._shape.layers)
            for part, stack in self.records.items()
        }

    def verified(self, rows: int) -> None:
        """A step has written the records of the first ``rows`` sequences."""
        self._round.verified(rows)
        self._moved += (nbytes(self.state, self.conv) + nbytes(*self.records.values())) * rows // self.rows

    def commit(self, accepted: Counts) -> None:
        """Fold the accepted tokens into the states; see ``Rollback.commit``."""
        rows = self._round.open_rows
        counts = self._round.consume(accepted)
        keys, decays, deltas, inputs = self.records.values()
        self._fold(self.state, self.conv, keys, decays, deltas, inputs, counts)
        self._moved += (2 * nbytes(self.state, self.conv) + nbytes(*self.records.values())) * rows // self.rows

    def abort(self) -> None:
        """Forget the records; the checkpoint was never touched."""
        self._round.close()

    def copy(self, source: int, destination: int) -> None:
        """Make one sequence what another is; SequenceError within a round."""
        self._round.require_closed("a copy")
        for stack in (self.state, self.conv, *self.records.values()):
            stack[:, destination].copy_(stack[:, source])

    def reset(self, row: int) -> None:
        """Make a sequence one without tokens; SequenceError within a round."""
        self._round.require_closed("a reset")
        for stack in (self.state, self.conv, *self.records.values()):
            stack[:, row].zero_()

    @property
    def bytes_held(self) -> int:
        """Bytes of checkpoints, convolutions and log."""
        return nbytes(self.state, self.conv, *self.records.values())

    @property
    def bytes_moved(self) -> int:
        """See ``Rollback.bytes_moved``."""
        return self._moved
