"""Token by token: sequences join and leave a running batch, each with its own sampling and end."""

from kimigraph.runtime.generation.bound_step import BoundStep
from kimigraph.runtime.generation.engine import Engine, Programs, Step
from kimigraph.runtime.generation.paged_slots import PagedSlots, Pool
from kimigraph.runtime.generation.request import Completion, Event, Request
from kimigraph.runtime.generation.sampling import Sampling
from kimigraph.runtime.generation.slots import Row, SlotCaches, Slots
from kimigraph.runtime.generation.text import TextStream

__all__ = [
    "BoundStep",
    "Completion",
    "Engine",
    "Event",
    "PagedSlots",
    "Pool",
    "Programs",
    "Request",
    "Row",
    "Sampling",
    "SlotCaches",
    "Slots",
    "Step",
    "TextStream",
]
