"""What a ``.pt2`` file must be before torch loads it: the file may come from anybody.

``torch.export.load`` unpickles what the file says is pickled, looks operators up by any dotted name of torch, and
runs guards and symbolic sizes as Python. What asks for one of these is refused here; nothing of it is needed for a
program of fixed sizes.
"""

import io
import json
import re
import zipfile
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, cast

import torch

from kimigraph.capture.onnx.audit import MOST_BYTES
from kimigraph.ir.errors import UsageError

KNOWN = re.compile(r"torch\.ops\.(aten|prims|kimigraph)\.\w+\.\w+|_operator\.getitem")
TREES = (None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict")
EXTRA = "extra/kimigraph.json"


def check_archive(path: Path) -> dict[str, Any]:
    """What kimigraph wrote into the file beside the program; empty for a file of somebody else.

    UsageError that lists what is wrong with the file, every operator of a foreign library among it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            faults = list(_faults(archive, path))
            extra = _extra(archive) if not faults else {}
    except (zipfile.BadZipFile, OSError, ValueError, RecursionError, KeyError, EOFError) as error:
        raise UsageError(f"{path} is no .pt2 file of torch.export, or a damaged one ({error})") from error
    if faults:
        more = f", and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise UsageError(f"{path} is not taken: {'; '.join(faults[:8])}{more}")
    return extra


def _faults(archive: zipfile.ZipFile, path: Path) -> Iterator[str]:
    entries = archive.infolist()
    names = [entry.filename for entry in entries]
    if len(set(names)) < len(names):
        yield "two of its parts have one name"
        return
    packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
    if packed or sum(entry.file_size for entry in entries) > path.stat().st_size:
        yield "its parts are compressed, or say that they are larger than the file"
        return
    models = [name for name in names if re.fullmatch(r"[^/]+/models/[^/]+\.json", name)]
    if len(models) != 1:
        yield f"it holds {len(models)} programs (torch 2.9 and later write one)"
        return
    program = _json(archive, models[0])
    yield from _program_faults(program)
    for name in names:
        if name.endswith("_config.json"):
            yield from _storage_faults(_json(archive, name))
        if re.fullmatch(r"[^/]+/data/sample_inputs/[^/]+\.pt", name):
            yield from _input_faults(archive.read(name))


def _json(archive: zipfile.ZipFile, name: str) -> Any:
    return json.loads(archive.read(name))


def _program_faults(program: Any) -> Iterator[str]:
    foreign: dict[str, int] = {}
    for item in _dicts(program):
        if item.get("guards_code"):
            yield "it brings Python code that guards its inputs (export it with fixed sizes)"
        if "expr_str" in item:
            yield f"a size is the expression {str(item['expr_str'])[:40]!r} (export it with fixed sizes)"
            return
        target = item.get("target")
        if isinstance(target, str) and "metadata" in item and not KNOWN.fullmatch(target):
            foreign[target] = foreign.get(target, 0) + 1
        for kind in _tree_kinds(item):
            if kind not in TREES:
                yield f"it takes or returns a {kind}; give tuples, lists and dicts of tensors"
    for target, count in sorted(foreign.items()):
        yield f"operator {target} is not of torch ({count} nodes)"


def _dicts(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield cast("dict[str, Any]", tree)
    if isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _dicts(value)


def _tree_kinds(item: dict[str, Any]) -> Iterator[Any]:
    for key in ("in_spec", "out_spec"):
        if isinstance(item.get(key), str) and item[key]:
            for part in _dicts(json.loads(item[key])):
                if "type" in part:
                    yield part["type"]


def _storage_faults(config: Any) -> Iterator[str]:
    for name, entry in config.get("config", {}).items():
        if entry.get("use_pickle"):
            yield f"'{name}' is pickled, and nothing is unpickled (save contiguous tensors on the CPU)"
        meta = entry.get("tensor_meta") or {}
        sizes = [int(size.get("as_int", 0)) for size in meta.get("sizes", ())]
        if min(sizes, default=0) < 0 or prod(sizes) > MOST_BYTES:
            yield f"'{name}' has sizes {sizes}"


def _input_faults(data: bytes) -> Iterator[str]:
    try:
        torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:  # whatever the restricted unpickler meets
        reason = str(error).partition("\n")[0][:120]
        yield f"its example inputs are more than tensors and plain values ({reason})"


def _extra(archive: zipfile.ZipFile) -> dict[str, Any]:
    found = [name for name in archive.namelist() if name.endswith("/" + EXTRA)]
    document = _json(archive, found[0]) if found else {}
    if not isinstance(document, dict):
        raise ValueError(f"{EXTRA} is no JSON object")
    return cast("dict[str, Any]", document)
