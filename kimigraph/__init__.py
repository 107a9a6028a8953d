"""kimigraph: a compiler for language models with hybrid sparse attention.

The public names are loaded on first use, so that ``kimigraph --help`` starts without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimigraph import passes
    from kimigraph.api import Compiled, load, optimize
    from kimigraph.generator import Generator
    from kimigraph.ir.config import CompileConfig
    from kimigraph.runtime.generation import Sampling

__version__ = "0.1.0"

_PUBLIC = {
    "CompileConfig": "kimigraph.ir.config",
    "Compiled": "kimigraph.api",
    "Generator": "kimigraph.generator",
    "Sampling": "kimigraph.runtime.generation",
    "load": "kimigraph.api",
    "optimize": "kimigraph.api",
}
__all__ = ["CompileConfig", "Compiled", "Generator", "Sampling", "__version__", "load", "optimize", "passes"]


def __getattr__(name: str) -> Any:
    if name == "passes":
        return import_module("kimigraph.passes")
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'kimigraph' has no attribute {name!r}")
    return getattr(import_module(module), name)
