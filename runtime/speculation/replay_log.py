"""Rollback by replay: one checkpoint a sequence and a small log of what each token would add to it."""

from collections.abc import Callable

import torch
from torch import Tensor

from kimigraph.runtime.speculation.kept_states import KeptStates
from kimigraph.runtime.speculation.rollback import Counts, StateShape, nbytes

Fold = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], object]
"""``kda_replay``: state, conv_state, keys, decays, deltas, inputs, accepted; the first two change in place."""


class ReplayLog(KeptStates):
    """See ``Rollback``. A verifying step reads the checkpoint and writes records (``kda_verify``), a rejected token is
    one that the fold does not reach, and a commit is one launch for all layers (``kda_replay``).

    The fold runs forward in the order of decoding, so the states are to the bit what decoding the accepted tokens would
    have left. Counts stay on the device. ``fold`` is the compiled ``kda_replay`` over these tensors.
    """

    def __init__(
        self, shape: StateShape, rows: int, tokens: int, fold: Fold, device: torch.device | str = "cpu"
    ) -> None:
        form = shape.state
        records = {
            "keys": ((form.heads, form.key_dim), torch.float32),
            "decays": ((form.heads, form.key_dim), torch.float32),
            "deltas": ((form.heads, form.value_dim), torch.float32),
            "inputs": ((shape.conv.channels,), shape.conv_dtype),
        }
        super().__init__(shape, rows, tokens, records, device)
        self._fold = fold

    def commit(self, accepted: Counts) -> None:
        """Fold the accepted tokens into the states; see ``Rollback.commit``."""
        rows = self._round.open_rows
        counts = self._round.consume(accepted)
        keys, decays, deltas, inputs = self.kept.values()
        self._fold(self.state, self.conv, keys, decays, deltas, inputs, counts)
        self._moved += (self.bytes_held + nbytes(self.state, self.conv)) * rows // self.rows
