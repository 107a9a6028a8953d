"""What sm_90a's compiler makes of kernels of several ranks: sums, gathers, picks that are scored and exchanged."""

import ast
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from kernel_requests import PACKED_KEYS, tensor

from kimigraph.codegen import cross_compile_worker
from kimigraph.codegen.host_half import host_half
from kimigraph.codegen.kernel import KernelModule, KernelRequest
from kimigraph.codegen.specialize import BUILDERS
from kimigraph.ir.env import compiler_environment

TARGET = "cuda:sm_90"


def candidates(each: int, k: int, ways: int) -> KernelRequest:
    given = {"scores": tensor(8, 1, each, dtype="float32"), "places": tensor(8, 1, each, dtype="int32")}
    return KernelRequest("exchange_picks", given, {"k": k, "ways": ways, "run": 64, "group": "kimigraph.sp"}, TARGET)


def between_ranks(op: str, *shape: int, dtype="bfloat16", ways=2, **attributes: int) -> KernelRequest:
    given = {"addend" if op == "rank_sum" else "part": tensor(*shape, dtype=dtype)}
    return KernelRequest(op, given, {**attributes, "ways": ways, "group": "kimigraph.tp"}, TARGET)


def picked(q="bfloat16", keys="bfloat16", paged=False, tokens=1, total=32768) -> KernelRequest:
    batch, width = 8, 132 if keys == "uint8" else 128
    paged = paged or keys == "uint8"
    tensors = {
        "q": tensor(batch, tokens, 64, 128, dtype=q),
        "keys": tensor(*((batch * total // 64, 64) if paged else (batch, total)), width, dtype=keys),
        "weights": tensor(batch, tokens, 64, dtype="float32"),
        "picks": tensor(batch, tokens, 2048, dtype="int32"),
        "block_table": tensor(batch, total // 64, dtype="int32") if paged else None,
        "q_scales": None,
    }
    descriptor = PACKED_KEYS if keys == "uint8" else ""
    return KernelRequest(
        "index_scores", tensors, {"scale": 0.088, "quantises_q": False, "descriptor": descriptor}, TARGET
    )


REQUESTS = {
    "exchange": candidates(2048, 2048, 2),
    "exchange_four": candidates(300, 512, 4),
    "sum": between_ranks("rank_sum", 64, 1, 2304),
    "sum_fp32": between_ranks("rank_sum", 8, 1, 2304, dtype="float32", ways=4),
    "gather": between_ranks("rank_gather", 64, 1, 81920, dim=2),
    "gather_picks": between_ranks("rank_gather", 32, 1, 2048, dtype="int32", dim=0, ways=8),
    "picked": picked(),
    "picked_paged": picked(paged=True, tokens=2),
    "picked_packed": picked("float8_e4m3fn", "uint8"),
    "picked_packed_bf16": picked("bfloat16", "uint8"),
    "picked_fp32": picked("float32", "float32"),
}
BETWEEN_RANKS = [name for name in REQUESTS if name.startswith(("sum", "gather"))]
BY_WARP_GROUPS = [name for name in REQUESTS if name.startswith("picked") and name != "picked_fp32"]


@pytest.mark.parametrize("name", REQUESTS)
def test_every_kernel_can_be_launched_without_triton(name: str) -> None:
    request = REQUESTS[name]
    text = host_half("kernel_0", BUILDERS[request.op](request).text)
    assert "def launch(" in text and "import triton" not in text
    ast.parse(text)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, KernelModule]]:
    """All requests compiled by one worker process: ``<directory>/<request>.<function>.{cubin,json}``."""
    directory = tmp_path_factory.mktemp("cubins")
    modules = {name: BUILDERS[request.op](request) for name, request in REQUESTS.items()}
    parts = [json.dumps({"directory": str(directory), "arch": 90})]
    for name, module in modules.items():
        (directory / f"{name}.py").write_text(module.text, encoding="utf-8")
        for launch in module.launches:
            job = {"source": f"{name}.py", "stem": f"{name}.{launch.function}", "arch": 90, **asdict(launch)}
            parts.append(json.dumps(job))
    command = [sys.executable, "-P", cross_compile_worker.__file__]
    given = {"text": True, "check": True, "env": compiler_environment(), "stdout": subprocess.DEVNULL}
    subprocess.run(command, input="\n".join(parts), **given)
    return directory, modules


def usage(built, name: str) -> dict:
    (launch,) = built[1][name].launches
    return json.loads((built[0] / f"{name}.{launch.function}.json").read_text())


def instructions(built, name: str) -> str:
    (launch,) = built[1][name].launches
    command = [cross_compile_worker.tool("cuobjdump"), "-sass", str(built[0] / f"{name}.{launch.function}.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", REQUESTS)
def test_registers_hold_what_a_thread_works_on(built, name):
    assert usage(built, name)["stack_bytes"] == 0


@pytest.mark.parametrize("name", BETWEEN_RANKS)
def test_ranks_write_and_read_16_bytes_at_a_time(built, name):
    wide = [line for line in instructions(built, name).splitlines() if "STG" in line or "LDG" in line]
    # One number a program says which round it is in; each rank's address is read alone.
    narrow = [line for line in wide if ".128" not in line and "STG" in line]
    assert sum(".128" in line for line in wide) >= 4 and len(narrow) <= 1


@pytest.mark.parametrize("name", BY_WARP_GROUPS)
def test_picks_are_scored_by_warp_groups_and_five_programs_fit_a_multiprocessor(built, name):
    code, taken = instructions(built, name), usage(built, name)
    assert "HGMMA" in code and "HMMA" not in code
    assert 5 * taken["num_warps"] * 32 * taken["registers"] <= 65536
    assert 5 * (taken["shared_memory"] + 1024) <= 228 * 1024


def test_fp32_picks_keep_their_bits(built):
    """No tensor core product: those would round the operands to TF32."""
    code = instructions(built, "picked_fp32")
    assert "GMMA" not in code and "HMMA" not in code and "FFMA" in code
