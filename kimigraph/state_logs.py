"""After how many tokens a generator writes recurrent states, and what a sequence has of the logs between."""

import torch

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.cost import Work
from kimigraph.ir.device import Device, device_for
from kimigraph.ir.errors import UsageError
from kimigraph.passes.defer_states import FILLED
from kimigraph.runtime.generation import Row
from kimigraph.runtime.speculation import StateShape

LENGTH = 6
"""Tokens of a log where nobody says: a shorter one writes states more often, a longer one reads more records."""
LEAST_GAIN = 1.56
"""By how much a layer's step must be faster, as priced by its bytes, for logs to be kept unasked.

A step that folds records computes as well: on an H200 what is priced at 1.54 takes as long as before, what is priced at
1.57 (32 sequences of 32 heads) is faster by a quarter.
"""


def log_length(
    asked: int | None, shape: StateShape | None, rows: int, config: CompileConfig, target: str, drafts: bool
) -> int:
    """Tokens of a log for ``rows`` sequences: as ``asked``, else ``LENGTH`` where that pays on a GPU; 1: no log.

    UsageError for less than 1, and for logs beside drafts or on several ranks.
    """
    hindrance = "with drafts" if drafts else "on several ranks" if config.mesh.size > 1 else ""
    if asked is not None:
        if asked < 1:
            raise UsageError(f"state_log is {asked}: give 1 (states are written with every token) or more")
        if asked > 1 and hindrance:
            raise UsageError(f"state_log {asked} {hindrance}: states are written with every token there, leave it out")
        return asked if shape is not None else 1
    if shape is None or hindrance or not target.startswith("cuda"):
        return 1
    return LENGTH if gain(shape, rows, LENGTH, device_for(config)) >= LEAST_GAIN else 1


def gain(shape: StateShape, rows: int, length: int, device: Device) -> float:
    """The time of a layer's step that writes its states with every token over that of one that logs, as priced."""
    form = shape.state
    state = rows * form.heads * form.key_dim * form.value_dim * getattr(torch, form.dtype).itemsize
    record = rows * form.heads * (2 * form.key_dim + form.value_dim) * torch.float32.itemsize
    logged = state + state // length + record * (length - 1) // 2 + record * (length - 1) // length
    return Work(2 * state, launches=1).seconds(device) / Work(logged, launches=1).seconds(device)


def log_rows(shape: StateShape, length: int) -> dict[str, Row]:
    """What one sequence has of the logs: they are copied, moved and begun anew with its states."""
    if length < 2:
        return {}
    form = shape.state
    widths = {"keys": form.key_dim, "decays": form.key_dim, "deltas": form.value_dim}
    rows = {
        f"log.{layer}.{part}": Row((length, form.heads, width), torch.float32)
        for layer in shape.layers
        for part, width in widths.items()
    }
    return {FILLED: Row((), torch.int32), **rows}
