"""The manifest of an artifact: what was compiled, for what, and the checksum of every file of it."""

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, cast

from torch.utils import _pytree as pytree

from kimigraph.ir.errors import CorruptArtifactError
from kimigraph.ir.mesh import DeviceMesh
from kimigraph.ir.program import InputSpec, OutputSpec

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
ONNX_MODEL = "model.onnx"
_REMEDY = "compile it again (--cache refresh), or copy the artifact again from where it came"


@dataclass(frozen=True)
class FileRecord:
    """A file of the artifact: ``path`` relative to its directory, with forward slashes; its size in bytes."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class CubinRecord:
    """One ``@triton.jit`` function built ahead of time.

    ``metadata`` is a JSON file beside the cubin: entry point, shared memory, warps, argument order and types.
    """

    function: str
    file: str
    metadata: str


@dataclass(frozen=True)
class KernelRecord:
    """One call of a semantic operator or of a region: the graph node ``name`` and the kernel file that computes it.

    ``bytes`` and ``flops`` are its cost; ``replaces`` names the captured nodes it stands for.
    """

    name: str
    op: str
    file: str
    bytes: int
    flops: int
    replaces: tuple[str, ...] = ()
    cubins: tuple[CubinRecord, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The record as plain JSON values, as the compile report lists it."""
        return asdict(self)


def _strings() -> dict[str, str]:
    return {}


