"""ONNX: a functional graph to operators of the standard and functions of the domain ``kimigraph``."""
