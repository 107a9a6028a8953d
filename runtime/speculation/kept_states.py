"""What both ways of rollback share: the states of all layers in one tensor, and what a step keeps beside them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kimigraph.ir.errors import KimigraphError
from kimigraph.runtime.speculation.rollback import Round, StateShape, nbytes


class KeptStates:
    """See ``Rollback``. ``kept`` has, by its name in the log, the last sizes and the type of what a token leaves there.

    ``copy`` and ``reset`` act on all that is held of a sequence at once. KimigraphError where memory is short.
    """

    def __init__(
        self,
        shape: StateShape,
        rows: int,
        tokens: int,
        kept: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        device: torch.device | str,
    ) -> None:
        self.rows, self.tokens, self._layers = rows, tokens, shape.layers
        try:
            self.state, self.conv = shape.stacks(rows, device)
            self.kept: dict[str, Tensor] = {
                name: torch.zeros(len(shape.layers), rows, tokens, *last, dtype=dtype, device=device)
                for name, (last, dtype) in kept.items()
            }
        except torch.OutOfMemoryError as error:
            raise KimigraphError(
                f"recurrent states of {rows} sequences, and what {tokens} tokens of each leave beside them, are more "
                f"than {device} has room for: allow fewer (max_batch, draft_tokens)"
            ) from error
        self.states: dict[str, Tensor] = {
            f"state.{layer}.{part}": stack[number]
            for number, layer in enumerate(shape.layers)
            for part, stack in (("kda", self.state), ("conv", self.conv))
        }
        self._round, self._moved = Round(rows, device), 0
        self._logs: dict[int, dict[str, Tensor]] = {}

    def log(self, rows: int) -> dict[str, Tensor]:
        """What is kept of the first ``rows`` sequences, as views: ``log.<layer>.<name>``."""
        if rows not in self._logs:
            self._logs[rows] = {
                f"log.{layer}.{name}": stack[number, :rows]
                for number, layer in enumerate(self._layers)
                for name, stack in self.kept.items()
            }
        return self._logs[rows]

    def verified(self, rows: int) -> None:
        """A step has written the log of the first ``rows`` sequences."""
        self._round.verified(rows)
        self._moved += self.bytes_held * rows // self.rows

    def abort(self) -> None:
        """Forget the log; the states were never touched."""
        self._round.close()

    def copy(self, source: int, destination: int) -> None:
        """Make one sequence what another is; SequenceError within a round."""
        self._round.require_closed("a copy")
        for stack in (self.state, self.conv, *self.kept.values()):
            stack[:, destination].copy_(stack[:, source])

    def reset(self, row: int) -> None:
        """Make a sequence one without tokens; SequenceError within a round."""
        self._round.require_closed("a reset")
        for stack in (self.state, self.conv, *self.kept.values()):
            stack[:, row].zero_()

    @property
    def bytes_held(self) -> int:
        """Bytes of states and log."""
        return nbytes(self.state, self.conv, *self.kept.values())

    @property
    def bytes_moved(self) -> int:
        """See ``Rollback.bytes_moved``."""
        return self._moved
