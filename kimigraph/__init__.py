"""kimigraph: a compiler for language models with hybrid sparse attention.

The public names are loaded on first use, so that ``kimigraph --help`` starts without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kimigraph.entry import offer_backend

if TYPE_CHECKING:
    from kimigraph import passes
    from kimigraph.api import Compiled, load, optimize
    from kimigraph.generator import Generator
    from kimigraph.ir.config import CompileConfig
    from kimigraph.runtime.generation import Sampling
    from kimigraph.torch_compile import TorchBackend

__version__ = "0.1.0"

_PUBLIC = {
    "CompileConfig": "kimigraph.ir.config",
    "Compiled": "kimigraph.api",
    "Generator": "kimigraph.generator",
    "Sampling": "kimigraph.runtime.generation",
    "TorchBackend": "kimigraph.torch_compile",
    "load": "kimigraph.api",
    "optimize": "kimigraph.api",
}
__all__ = [
    "CompileConfig",
    "Compiled",
    "Generator",
    "Sampling",
    "TorchBackend",
    "__version__",
    "load",
    "optimize",
    "passes",
]

offer_backend(__version__)


def __getattr__(name: str) -> Any:
    if name == "passes":
        return import_module("kimigraph.passes")
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'kimigraph' has no attribute {name!r}")
    return getattr(import_module(module), name)
