"""Checkpoints: safetensors files with published tensor names, read into a model's own tensors one by one."""

from kimigraph.weights.checkpoint import Checkpoint, weight_files
from kimigraph.weights.drawn import drawn_weight
from kimigraph.weights.families import layout_of
from kimigraph.weights.layout import Layout
from kimigraph.weights.load import Watch, load_module, read_weights, unwatched

__all__ = [
    "Checkpoint",
    "Layout",
    "Watch",
    "drawn_weight",
    "layout_of",
    "load_module",
    "read_weights",
    "unwatched",
    "weight_files",
]
