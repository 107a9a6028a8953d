"""Triton source out of pointwise regions: one kernel each, built as a Python syntax tree."""

from kimigraph.codegen.pointwise.build import build_nodes, build_region

__all__ = ["build_nodes", "build_region"]
