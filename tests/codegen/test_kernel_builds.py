"""Kernel texts, and what sm_90a's compiler makes of them at the widths of Kimi K3.1: registers, spills, products."""

import ast
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from kernel_requests import (
    attention,
    convolution,
    delta,
    dense_attention,
    experts,
    indexer,
    packed_attention,
    packed_indexer,
    prefill,
    residual,
)

from kimigraph.codegen import cross_compile_worker
from kimigraph.codegen.host_half import host_half
from kimigraph.codegen.kernel import KernelModule, KernelRequest
from kimigraph.codegen.specialize import BUILDERS, kda_prefill, lightning_indexer
from kimigraph.ir.env import compiler_environment
from kimigraph.ir.errors import CompileError

TEMPLATES = sorted((Path(cross_compile_worker.__file__).parent / "templates").glob("[a-z]*.py"))


REQUESTS = {
    "indexer": indexer(),
    "indexer_paged": indexer(paged=True),
    "indexer_two_tokens": indexer(tokens=2),
    "indexer_fp32": indexer(dtype="float32"),
    "attention_h64_b1": attention(),
    "attention_h32_b64": attention(batch=64, heads=32),
    "attention_h64_paged": attention(batch=8, paged=True),
    "attention_fp32": attention(dtype="float32"),
    "attention_dense": dense_attention(8, target="cpu"),
    "indexer_split_b1_short": packed_indexer(1, 8192),
    "indexer_split": packed_indexer(1, 131072),
    "indexer_split_b64": packed_indexer(64, 131072),
    "indexer_split_bf16": replace(indexer(), target="cuda:sm_90"),
    "indexer_prompt_short": packed_indexer(1, 8192, tokens=8192),
    "indexer_prompt": packed_indexer(1, 32768, tokens=8192),
    "attention_warps": packed_attention(1),
    "attention_warps_b64": packed_attention(64, 128),
    "attention_warps_bf16": replace(attention(batch=8, paged=True), target="cuda:sm_90"),
    "attention_warps_dense": dense_attention(8),
    "attention_warps_dense_fp8": dense_attention(64, packed=True),
    "kda_vk": delta(),
    "kda_kv": delta(layout="kv", lower_bound=None),
    "kda_four_tokens": delta(tokens=4),
    "kda_gluon_b1": delta(target="cuda:sm_90"),
    "kda_gluon_b64": delta(batch=64, target="cuda:sm_90"),
    "kda_gluon_four_tokens": delta(tokens=4, lower_bound=None, target="cuda:sm_90"),
    "prefill": prefill(),
    "prefill_wide": prefill(heads=96),
    "prefill_packed": prefill(sequences=8),
    "prefill_unbounded": prefill(raw=False, lower_bound=None),
    "prefill_plain": prefill(target="cpu"),
    "residual_b1_2": residual(1, 2),
    "residual_b1_9": residual(1, 9),
    "residual_b64_2": residual(64, 2),
    "residual_b64_5": residual(64, 5),
    "residual_b64_9": residual(64, 9),
    "residual_many_2": residual(8192, 2),
    "residual_many_5": residual(8192, 5),
    "residual_many_9": residual(8192, 9),
    "residual_history": residual(64, 8, op="attention_residual_history"),
    "residual_merge": residual(64, 1, op="attention_residual_merge"),
    "short_conv": convolution(),
    "experts_b1": experts(1),
    "experts_b1_bare": experts(1, follows=False),
    "experts_b8": experts(8),
    "experts_b64": experts(64, follows=False),
    "experts_b1024": experts(1024, follows=False),
    "experts_prompt": experts(8192, follows=False),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_every_kernel_can_be_launched_without_triton(name: str) -> None:
    text = host_half("kernel_0", module_of(name).text)
    assert "def launch(" in text and "import triton" not in text
    ast.parse(text)


def module_of(name: str) -> KernelModule:
    request = REQUESTS[name]
    if name.startswith("indexer_split"):
        return lightning_indexer.build(request, form="two launches")
    return BUILDERS[request.op](request)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, KernelModule]]:
    """All requests compiled by two worker processes: ``<directory>/<request>.<function>.{cubin,json}``."""
    directory = tmp_path_factory.mktemp("cubins")
    modules = {name: module_of(name) for name in REQUESTS}
    modules["prefill_deltas"] = kda_prefill.build(prefill(), deltas=True)
    modules["indexer_one_launch"] = lightning_indexer.build(packed_indexer(1), splits=512)
    jobs: list[dict[str, Any]] = []
    for name, module in modules.items():
        (directory / f"{name}.py").write_text(module.text, encoding="utf-8")
        for launch in module.launches:
            jobs.append({"source": f"{name}.py", "stem": f"{name}.{launch.function}", "arch": 90, **asdict(launch)})
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda part: compile_all(part, directory), (jobs[::2], jobs[1::2])))
    return directory, modules


