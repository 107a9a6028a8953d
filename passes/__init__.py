"""kimigraph.passes: import it by that name; the folder's own name would make a second copy with its own state.

The public names are loaded on first use: importing one pass does not import the others.
"""

if __name__ != "kimigraph.passes":
    raise ImportError("import this package as 'kimigraph.passes', not as 'passes'")

from importlib import import_module
from typing import Any

_PUBLIC = {
    "DumpPasses": "kimigraph.passes.instruments",
    "Instrument": "kimigraph.passes.instruments",
    "Pass": "kimigraph.passes.base",
    "PassContext": "kimigraph.passes.base",
    "PassRecord": "kimigraph.passes.manager",
    "PassRegistry": "kimigraph.passes.registry",
    "Pipeline": "kimigraph.passes.pipeline",
    "TimePasses": "kimigraph.passes.instruments",
    "VerifyPasses": "kimigraph.passes.instruments",
    "check_required_fusions": "kimigraph.passes.fusions",
    "default_pipeline": "kimigraph.passes.pipeline",
    "fusion_summary": "kimigraph.passes.fusions",
    "register": "kimigraph.passes.registry",
    "registered_passes": "kimigraph.passes.registry",
    "run_pipeline": "kimigraph.passes.manager",
}
__all__ = list(_PUBLIC)  # pyright: ignore


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'kimigraph.passes' has no attribute {name!r}")
    return getattr(import_module(module), name)
