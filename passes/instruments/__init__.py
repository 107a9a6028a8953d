"""What watches a pipeline run: verification, dumps, timing. All hang on the one interface ``Instrument``."""

from kimigraph.passes.instruments.base import Instrument
from kimigraph.passes.instruments.dump import DumpPasses
from kimigraph.passes.instruments.timing import TimePasses
from kimigraph.passes.instruments.verify import VerifyPasses

__all__ = ["DumpPasses", "Instrument", "TimePasses", "VerifyPasses"]
