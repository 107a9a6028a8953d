"""Rollback by snapshots: the states behind every token of a round. What ``ReplayLog`` is measured against."""

import torch
from torch import Tensor

from kimigraph.runtime.speculation.rollback import Counts, Round, StateShape, nbytes


class Snapshots:
    """See ``Rollback``. A verifying step writes the state behind each token (``kda_verify_states``), and a commit
    copies the one behind the last accepted token over the sequence's own."""

    def __init__(self, shape: StateShape, rows: int, tokens: int, device: torch.device | str = "cpu") -> None:
        self.rows, self.tokens, self._shape = rows, tokens, shape
        self.state, self.conv = shape.stacks(rows, device)
        layers, _, *last = self.state.shape
        self.behind = torch.zeros(layers, rows, tokens, *last, dtype=self.state.dtype, device=device)
        self.inputs = torch.zeros(layers, rows, tokens, shape.conv.channels, dtype=self.conv.dtype, device=device)
        self.states: dict[str, Tensor] = {
            f"state.{layer}.{part}": stack[number]
            for number, layer in enumerate(shape.layers)
            for part, stack in (("kda", self.state), ("conv", self.conv))
        }
        self._round, self._moved = Round(rows, device), 0

    def log(self, rows: int) -> dict[str, Tensor]:
        """The snapshots of the first ``rows`` sequences: ``log.<layer>.states|inputs``."""
        return {
            f"log.{layer}.{part}": stack[number, :rows]
            for number, layer in enumerate(self._shape.layers)
            for part, stack in (("states", self.behind), ("inputs", self.inputs))
        }

    def verified(self, rows: int) -> None:
        """A step has written the snapshots of the first ``rows`` sequences."""
        self._round.verified(rows)
        self._moved += nbytes(self.state, self.conv, self.behind, self.inputs) * rows // self.rows

    def commit(self, accepted: Counts) -> None:
        """Copy the snapshots of the last accepted tokens; see ``Rollback.commit``."""
        rows = self._round.open_rows
        counts = self._round.consume(accepted).clamp(0, self.tokens).long()
        last = (counts - 1).clamp_min(0)
        place = torch.arange(self.rows, device=counts.device)
        chosen, any_token = self.behind[:, place, last], (counts > 0).reshape(1, -1, 1, 1, 1)
        self.state.copy_(torch.where(any_token, chosen, self.state))
        window = torch.cat([self.conv, self.inputs.transpose(-1, -2)], dim=-1)
        columns = counts.reshape(1, -1, 1, 1) + torch.arange(self.conv.shape[-1], device=counts.device)
        self.conv.copy_(window.gather(-1, columns.expand(self.conv.shape)))
        self._moved += 2 * nbytes(self.state, self.conv) * rows // self.rows

    def abort(self) -> None:
        """Forget the snapshots; the states were never touched."""
        self._round.close()

    def copy(self, source: int, destination: int) -> None:
        """Make one sequence what another is; SequenceError within a round."""
        self._round.require_closed("a copy")
        for stack in (self.state, self.conv, self.behind, self.inputs):
            stack[:, destination].copy_(stack[:, source])

    def reset(self, row: int) -> None:
        """Make a sequence one without tokens; SequenceError within a round."""
        self._round.require_closed("a reset")
        for stack in (self.state, self.conv, self.behind, self.inputs):
            stack[:, row].zero_()

    @property
    def bytes_held(self) -> int:
        """Bytes of states, convolutions and snapshots."""
        return nbytes(self.state, self.conv, self.behind, self.inputs)

    @property
    def bytes_moved(self) -> int:
        """See ``Rollback.bytes_moved``."""
        return self._moved
