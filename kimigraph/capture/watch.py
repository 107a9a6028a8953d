"""Tracing must leave the model as it was."""

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from kimigraph.capture.errors import hidden_state

_SKIPPED = (type, nn.Module, torch.Generator)


class StateWatch:
    """Holds copies of all tensors of a module but its parameters while the block runs, and compares them afterwards.

    Tracing runs the model's Python: a tensor that is neither an argument nor a registered buffer is really changed by
    it, and its later changes are missing from the graph. Such a tensor gets its value back and CaptureError names it.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._name = name
        parameters = {id(p) for p in module.parameters()}
        found = reachable_tensors(module)
        self._copies = {key: (t, t.detach().clone()) for key, t in found.items() if id(t) not in parameters}

    def __enter__(self) -> "StateWatch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        changed = [key for key, (tensor, copy) in self._copies.items() if not _same_bits(tensor, copy)]
        with torch.no_grad():
            for key in changed:
                tensor, copy = self._copies[key]
                tensor.copy_(copy)
        if changed and error is None:
            raise hidden_state(self._name, changed)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.device.type == "meta":
        return a.shape == b.shape and a.dtype == b.dtype
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().reshape(-1)
    # A single element may have any stride and count as contiguous, but bytes are seen where the stride is one.
    return (flat if flat.numel() > 1 else flat.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


def reachable_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that a module holds, by path: parameters, buffers, attributes, and what containers and plain objects
    among its attributes hold."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        for tensors in (child.named_parameters(recurse=False), child.named_buffers(recurse=False)):
            for name, tensor in tensors:
                found[".".join(part for part in (prefix, name) if part)] = tensor
        for name, value in vars(child).items():
            if not name.startswith("_") or isinstance(value, Tensor):
                _collect(value, ".".join(part for part in (prefix, name) if part), found, seen, 4)
            elif name not in ("_parameters", "_buffers", "_modules"):
                _collect(value, ".".join(part for part in (prefix, name) if part), found, seen, 4)
    return found


def _collect(value: Any, path: str, found: dict[str, Tensor], seen: set[int], depth: int) -> None:
    if isinstance(value, Tensor):
        if not any(value is known for known in found.values()):
            found[path] = value
        return
    if depth == 0 or id(value) in seen or isinstance(value, _SKIPPED) or callable(value):
        return
    seen.add(id(value))
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif hasattr(value, "__dict__"):
        items = vars(value).items()
    for key, item in items:
        _collect(item, f"{path}.{key}", found, seen, depth - 1)
