"""kimigraph.passes: import it by that name; the folder's own name would make a second copy with its own state.

The public names are loaded on first use: importing one pass does not import the others.
"""

if __name__ != "kimigraph.passes":
    raise ImportError("import this package as 'kimigraph.passes', not as 'passes'")

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimigraph.passes.base import Pass, PassContext
    from kimigraph.passes.fusions import check_required_fusions, fusion_summary
    from kimigraph.passes.instruments import DumpPasses, Instrument, TimePasses, VerifyPasses
    from kimigraph.passes.manager import PassRecord, run_pipeline
    from kimigraph.passes.pipeline import Pipeline, default_pipeline
    from kimigraph.passes.registry import PassRegistry, register, registered_passes

__all__ = [
    "DumpPasses",
    "Instrument",
    "Pass",
    "PassContext",
    "PassRecord",
    "PassRegistry",
    "Pipeline",
    "TimePasses",
    "VerifyPasses",
    "check_required_fusions",
    "default_pipeline",
    "fusion_summary",
    "register",
    "registered_passes",
    "run_pipeline",
]

_HOMES = {
    "base": ("Pass", "PassContext"),
    "fusions": ("check_required_fusions", "fusion_summary"),
    "instruments": ("DumpPasses", "Instrument", "TimePasses", "VerifyPasses"),
    "manager": ("PassRecord", "run_pipeline"),
    "pipeline": ("Pipeline", "default_pipeline"),
    "registry": ("PassRegistry", "register", "registered_passes"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
