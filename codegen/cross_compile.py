"""Kernels ahead of time: Triton source to cubins in worker processes, on a machine that needs no GPU.

A process that runs kernels under the interpreter cannot compile any, so the compiler never runs in this process.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kimigraph.codegen.kernel_writer import KernelSet
from kimigraph.ir.env import compiler_environment
from kimigraph.ir.errors import CompileError, UsageError
from kimigraph.ir.manifest import CubinRecord, KernelRecord

WORKERS = 2
_WORKER = Path(__file__).with_name("cross_compile_worker.py")
_UNSUPPORTED = 2


def ahead_of_time_arch(target: str) -> int | None:
    """90 for ``cuda:sm_90``, None for a target whose kernels are compiled where they run; UsageError for other text."""
    if target in ("cpu", "cpu:reference", "cuda"):
        return None
    match = re.fullmatch(r"cuda:sm_(\d{2,3})", target)
    if match is None:
        raise UsageError(f"unknown target {target!r}: choose auto, cpu, cpu:reference, cuda or cuda:sm_90")
    return int(match[1])


def compile_kernels(
    kernels: KernelSet, directory: Path, arch: int, notify: Callable[[str], None]
) -> tuple[tuple[KernelRecord, ...], list[str]]:
    """Build a cubin for every launch of every kernel file; returns the records with cubins, and the files written.

    Raises UsageError when this Triton cannot build for ``arch`` and CompileError naming the kernel that failed.
    """
    jobs: list[dict[str, Any]] = [
        {"source": file.path, "stem": f"kernels/{file.name}.{launch.function}", "arch": arch, **asdict(launch)}
        for file in kernels.files
        for launch in file.module.launches
    ]
    notify(f"compiling {len(jobs)} kernel functions for sm_{arch}")
    # An empty batch still asks whether the architecture can be built for.
    batches = [jobs[start::WORKERS] for start in range(WORKERS) if jobs[start::WORKERS]] or [[]]
    with ThreadPoolExecutor(WORKERS) as pool:
        done = list(pool.map(lambda batch: _run_worker(batch, directory, arch), batches))
    cubins: dict[str, list[CubinRecord]] = {}
    for job in jobs:
        record = CubinRecord(job["function"], f"{job['stem']}.cubin", f"{job['stem']}.json")
        cubins.setdefault(job["source"], []).append(record)
    records = tuple(replace(record, cubins=tuple(cubins.get(record.file, ()))) for record in kernels.records())
    return records, [path for paths in done for path in paths]


def _run_worker(jobs: Sequence[dict[str, Any]], directory: Path, arch: int) -> list[str]:
    """One worker for a batch: jobs go in as JSON on stdin, a line of JSON comes back for each file set written."""
    request = json.dumps({"directory": str(directory.resolve()), "arch": arch, "jobs": list(jobs)})
    # -P: the worker's folder must not hide other packages.
    result = subprocess.run(
        [sys.executable, "-P", str(_WORKER)],
        input=request,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=compiler_environment(),
        check=False,
    )
    last = result.stderr.strip().splitlines()[-1:] or [f"worker ended with status {result.returncode}"]
    if result.returncode == _UNSUPPORTED:
        raise UsageError(last[0])
    if result.returncode != 0:
        raise CompileError(f"ahead-of-time build for sm_{arch} failed: {last[0]}")
    return [path for line in result.stdout.splitlines() if line.startswith("[") for path in json.loads(line)]