def compile_all(jobs: list[dict[str, Any]], directory: Path) -> None:
    command = [sys.executable, "-P", cross_compile_worker.__file__]
    text = "\n".join(json.dumps(part) for part in ({"directory": str(directory), "arch": 90}, *jobs))
    subprocess.run(command, input=text, text=True, check=True, env=compiler_environment(), stdout=subprocess.DEVNULL)


def usage(built: tuple[Path, dict[str, KernelModule]], name: str, function: str) -> dict:
    return json.loads((built[0] / f"{name}.{function}.json").read_text())


def instructions(built: tuple[Path, dict[str, KernelModule]], name: str, function: str) -> str:
    command = [cross_compile_worker.tool("cuobjdump"), "-sass", str(built[0] / f"{name}.{function}.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


SPILLS = {  # bytes a thread
    "indexer_split_b64": 24,
    "indexer_prompt_short": 96,  # 32 codes a thread; sixteen warps are slower
    "attention_warps_b64": 48,
    "attention_warps_dense_fp8": 48,
    "residual_many_9": 40,  # two programs a multiprocessor are worth more
    "kda_kv": 144,
    "kda_four_tokens": 64,
    "kda_gluon_b1": 48,
    "kda_gluon_b64": 48,
    "prefill": 192,
    "prefill_wide": 192,
    "prefill_packed": 320,
    "prefill_unbounded": 2400,
    "prefill_plain": 448,
}


@pytest.mark.parametrize("name", REQUESTS)
def test_registers_hold_what_a_thread_works_on(built, name):
    for launch in built[1][name].launches:
        assert usage(built, name, launch.function)["stack_bytes"] <= SPILLS.get(name, 0)


@pytest.mark.parametrize("name", [name for name in REQUESTS if name.startswith("residual")])
def test_residuals_are_read_in_pieces_of_16_bytes(built, name):
    (launch,) = built[1][name].launches
    loads = [line for line in instructions(built, name, launch.function).splitlines() if "LDG" in line]
    scalars = sum(".128" not in line for line in loads)
    assert loads and scalars <= (1 if name == "residual_merge" else 0), "the merge reads one number besides"


@pytest.mark.parametrize("name", ["indexer", "indexer_paged", "indexer_two_tokens"])
def test_scores_use_warp_group_products_and_leave_room_for_four_programs(built, name):
    code = instructions(built, name, "score_keys")
    assert "HGMMA" in code and "HMMA" not in code
    scores = usage(built, name, "score_keys")
    assert scores["registers"] <= 128
    assert scores["shared_memory"] <= 56 * 1024 or name == "indexer_two_tokens"


@pytest.mark.parametrize("name", ["attention_h64_b1", "attention_h32_b64", "attention_h64_paged"])
def test_attention_uses_warp_group_products(built, name):
    code = instructions(built, name, "attend_split")
    assert "HGMMA" in code and "HMMA" not in code
    assert usage(built, name, "attend_split")["shared_memory"] <= 227 * 1024


def test_four_programs_of_the_one_launch_indexer_fit_a_multiprocessor(built):
    assert len(built[1]["indexer_one_launch"].launches) == 1
    taken = usage(built, "indexer_one_launch", "index_and_select")
    assert taken["launch_cooperative_grid"] and taken["stack_bytes"] == 0
    assert taken["registers"] <= 128 and taken["shared_memory"] <= 56 * 1024
    code = instructions(built, "indexer_one_launch", "index_and_select")
    assert "UTMALDG" in code and "QGMMA" in code


@pytest.mark.parametrize("name", ["indexer_prompt_short", "indexer_prompt"])
def test_a_prompt_is_scored_by_warp_groups_and_selected_from_at_two_programs_a_multiprocessor(built, name):
    assert [launch.function for launch in built[1][name].launches] == ["score_prompt", "select_codes"]
    assert "QGMMA" in instructions(built, name, "score_prompt")
    taken = usage(built, name, "select_codes")
    assert 2 * taken["num_warps"] * 32 * taken["registers"] <= 65536


SPLIT_INDEXERS = [name for name in REQUESTS if name.startswith("indexer_split")]


def selection_of(name):
    """Few codes are looked at where the row is long beside the picks and alone, or the rows are many."""
    return "select_bounded" if name in ("indexer_split", "indexer_split_b64") else "select_codes"


@pytest.mark.parametrize("name", SPLIT_INDEXERS)
def test_four_programs_that_score_fit_a_multiprocessor(built, name):
    assert [launch.function for launch in built[1][name].launches] == ["score_rows", selection_of(name)]
    taken = usage(built, name, "score_rows")
    # Four warps multiply and one fetches; warps are allotted by fours.
    assert taken["launch_pdl"] and not taken["launch_cooperative_grid"]
    assert 4 * 8 * 32 * taken["registers"] <= 65536
    programs = 4 if not name.endswith("bf16") else 2
    assert programs * (taken["shared_memory"] + 1024) <= 228 * 1024
    code = instructions(built, name, "score_rows")
    assert "UTMALDG" in code and ("HGMMA" if name.endswith("bf16") else "QGMMA") in code


@pytest.mark.parametrize("name", SPLIT_INDEXERS)
def test_programs_that_select_count_in_shared_memory_and_run_at_once(built, name):
    launch = built[1][name].launches[1]
    taken = usage(built, name, selection_of(name))
    # A cluster, which runs at once by itself.
    assert taken["launch_pdl"] and not taken["launch_cooperative_grid"]
    assert taken["num_ctas"] == launch.constants["CTAS"]
    assert taken["num_warps"] * 32 * taken["registers"] <= 65536
    code = instructions(built, name, selection_of(name))
    assert "ATOMS.POPC.INC" in code and "REDUX" in code


def test_the_chosen_form_is_told(built):
    module = built[1]["indexer_split"]
    assert module.route.startswith("two launches: 512 programs a row score, ") and module.route in module.text


@pytest.mark.parametrize("name", [name for name in REQUESTS if name.startswith("attention_warps")])
def test_attention_by_specialised_warps(built, name):
    """Warp-group products alone; each kind of warp has its own share of the registers."""
    launches = built[1][name].launches
    assert len(launches) == 1
    taken = usage(built, name, "attend_with_warps")
    shared = launches[0].constants["SPLITS"] > 1
    assert taken["launch_cooperative_grid"] == shared and taken["shared_memory"] <= 227 * 1024
    code = instructions(built, name, "attend_with_warps")
    assert "HGMMA" in code and "HMMA." not in code.replace("HGMMA", "") and "USETMAXREG" in code
    # Rows of bf16 go to shared memory as they are; others through registers.
    packed = launches[0].signature["latent"] == "*u8"
    assert ("LDGSTS.E.BYPASS.128" in code) != packed and ("HFMA2.BF16" in code) == packed


def test_gathered_rows_are_copied_in_16_byte_pieces(built):
    assert "LDGSTS.E.BYPASS.128" in instructions(built, "attention_h32_b64", "attend_split")


@pytest.mark.parametrize("name", ["indexer_fp32", "attention_fp32"])
def test_fp32_operands_keep_their_bits(built, name):
    """No tensor core product: those would round the operands to TF32."""
    code = instructions(built, name, "score_keys" if name == "indexer_fp32" else "attend_split")
    assert "GMMA" not in code and "HMMA" not in code and "FFMA" in code


def test_two_delta_steps_share_an_sm(built):
    assert all(usage(built, name, "kda_step")["registers"] <= 128 for name in ("kda_vk", "kda_kv"))


@pytest.mark.parametrize("name", ["kda_vk", "kda_gluon_b1", "kda_gluon_b64"])
def test_state_moves_in_16_byte_pieces(built, name):
    code = instructions(built, name, "kda_step")
    assert "LDG.E" in code and ".128" in code and "STG.E" in code


@pytest.mark.parametrize("name", ["prefill", "prefill_wide", "prefill_packed", "prefill_deltas"])
def test_prefill_uses_warp_group_products_and_bulk_copies(built, name):
    for function in ("prepare_chunks_in_shared", "scan_chunks"):
        code = instructions(built, name, function)
        assert "HGMMA" in code and "HMMA" not in code
    scan = instructions(built, name, "scan_chunks")
    assert "UTMALDG" in scan and "UTMASTG" in scan
    prepare = usage(built, name, "prepare_chunks_in_shared")
    # Three programs an SM, and one or two of the other launch.
    assert prepare["registers"] <= 168 and 3 * (prepare["shared_memory"] + 1024) <= 228 * 1024
    programs = 2 if name in ("prefill_wide", "prefill_packed") else 1
    assert programs * (usage(built, name, "scan_chunks")["shared_memory"] + 1024) <= 228 * 1024


@pytest.mark.parametrize("name", ["prefill", "prefill_packed", "prefill_unbounded"])
def test_products_of_the_scan_overlap(built, name):
    """A compiler that gives up on that waits after every single product."""
    lines = instructions(built, name, "scan_chunks").splitlines()
    waits = [line for line in lines if "WARPGROUP.DEPBAR" in line]
    assert 0 < len(waits) < sum("HGMMA" in line for line in lines) / 2


@pytest.mark.parametrize(
    ("name", "functions"),
    [
        ("experts_b64", ("open_groups", "close_groups")),
        ("experts_b1024", ("open_groups", "close_groups")),
        ("experts_prompt", ("open_rows", "close_rows")),
    ],
)
def test_experts_of_many_tokens_use_warp_group_products(built, name, functions):
    for function in functions:
        text = instructions(built, name, function)
        assert "HGMMA" in text and "HMMA.16816" not in text
        assert usage(built, name, function)["shared_memory"] <= 227 * 1024


def test_tiles_of_a_prompt_and_weights_of_one_token_come_by_descriptors(built):
    for name in ("experts_b1", "experts_b1_bare"):
        assert "UTMALDG" in instructions(built, name, "stream_experts")
        assert usage(built, name, "stream_experts")["launch_cooperative_grid"]
    assert "UTMALDG" in instructions(built, "experts_prompt", "open_rows")


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_masked_loads_name_what_absent_lanes_hold(path):
    loads = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.load", "gl.load")
    ]
    for load in loads:
        given = {keyword.arg for keyword in load.keywords}
        assert len(load.args) == 1 and ("mask" in given) == ("other" in given), f"{path.name}:{load.lineno}"


@pytest.mark.parametrize(
    "name", ["indexer_paged", "attention_h64_b1", "kda_vk", "kda_gluon_b1", "prefill", "prefill_plain", "short_conv"]
)
def test_texts_stand_alone(name):
    text = BUILDERS[REQUESTS[name].op](REQUESTS[name]).text
    assert text == BUILDERS[REQUESTS[name].op](REQUESTS[name]).text
    tree = ast.parse(text)
    imported = {
        module.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    }
    assert imported == {"typing", "torch", "triton"}
    assigned = next(node for node in tree.body if isinstance(node, ast.AnnAssign))
    assert assigned.value is not None and ast.literal_eval(assigned.value)


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (attention(width=4096), "latent of 4096 columns"),
        (delta(side=512), "state of 512 x 512"),
        (indexer(dtype="float64"), "q is float64"),
        (KernelRequest("sparse_attention", {**attention().tensors, "indices": None}, {"scale": 1.0}), "'indices'"),
    ],
)
def test_what_no_kernel_serves_is_refused(request_, complaint):
    with pytest.raises(CompileError, match=complaint):
        BUILDERS[request_.op](request_)


