"""kimigraph.codegen: import it by that name; the folder's own name would make a second copy with its own state."""

if __name__ != "kimigraph.codegen":
    raise ImportError("import this package as 'kimigraph.codegen', not as 'codegen'")

from kimigraph.codegen.artifact import build_artifact
from kimigraph.codegen.launches import count_launches

__all__ = ["build_artifact", "count_launches"]
