"""Graph to artifact: the directory with ``program.py``, its kernels, constants and manifest."""

import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import kimigraph
from kimigraph.codegen.architecture import cubin_arch
from kimigraph.codegen.arena_text import ARENA_FILE
from kimigraph.codegen.capturable import uncapturable
from kimigraph.codegen.constants import CONSTANTS_FILE, folded_constants
from kimigraph.codegen.cross_compile import compile_kernels
from kimigraph.codegen.kernel_writer import build_kernels
from kimigraph.codegen.preparation import prepared
from kimigraph.codegen.program_writer import ProgramTitle, program_text
from kimigraph.codegen.self_test import LARGEST, REFERENCE, reference_checksums, seeded_bytes, tolerance_of
from kimigraph.codegen.stream_text import stream_count
from kimigraph.codegen.support import support_files
from kimigraph.ir.config import ONNXRUNTIME
from kimigraph.ir.launches import graph_launches
from kimigraph.ir.manifest import Manifest, record_file
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.tensor_file import write_tensors


def _silent(_: str) -> None:
    """Tells nobody."""


def build_artifact(
    program: CapturedProgram,
    target: str,
    directory: Path,
    *,
    seed: int = 0,
    notify: Callable[[str], None] = _silent,
    self_test: bool = True,
    cache_key: str = "",
    info: dict[str, Any] | None = None,
) -> Manifest:
    """Write the artifact of ``program`` for ``target`` into ``directory``, which exists and is empty.

    ``target`` is ``cpu:reference``, ``cpu``, ``cuda``, ``cuda:sm_<number>`` (kernels are then compiled ahead of time,
    in worker processes) or ``cpu:onnxruntime`` (an artifact of kind ``onnx``). ``info`` adds to ``program.info``; of
    it, ``model`` (or ``model_type``), ``phase`` and ``shape_key`` go into the manifest's fields. ``self_test=False``
    leaves the checksums out. Raises CompileError for what has no kernel or no spelling, UsageError for a target that
    this Triton cannot build.
    """
    facts = {**program.info, **(info or {})}
    if target == ONNXRUNTIME:
        from kimigraph.codegen.onnx.artifact import build_onnx_artifact

        return build_onnx_artifact(
            program, target, directory, facts, seed=seed, self_test=self_test, cache_key=cache_key
        )
    title = ProgramTitle(model_name(facts), str(facts.get("phase", "")), str(facts.get("shape_key", "")), target)
    arch = cubin_arch(target)
    ready = prepared(program)
    bound = ready.program
    kernels = build_kernels(bound.graph_module.graph, target)
    paths, records = kernels.write(directory), kernels.records()
    with ThreadPoolExecutor(
        1
    ) as beside:  # the compiler runs in processes of its own; meanwhile this one writes the rest
        building = None if arch is None else beside.submit(compile_kernels, kernels, directory, arch, notify)
        streams = stream_count(bound.graph_module.graph.nodes)
        text = program_text(bound, kernels, title)
        support = support_files(kernels.ahead_of_time, streams, ARENA_FILE in text, several="mesh" in facts)
        texts = {"program.py": text, **support}
        paths += [*_write(texts, directory), *write_constants(bound, directory)]
        sums = checksums_of(program, target, seed, notify) if self_test else {}
        if building is not None:
            records, built = building.result()
            paths += built
    manifest = Manifest(
        model=title.model,
        phase=title.phase,
        shape_key=title.shape_key,
        target=target,
        versions=versions(),
        cache_key=cache_key,
        files=tuple(record_file(directory, path) for path in sorted(paths)),
        inputs=bound.inputs,
        sources=ready.sources,
        preparation=ready.steps,
        outputs=program.outputs,
        in_spec=tree_text(program.in_spec),
        out_spec=tree_text(program.out_spec),
        kernels=records,
        launches=graph_launches(bound.graph_module.graph, kernels.launches()),
        checksums=sums,
        seed=seed,
        tolerance=tolerance_of(program),
        reference=REFERENCE if sums else "",
        info=facts,
        streams=streams,
        uncapturable=uncapturable(bound.graph_module.graph),
    )
    manifest.write(directory)
    return manifest


def versions() -> dict[str, str]:
    """What an artifact was built with; triton is absent where it is not installed."""
    found = {"kimigraph": kimigraph.__version__, "torch": torch.__version__, "python": platform.python_version()}
    with suppress(PackageNotFoundError):
        found["triton"] = version("triton")
    return found


def model_name(facts: dict[str, Any]) -> str:
    """The model's name; a path is cut to its last part, so that a program's text is the same on every machine."""
    name = str(facts.get("model") or facts.get("model_type") or facts.get("source") or "")
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2]


def _write(texts: dict[str, str], directory: Path) -> list[str]:
    for path, text in texts.items():
        (directory / path).parent.mkdir(exist_ok=True)
        (directory / path).write_text(text, encoding="utf-8")
    return list(texts)


def write_constants(program: CapturedProgram, directory: Path) -> list[str]:
    """Write the constants of a program; the files that it took, none where there are no constants."""
    constants = folded_constants(program)
    if constants:
        write_tensors(directory / CONSTANTS_FILE, constants)
    return [CONSTANTS_FILE] if constants else []


def tree_text(spec: Any) -> str | None:
    """The serialised tree specification, or None where a container of the model has no serialised form."""
    if spec is None:
        return None
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError, ValueError):
        return None


def checksums_of(
    program: CapturedProgram, target: str, seed: int, notify: Callable[[str], None]
) -> dict[str, list[float]]:
    """Checksums by the references; a program that has kernels of its own can do without, and says so."""
    if seeded_bytes(program) > LARGEST:
        notify(f"no self-test: its tensors take {seeded_bytes(program) / 2**30:.1f} GiB (at most {LARGEST >> 30})")
        return {}
    try:
        return reference_checksums(program, seed)
    except Exception as error:
        if target == REFERENCE:
            raise
        notify(f"no self-test: the references could not compute it ({type(error).__name__}: {error})")
        return {}