@dataclass
class Manifest:
    """``manifest.json`` of an artifact directory.

    ``inputs`` are all placeholders in the order of ``step``; ``preparation`` maps the source name of a weight to the
    steps (``kimigraph.ir.preparation``) that make it from the model's own (absent: as it is), and ``sources`` are the
    weights of the model that these read and ``step`` does not take. ``in_spec`` and ``out_spec`` are the
    serialised tree specifications of the model's signature, None where a container cannot be serialised. ``checksums``
    are the three numbers of ``kimigraph.ir.seeded.checksum`` for every output and mutated input of one step on tensors
    seeded with ``seed``, compared with ``tolerance``; ``reference`` says what computed them (``cpu:reference``; empty:
    nothing did). ``streams`` is how many the program queues work on, the caller's included; ``uncapturable`` names the
    nodes that no CUDA graph can hold, each with the reason. ``kind`` tells apart forms of artifact: ``program``
    (``program.py`` and its kernels) and ``onnx`` (``model.onnx``, which takes all placeholders as inputs).
    """

    model: str
    phase: str
    shape_key: str
    target: str
    versions: dict[str, str] = field(default_factory=_strings)
    cache_key: str = ""
    files: tuple[FileRecord, ...] = ()
    inputs: tuple[InputSpec, ...] = ()
    outputs: tuple[OutputSpec, ...] = ()
    preparation: dict[str, list[Any]] = field(default_factory=lambda: {})
    sources: tuple[InputSpec, ...] = ()
    in_spec: str | None = None
    out_spec: str | None = None
    kernels: tuple[KernelRecord, ...] = ()
    launches: int = 0
    checksums: dict[str, list[float]] = field(default_factory=lambda: {})
    seed: int = 0
    tolerance: float = 1e-4
    reference: str = ""
    info: dict[str, Any] = field(default_factory=lambda: {})
    streams: int = 1
    uncapturable: dict[str, str] = field(default_factory=_strings)
    kind: str = "program"
    schema_version: int = SCHEMA_VERSION

    def write(self, directory: Path) -> None:
        """Write ``manifest.json`` into ``directory``."""
        text = json.dumps(asdict(self), indent=1, sort_keys=True, ensure_ascii=False)
        (directory / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """The manifest of ``directory``; CorruptArtifactError when there is none or it does not read."""
        path = directory / MANIFEST_NAME
        try:
            document = json.loads(path.read_bytes())
            if document["schema_version"] != SCHEMA_VERSION:
                raise CorruptArtifactError(
                    f"{path} has schema version {document['schema_version']} and this kimigraph reads {SCHEMA_VERSION}:"
                    " compile the artifact again with this version"
                )
            return cls(**_parse(document))
        except FileNotFoundError:
            raise CorruptArtifactError(f"{directory} is no artifact: it has no {MANIFEST_NAME}; {_REMEDY}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptArtifactError(f"{path} cannot be read ({error}); {_REMEDY}") from error

    @property
    def bound(self) -> tuple[InputSpec, ...]:
        """What comes with the model, under the model's own names: prepared weights by what they are made of."""
        taken = tuple(spec for spec in self.inputs if spec.bound and spec.source not in self.preparation)
        return taken + self.sources

    def wanted(self, given: Collection[str] = ()) -> tuple[InputSpec, ...]:
        """What is to be bound where some tensors are ``given`` by name: no weight of which only prepared ones are made
        that are among them."""
        left = {name: steps for name, steps in self.preparation.items() if name not in given}
        read = {name for steps in left.values() for step in steps for name in step["of"]}
        spare = {spec.source for spec in self.sources} - read
        return tuple(spec for spec in self.bound if spec.source not in spare)

    def packed_weights(self) -> dict[str, str]:
        """The names of weights that are packed as MXFP4 when they are bound, by those that they are made of."""
        return {step["of"][0]: name for name, [step] in self.preparation.items() if step["op"] == "mxfp4"}

    @property
    def ways(self) -> int:
        """The ranks that run the program together."""
        return self.mesh.size

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of these ranks."""
        return DeviceMesh(**self.info.get("mesh", {}))

    @property
    def random_weights(self) -> bool:
        """Whether the model was made with seeded weights, so that its weights can be made again from ``seed``."""
        return bool(self.info.get("random_weights"))

    def identity(self) -> str:
        """A name for this program: equal for equal files, 16 hexadecimal digits."""
        text = json.dumps([asdict(record) for record in self.files], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def in_tree(self) -> Any:
        """The tree specification of the caller's arguments (``torch.utils._pytree``), None when it has no text."""
        return None if self.in_spec is None else pytree.treespec_loads(self.in_spec)

    def out_tree(self) -> Any:
        """The tree specification of the model's result, None when it has no text."""
        return None if self.out_spec is None else pytree.treespec_loads(self.out_spec)

    def verify_files(self, directory: Path) -> None:
        """CorruptArtifactError naming the first file that is missing or differs from its record."""
        for record in self.files:
            path = directory / _inside(record.path)
            try:
                found = record_file(directory, record.path)
            except OSError as error:
                raise CorruptArtifactError(f"{path} is missing or unreadable ({error.strerror}); {_REMEDY}") from error
            if found.size != record.size:
                raise CorruptArtifactError(f"{path} has {found.size} bytes, its record says {record.size}; {_REMEDY}")
            if found.sha256 != record.sha256:
                raise CorruptArtifactError(f"{path} was changed: its SHA-256 is not the recorded one; {_REMEDY}")


def record_file(directory: Path, relative: str) -> FileRecord:
    """The record of a file as it lies in ``directory`` now."""
    path = directory / relative
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return FileRecord(relative, path.stat().st_size, digest)


def verify_artifact(directory: Path) -> Manifest:
    """Read the manifest of ``directory`` and check every file it lists."""
    manifest = Manifest.read(directory)
    manifest.verify_files(directory)
    return manifest


def _inside(relative: str) -> str:
    """The path, refused when it would leave the artifact's directory."""
    path = PurePosixPath(relative)
    if path.is_absolute() or ".." in path.parts:
        raise CorruptArtifactError(f"the manifest lists {relative!r}, which lies outside the artifact; {_REMEDY}")
    return relative


def _parse(document: dict[str, Any]) -> dict[str, Any]:
    """The fields of a manifest from its JSON document; keys of a later minor form are ignored."""
    known = {key: value for key, value in document.items() if key in Manifest.__dataclass_fields__}
    known["files"] = tuple(FileRecord(**record) for record in known["files"])
    known["inputs"] = tuple(InputSpec(**_tuples(record)) for record in known["inputs"])
    known["sources"] = tuple(InputSpec(**_tuples(record)) for record in known.get("sources", ()))
    known["outputs"] = tuple(OutputSpec(**record) for record in known["outputs"])
    known["kernels"] = tuple(_kernel(record) for record in known["kernels"])
    return known


def _kernel(record: dict[str, Any]) -> KernelRecord:
    fields: dict[str, Any] = dict(record)
    fields["replaces"] = tuple(record["replaces"])
    fields["cubins"] = tuple(CubinRecord(**cubin) for cubin in record["cubins"])
    return KernelRecord(**fields)


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples: every list of an input's record is one, those within a list too."""
    return {key: _tuple(value) for key, value in record.items()}


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, cast("Iterable[Any]", value))) if isinstance(value, list) else value
