"""Rollback by snapshots: the states behind every token of a round. What ``ReplayLog`` is measured against."""

import torch

from kimigraph.runtime.speculation.kept_states import KeptStates
from kimigraph.runtime.speculation.rollback import Counts, StateShape, nbytes


class Snapshots(KeptStates):
    """See ``Rollback``. A verifying step writes the state behind each token (``kda_verify_states``), and a commit
    copies the one behind the last accepted token over the sequence's own."""

    def __init__(self, shape: StateShape, rows: int, tokens: int, device: torch.device | str = "cpu") -> None:
        kept = {
            "states": (shape.state_sizes, getattr(torch, shape.state.dtype)),
            "inputs": ((shape.conv.channels,), shape.conv_dtype),
        }
        super().__init__(shape, rows, tokens, kept, device)

    def commit(self, accepted: Counts) -> None:
        """Copy the snapshots of the last accepted tokens; see ``Rollback.commit``."""
        rows = self._round.open_rows
        counts = self._round.consume(accepted).clamp(0, self.tokens).long()
        last = (counts - 1).clamp_min(0)
        place = torch.arange(self.rows, device=counts.device)
        behind, inputs = self.kept.values()
        chosen, any_token = behind[:, place, last], (counts > 0).reshape(1, -1, 1, 1, 1)
        self.state.copy_(torch.where(any_token, chosen, self.state))
        window = torch.cat([self.conv, inputs.transpose(-1, -2)], dim=-1)
        columns = counts.reshape(1, -1, 1, 1) + torch.arange(self.conv.shape[-1], device=counts.device)
        self.conv.copy_(window.gather(-1, columns.expand(self.conv.shape)))
        self._moved += 2 * nbytes(self.state, self.conv) * rows // self.rows
