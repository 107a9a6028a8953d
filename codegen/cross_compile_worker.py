"""Worker of ``kimigraph.codegen.cross_compile``: compiles kernel files with Triton; a script without kimigraph.

Input: a JSON document ``{"directory", "arch", "jobs"}`` on the first line of stdin, then further jobs, one a line. A
job has ``source`` (a kernel file), ``stem`` (of the files to write), ``function``, ``signature``, ``constants``,
``divisible``, ``options`` and ``abi``. Output: a JSON list of the files written for each job, after an empty one. Exit
status 2: this Triton cannot build for the architecture; 1: a kernel does not compile. The last line of stderr then says
why.
"""

import json
import linecache
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, cast

UNSUPPORTED = 2
FILE = "kernels.py"


def main() -> int:
    """Compile all jobs of stdin; returns the exit status."""
    request = json.loads(sys.stdin.readline())
    directory, arch = Path(request["directory"]), request["arch"]
    supported = buildable_architectures()
    if arch not in supported:
        import triton

        names = ", ".join(f"sm_{number}" for number in supported)
        print(f"target cuda:sm_{arch}: Triton {triton.__version__} builds {names}; choose one of them", file=sys.stderr)
        return UNSUPPORTED
    print("[]", flush=True)
    modules: dict[str, ModuleType] = {}
    for job in chain(request.get("jobs", ()), map(json.loads, sys.stdin)):
        try:
            if job["source"] not in modules:
                modules[job["source"]] = import_file(directory / job["source"])
            written = compile_job(job, modules[job["source"]], directory)
        except Exception as error:
            reason = " ".join(str(innermost(error)).split())[-800:] or type(error).__name__
            print(f"{job['source']}, {job['function']}: {reason}", file=sys.stderr)
            return 1
        print(json.dumps(written), flush=True)
    return 0


def buildable_architectures() -> list[int]:
    """What both Triton's dot products and its own ptxas know."""
    text = subprocess.run([tool("ptxas"), "--help"], capture_output=True, text=True, check=True).stdout
    return sorted({int(number) for number in re.findall(r"'sm_(\d+)'", text)} - set(range(75)))


def tool(name: str) -> str:
    """A program that comes with Triton."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def import_file(path: Path) -> ModuleType:
    """The kernel file as a module, under one name for all.

    File and module names are part of a cubin, and Triton hands out one cubin for equal functions of two files: which
    file was compiled first must not show. Triton reads the functions' source through ``linecache``.
    """
    text = path.read_text(encoding="utf-8")
    linecache.cache[FILE] = len(text), None, text.splitlines(keepends=True), FILE
    module = ModuleType("kernels")
    module.__file__ = FILE
    sys.modules[module.__name__] = module
    exec(compile(text, FILE, "exec"), vars(module))
    return module


def compile_job(job: dict[str, Any], module: ModuleType, directory: Path) -> list[str]:
    """Write the cubin of one function and the JSON beside it; returns both paths, relative to the artifact."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(module, job["function"])
    names = function.arg_names
    signature = {name: job["signature"].get(name, "constexpr") for name in names}
    given = {*job["signature"], *job["constants"]}
    defaults = {item.name: item.default for item in function.params if item.has_default and item.name not in given}
    job["constants"] = {**job["constants"], **defaults}
    missing = [name for name in names if name not in job["signature"] and name not in job["constants"]]
    if missing:
        raise ValueError(f"no type and no constant for argument {missing[0]}")
    constants = {(names.index(name),): tuples(value) for name, value in job["constants"].items()}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in job["divisible"]}
    source_type = ASTSource
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source_type = GluonASTSource
    source = source_type(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", job["arch"], 32), options=job["options"])
    tiles = compiled.metadata.tensordesc_meta or []
    if any(tile is None for tile in tiles) or len(tiles) != sum(t.startswith("tensordesc") for t in signature.values()):
        raise ValueError(f"sm_{job['arch']} has no tensor memory accelerator, which the kernel's descriptors need")
    cubin, record = Path(f"{job['stem']}.cubin"), Path(f"{job['stem']}.json")
    (directory / cubin).write_bytes(compiled.asm["cubin"])
    document = describe(compiled, job, directory / cubin) | {"parameters": names, "tiles": tiles}
    text = json.dumps(document, indent=1, sort_keys=True)
    (directory / record).write_text(text + "\n", encoding="utf-8")
    return [cubin.as_posix(), record.as_posix()]


def tuples(value: Any) -> Any:
    """Constants such as strides are tuples, which JSON turned into lists."""
    return tuple(tuples(item) for item in cast("list[Any]", value)) if isinstance(value, list) else value


def innermost(error: BaseException) -> BaseException:
    """What a chain of errors began with: Triton wraps one for every call between kernel functions."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def describe(compiled: Any, job: dict[str, Any], cubin: Path) -> dict[str, Any]:
    """What a launcher needs to know of the cubin, and what it costs on the device."""
    metadata = compiled.metadata
    return {
        "abi": job.get("abi"),
        "entry": metadata.name,
        "arch": job["arch"],
        "arguments": job["signature"],
        "constants": job["constants"],
        "divisible": job["divisible"],
        "options": job["options"],
        "shared_memory": metadata.shared,
        "num_warps": metadata.num_warps,
        "num_ctas": metadata.num_ctas,
        "launch_cooperative_grid": getattr(metadata, "launch_cooperative_grid", False),
        "launch_pdl": getattr(metadata, "launch_pdl", False),
        "global_scratch_size": getattr(metadata, "global_scratch_size", 0),
        "profile_scratch_size": getattr(metadata, "profile_scratch_size", 0),
        **resource_usage(cubin),
    }


def resource_usage(cubin: Path) -> dict[str, int]:
    """Registers and stack bytes (spills live there) as the cubin records them."""
    command = [tool("cuobjdump"), "--dump-resource-usage", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": found.get("REG", 0), "stack_bytes": found.get("STACK", 0) + found.get("LOCAL", 0)}


if __name__ == "__main__":
    sys.exit(main())
