"""The step of an artifact of kind ``onnx``: onnxruntime computes it, states are copied back into the caller's."""

from operator import is_
from pathlib import Path

import torch

from kimigraph.adapters.onnx_model import OnnxSession
from kimigraph.adapters.tensor_version import tensor_version
from kimigraph.ir.manifest import ONNX_MODEL, Manifest


class OnnxStep:
    """Takes all placeholders in manifest order, as ``step`` of a ``program.py`` does.

    Weights belong to the session, so that onnxruntime can prepare them; when one is written or replaced, the next call
    makes a new session.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._path, self._manifest = directory / ONNX_MODEL, manifest
        self._held = [place for place, spec in enumerate(manifest.inputs) if spec.bound and not spec.mutated]
        self._session: OnnxSession | None = None
        self._weights: list[torch.Tensor] = []
        self._versions: list[int] = []

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = self._manifest.inputs
        weights = [tensors[place] for place in self._held]
        versions = [tensor_version(tensor) for tensor in weights]
        same = versions == self._versions and all(map(is_, weights, self._weights))
        if self._session is None or not same:
            bound = {inputs[place].source: tensors[place] for place in self._held}
            self._session = OnnxSession(self._path, torch.get_num_threads(), bound)
            self._weights, self._versions = weights, versions
        values = self._session.run({spec.source: tensor for spec, tensor in zip(inputs, tensors, strict=True)})
        results = list(values.values())
        states = [tensor for spec, tensor in zip(inputs, tensors, strict=True) if spec.mutated]
        count = len(results) - len(states)
        for state, value in zip(states, results[count:], strict=True):
            state.copy_(value)
        return tuple(results[:count])
