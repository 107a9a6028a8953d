"""Graph mode: a program as one CUDA graph for each shape and each set of caches."""

from kimigraph.runtime.graphs.mode import GraphMode, graph_mode
from kimigraph.runtime.graphs.refusal import GraphCaptureError
from kimigraph.runtime.graphs.shelf import GraphDevice, GraphModeWarning

__all__ = ["GraphCaptureError", "GraphDevice", "GraphMode", "GraphModeWarning", "graph_mode"]
