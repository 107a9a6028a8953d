"""A directory of safetensors files: one, several, or shards with an index."""

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, cast

from kimigraph.ir.errors import UsageError
from kimigraph.weights.shard import StoredTensor, read_header

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a directory, by published name; nothing but headers has been read of them."""

    directory: Path
    tensors: dict[str, StoredTensor]

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        """Read index and headers.

        Raises UsageError for a directory without files, an index that names other places or absent shards, a tensor in
        two files, one that the index places where it is not, and an unreadable file.
        """
        tensors: dict[str, StoredTensor] = {}
        for path in weight_files(directory):
            for name, stored in read_header(path).items():
                if name in tensors:
                    raise UsageError(
                        f"{directory}: {name} is in {tensors[name].path.name} and in {path.name}: remove the file that "
                        "does not belong to the checkpoint"
                    )
                tensors[name] = stored
        if (directory / INDEX).is_file():
            _check_index(directory, tensors)
        return cls(directory, tensors)

    @property
    def quantization(self) -> str:
        """The format that ``config.json`` says the weights are quantized in; empty when it says nothing."""
        try:
            document: Any = json.loads((self.directory / "config.json").read_text(encoding="utf-8"))
            described = document.get("quantization_config") or document.get("text_config", {}).get(
                "quantization_config"
            )
            return str(described.get("format") or described.get("quant_method") or "")
        except (OSError, ValueError, AttributeError):
            return ""


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the directory's weights: those that its index names, else ``model.safetensors``, else all
    ``*.safetensors``; other files may lie beside the first two.

    Raises UsageError, which names --random-weights, when there are none, and for an index that cannot be followed.
    """
    if (directory / INDEX).is_file():
        return _shards(directory)
    whole = directory / "model.safetensors"
    files = [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        pickled = " (pickled *.bin files are not read: convert them)" if list(directory.glob("*.bin")) else ""
        raise UsageError(
            f"{directory} has no *.safetensors files{pickled}: put the weights there, or compile with --random-weights "
            '(or "random_weights": {"seed": 0} in config.json)'
        )
    return files


def _shards(directory: Path) -> list[Path]:
    names = sorted(set(_weight_map(directory).values()))
    outside = [name for name in names if not _is_plain(name)]
    if outside:
        raise UsageError(
            f"{directory / INDEX} names files that are not beside it: {', '.join(map(repr, outside[:5]))}. Shards are "
            "plain file names that end in .safetensors; take the index that came with the weights"
        )
    absent = [name for name in names if not (directory / name).is_file()]
    if absent:
        raise UsageError(
            f"{directory} lacks {len(absent)} of the {len(names)} shards that {INDEX} names: "
            f"{', '.join(absent[:20])}{' and more' if len(absent) > 20 else ''}. Copy them there"
        )
    if "model.safetensors" not in names and (directory / "model.safetensors").is_file():
        raise UsageError(
            f"{directory} has both model.safetensors and {INDEX}, which does not name it: remove the one that does not "
            "belong to the checkpoint"
        )
    return [directory / name for name in names]


def _is_plain(name: str) -> bool:
    """Whether the name stays in the directory on any system."""
    parts = (PurePosixPath(name).name, PureWindowsPath(name).name)
    return name.endswith(".safetensors") and parts == (name, name) and "\0" not in name


def _weight_map(directory: Path) -> dict[str, str]:
    path = directory / INDEX
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        places = cast(dict[str, Any], document["weight_map"])
        sound = bool(places) and all(isinstance(place, str) for place in places.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        sound, places = False, {}
    if not sound:
        raise UsageError(
            f"{path} is no index: it must be a JSON object with a weight_map of tensor names to file names"
        )
    return places


def _check_index(directory: Path, tensors: dict[str, StoredTensor]) -> None:
    places = _weight_map(directory)
    wrong = sorted(name for name, place in places.items() if name not in tensors or tensors[name].path.name != place)
    wrong += sorted(name for name in tensors if name not in places)
    if wrong:
        raise UsageError(
            f"{directory / INDEX} and the shards disagree about {len(wrong)} tensors, first {', '.join(wrong[:5])}: "
            "the index and the files are of different checkpoints; copy them again"
        )