@pytest.mark.parametrize("request_", [prefill(dtype="float32"), prefill(dtype="float16"), prefill(lower_bound=None)])
def test_prefill_on_a_gpu_takes_any_operands(request_):
    """What the form in shared memory does not serve has the one for any size and device."""
    assert BUILDERS["kda_prefill"](request_).launches[0].function == "prepare_chunks"


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, 16), (8, 8), (64, 16)])
def test_rows_in_fp8_are_not_taken_apart_by_the_plain_kernel(batch, heads):
    """It takes 47 times as long (16 heads, 16 rows of 2,048 picks on an H200)."""
    assert "'route': 'specialised warps" in BUILDERS["sparse_attention"](packed_attention(batch, heads)).text


@pytest.mark.parametrize(("batch", "heads", "warps"), [(1, 16, False), (8, 16, False), (16, 16, True), (1, 17, True)])
def test_few_heads_of_few_rows_in_bf16_take_the_plain_kernel(batch, heads, warps):
    request = replace(attention(batch=batch, heads=heads), target="cuda:sm_90")
    assert ("'route': 'specialised warps" in BUILDERS["sparse_attention"](request).text) is warps


@pytest.mark.parametrize(("rows", "ctas"), [(1, 16), (8, 8), (16, 4), (32, 2), (64, 2)])
def test_half_of_the_device_selects_as_long_as_a_row_has_two_programs(rows, ctas):
    route = BUILDERS["lightning_indexer"](packed_indexer(rows, 131072)).route
    assert f" {ctas} select" in route and ("few codes" in route) is (rows in (1, 32, 64))
