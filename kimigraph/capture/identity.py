"""What a module is, as JSON that is equal in every process: the model's part of the cache key.

It holds names and shapes of tensors, classes with their plain attributes, hashes of source files by module name, and
what those files' code finds around it. It holds no paths, times, addresses or values of weights.
"""

import hashlib
import inspect
import json
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from kimigraph.capture.watch import reachable_tensors

_VERSIONED = ("torch", "transformers")
"""Packages whose version stands for their sources, beside the files of the model's own classes."""


_TORCHS_OWN = frozenset(vars(nn.Module())) - {"training"}
"""What torch keeps in every module; it is no part of what the module is, and differs between versions."""


def module_identity(module: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]] | None) -> dict[str, Any]:
    """The identity of ``module``; with ``call``, also of its arguments and of the values of its constants."""
    state = module.state_dict(keep_vars=True)
    classes = {type(child) for child in module.modules()}
    identity: dict[str, Any] = {
        "tensors": {name: _tensor(tensor) for name, tensor in state.items()},
        "tied": _tied(state),
        "modules": _digest([_module(path, child) for path, child in module.named_modules()]),
        "sources": source_hashes(classes),
    }
    identity["surroundings"] = _digest(surroundings(classes, identity["sources"]))
    if call is not None:
        identity["inputs"] = call_digest(*call)
        constants = {name: tensor for name, tensor in reachable_tensors(module).items() if name not in state}
        identity["constants"] = _digest({name: _bytes_digest(tensor) for name, tensor in constants.items()})
    return identity


def call_digest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Twelve hex digits over structure, shapes, strides, dtypes and plain values of a call's arguments."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return _digest([str(spec), [_tensor(x) if isinstance(x, Tensor) else repr(x) for x in leaves]])[:12]


def _tensor(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), list(tensor.stride()), str(tensor.dtype)]


def _tied(state: dict[str, Tensor]) -> list[list[str]]:
    """Groups of names that share one tensor."""
    groups: dict[int, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(id(tensor), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _module(path: str, module: nn.Module) -> list[Any]:
    kind = type(module)
    plain = {name: value for name, value in vars(module).items() if name not in _TORCHS_OWN and _is_plain(value)}
    return [path, f"{kind.__module__}.{kind.__qualname__}", {name: repr(plain[name]) for name in sorted(plain)}]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def source_hashes(classes: set[type]) -> dict[str, str]:
    """SHA-256 of the source files of ``classes`` and of what those files use from their own package, by module name."""
    pending = sorted({kind.__module__ for kind in classes})
    found: dict[str, str] = {}
    while pending:
        name = pending.pop()
        module = sys.modules.get(name)
        if module is None or name in found or name.partition(".")[0] == "torch":
            continue
        text = _source(module)
        if text is not None:
            found[name] = hashlib.sha256(text.encode()).hexdigest()
            if name.partition(".")[0] not in _VERSIONED:
                pending += _used_modules(module)
    for package in _VERSIONED:
        if any(name.partition(".")[0] == package for name in {kind.__module__ for kind in classes}):
            found[package] = _version(package)
    return dict(sorted(found.items()))


def surroundings(classes: set[type], modules: Iterable[str]) -> dict[str, str]:
    """Values that code finds around it and that may differ while its text does not.

    Those are plain values and tensors that are globals of ``modules``, attributes of ``classes``, and defaults and
    closures of the classes' functions. Torch, transformers and kimigraph have none that change.
    """
    found: dict[str, str] = {}
    for name in modules:
        if not _is_settled(name) and name in sys.modules:
            found |= _values(name, vars(sys.modules[name]))
    for kind in classes:
        if not _is_settled(kind.__module__):
            place = f"{kind.__module__}.{kind.__qualname__}"
            found |= _values(place, vars(kind))
            for name, function in inspect.getmembers(kind, inspect.isfunction):
                inside = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}
                defaults = {"defaults": function.__defaults__, "keywords": function.__kwdefaults__}
                found |= _values(f"{place}.{name}", {**inside, **defaults})
    return found


def _is_settled(module: str) -> bool:
    return module.partition(".")[0] in (*_VERSIONED, "kimigraph")


def _values(place: str, variables: Mapping[str, Any]) -> dict[str, str]:
    plain = {name: value for name, value in variables.items() if not name.startswith("__")}
    found = {f"{place}.{name}": repr(value) for name, value in plain.items() if _is_plain(value)}
    tensors = {name: value for name, value in plain.items() if isinstance(value, Tensor) and not value.is_meta}
    return found | {f"{place}.{name}": _bytes_digest(value) for name, value in tensors.items()}


def _source(module: ModuleType) -> str | None:
    path = getattr(module, "__file__", None)
    if path is None or not Path(path).is_file():
        return None
    return Path(path).read_text(encoding="utf-8", errors="replace")


def _used_modules(module: ModuleType) -> list[str]:
    """Modules of the same top-level package whose objects stand in the globals of ``module``."""
    package = module.__name__.partition(".")[0]
    names: set[str] = set()
    for value in list(vars(module).values()):
        name = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
        if isinstance(name, str) and name.partition(".")[0] == package:
            names.add(name)
    return sorted(names)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _bytes_digest(tensor: Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
