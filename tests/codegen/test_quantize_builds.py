"""What sm_90a's compiler makes of the quantisers, the MXFP8 writers and indexers and the MXFP4 experts: no spills, wide
loads."""

import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from kimigraph.codegen import cross_compile_worker
from kimigraph.codegen.host_half import host_half
from kimigraph.codegen.kernel import KernelRequest, TensorSpec
from kimigraph.codegen.specialize import BUILDERS, lightning_indexer
from kimigraph.ir.descriptors import IndexKeyDescriptor, LatentDescriptor
from kimigraph.ir.env import compiler_environment
from kimigraph.ir.errors import CompileError

TARGET = "cuda:sm_90"


def tensor(*shape, dtype="bfloat16"):
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return TensorSpec(shape, tuple(strides[: len(shape)]), dtype)


def keys(rotation=None):
    return {"descriptor": str(IndexKeyDescriptor("paged", "float8_e4m3fn", 128, 64, "e8m0", 32, rotation))}


def indexer(batch=8, total=32768, tokens=1, heads=64, inside=False, paged=True, mask=False):
    tensors = {
        "q": tensor(batch, tokens, heads, 128, dtype="bfloat16" if inside else "uint8"),
        "keys": tensor(batch * total // 64, 64, 132, dtype="uint8"),
        "weights": tensor(batch, tokens, heads, dtype="float32"),
        "lengths": tensor(batch, dtype="int32"),
        "mask": tensor(batch, tokens, total, dtype="bool") if mask else None,
        "block_table": tensor(batch, total // 64, dtype="int32"),
        "q_scales": None if inside else tensor(batch, tokens, heads, 4, dtype="uint8"),
    }
    attributes = {"k": 2048, "scale": 0.088, "quantises_q": inside, **keys()}
    if not paged:
        tensors |= {"keys": tensor(batch, total, 132, dtype="uint8"), "block_table": None}
        attributes["descriptor"] = str(IndexKeyDescriptor("contiguous", "float8_e4m3fn", 128, 0, "e8m0", 32))
    return KernelRequest("lightning_indexer", tensors, attributes, TARGET)


def latents():
    form = LatentDescriptor("contiguous", "float8_e4m3fn", 512, 64, 0, 1, 128, "rope_scales", "amax")
    names = ("latent", "rope", "values", "rope_values", "positions", "cos", "sin", "block_table", "norm_weight")
    given = {
        "latent": tensor(8, 4096, form.row, dtype="uint8"),
        "values": tensor(8, 1, 512),
        "rope_values": tensor(8, 1, 64),
        "positions": tensor(8, 1, dtype="int64"),
        "norm_weight": tensor(512),
    }
    attributes = {"rope_style": "none", "norm_eps": 1e-5, "descriptor": str(form)}
    return KernelRequest("latent_write", {name: given.get(name) for name in names}, attributes, TARGET)


def writer(rotation):
    tensors = {
        "keys": tensor(512, 64, 132, dtype="uint8"),
        "values": tensor(8, 1, 128),
        "positions": tensor(8, 1, dtype="int64"),
        "norm_weight": tensor(128),
        "norm_bias": tensor(128),
        "cos": None,
        "sin": None,
        "block_table": tensor(8, 64, dtype="int32"),
    }
    attributes = {"norm_eps": 1e-6, "rope_style": "none", **keys(rotation)}
    return KernelRequest("index_key_write", tensors, attributes, TARGET)


def experts(tokens, width=1152, inner=1024, count=256):
    tensors = {
        "x": tensor(tokens, width),
        "logits": tensor(tokens, count, dtype="float32"),
        "bias": tensor(count, dtype="float32"),
        "gate_up": tensor(count, 2 * inner, width // 32 * 17, dtype="uint8"),
        "down": tensor(count, width, inner // 32 * 17, dtype="uint8"),
        "norm_weight": tensor(width),
        "up": tensor(2 * width, width),
        **dict.fromkeys(("shared_gate", "shared_up", "shared_down", "residual")),
    }
    attributes = {"picks": 8, "renormalize": True, "scale": 1.0, "groups": 1, "group_picks": 1, "eps": 1e-5}
    attributes |= {"activation": "situ", "beta": 4.0, "linear_beta": 25.0, "limit": None}
    return KernelRequest("moe_experts", tensors, attributes, TARGET)


def quantiser(name, *shape, **attributes):
    return KernelRequest(name, {"x": tensor(*shape)}, attributes, TARGET)


REQUESTS = {
    "mxfp8": quantiser("mxfp8_quantize", 8192, 7168, group=32, rounding="rceil", rotate=False),
    "fp8": quantiser("fp8_quantize", 8192, 7168, tile=128, scales="power2", rotate=False),
    "rotated": quantiser("mxfp8_quantize", 8, 1, 64, 128, group=32, rounding="rceil", rotate=True),
    "plain_indexer": indexer(mask=True, inside=True),
    "indexer": indexer(64, 8192),
    "indexer_few_keys": indexer(),
    "indexer_fewer": indexer(1, 8192),
    "indexer_quantises": indexer(64, 8192, heads=128, inside=True, paged=False),
    "indexer_prompt": indexer(1, 8192, tokens=512, inside=True),
    "latents": latents(),
    "writer": writer(None),
    "writer_rotates": writer("hadamard"),
    "experts": experts(1),
    "experts_listed": experts(64),
}


FORMS = {
    **dict.fromkeys(("indexer", "indexer_few_keys", "indexer_fewer", "indexer_quantises"), "groups"),
    "indexer_prompt": "group slabs",
}


def module_of(name, request):
    if name in FORMS:
        return lightning_indexer.build(request, form=FORMS[name])
    return BUILDERS[request.op](request)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cubins")
    jobs = []
    for name, request in REQUESTS.items():
        module = module_of(name, request)
        (directory / f"{name}.py").write_text(module.text, encoding="utf-8")
        for launch in module.launches:
            jobs.append({"source": f"{name}.py", "stem": f"{name}.{launch.function}", "arch": 90, **asdict(launch)})
    text = "\n".join(json.dumps(part) for part in ({"directory": str(directory), "arch": 90}, *jobs))
    command = [sys.executable, "-P", cross_compile_worker.__file__]
    subprocess.run(command, input=text, text=True, check=True, env=compiler_environment(), stdout=subprocess.DEVNULL)
    return directory


def instructions(directory, stem):
    command = [cross_compile_worker.tool("cuobjdump"), "-sass", str(directory / f"{stem}.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


SPILLS = {  # bytes a thread
    "plain_indexer.score_keys": 192,
    "indexer_prompt.select_codes": 192,
    "indexer.score_group_rows": 40,  # once a program, not once a tile
    "indexer_few_keys.score_group_rows": 24,
}


@pytest.mark.parametrize("name", REQUESTS)
def test_little_is_spilled(built, name):
    for path in built.glob(f"{name}.*.json"):
        assert json.loads(path.read_text())["stack_bytes"] <= SPILLS.get(path.stem, 0), path.name


@pytest.mark.parametrize("name", ["mxfp8", "fp8"])
def test_input_is_read_16_bytes_at_a_time(built, name):
    loads = [line for line in instructions(built, f"{name}.quantize_groups").splitlines() if "LDG" in line]
    assert loads and all(".128" in line for line in loads)


def test_a_code_of_e4m3_is_not_read_by_the_kernel_that_made_it(built):
    """What ptxas 12.8 makes of that has a register in it that nobody wrote."""
    for stem in ("indexer_prompt.real_queries", "plain_indexer.score_keys"):
        assert "F2FP.SATFINITE.E4M3" not in instructions(built, stem)


@pytest.mark.parametrize("name", ["experts.open_packed", "experts.close_packed", "experts_listed.open_groups"])
def test_codes_of_mxfp4_come_16_bytes_at_a_time_and_become_bf16_two_by_two(built, name):
    code = instructions(built, name)
    assert "LDGSTS.E.BYPASS.128" in code and "HMUL2.BF16" in code and "HGMMA" in code
    assert "LDL" not in code and "F2FP.BF16.F32" not in code.split("HGMMA")[0]


def test_the_plain_mxfp8_indexer_multiplies_in_bf16(built):
    code = instructions(built, "plain_indexer.score_keys")
    assert "HGMMA" in code and "HMMA" not in code


@pytest.mark.parametrize(
    ("name", "converts", "programs", "warps"),
    [
        ("indexer", "F2FP.F16.E4M3.UNPACK", 1, 20),
        ("indexer_few_keys", "HMUL2.BF16", 1, 20),
        ("indexer_fewer", "HMUL2.BF16", 4, 8),
        ("indexer_quantises", "HMUL2.BF16", 2, 8),
    ],
)
def test_the_mxfp8_indexer_feeds_products_from_registers(built, name, converts, programs, warps):
    """Keys come by bulk copies and never go back to shared memory; a stage is given back behind its products."""
    code = instructions(built, f"{name}.score_group_rows")
    assert "UTMALDG" in code and "HGMMA" in code and "QGMMA" not in code and converts in code
    behind = [part.split("HGMMA")[0] for part in code.split("WARPGROUP.DEPBAR")[1:]]
    assert sum("SYNCS.ARRIVE" in part for part in behind) == warps // 4 - 1
    taken = json.loads((built / f"{name}.score_group_rows.json").read_text())
    # So many programs fit a multiprocessor. Warps are allotted by fours, of which the last fetch.
    assert programs * warps * 32 * taken["registers"] <= 65536
    assert programs * (taken["shared_memory"] + 1024) <= 228 * 1024


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (indexer(), "groups"),
        (indexer(inside=True), "groups"),
        (indexer(2, tokens=4, paged=False), "groups"),
        (indexer(1, tokens=64), "group slabs"),
        (indexer(mask=True), ""),
        (indexer(heads=24), ""),
        (indexer(total=32800, paged=False), ""),
        (replace(indexer(), target="cuda:sm_80"), ""),
    ],
)
def test_which_form_of_the_mxfp8_indexer_wins(request_, name):
    forms = {each: lightning_indexer.FORMS[each] for each in ("group slabs", "groups")}
    assert next((each for each, form in forms.items() if form.serves(request_) and form.wins(request_)), "") == name
    others = (form for each, form in lightning_indexer.FORMS.items() if each not in forms)
    assert not any(form.serves(request_) for form in others)


@pytest.mark.parametrize("name", REQUESTS)
def test_launches_need_no_triton(name):
    text = host_half("kernel_0", module_of(name, REQUESTS[name]).text)
    assert "def launch(" in text and "import triton" not in text


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (quantiser("mxfp8_quantize", 2, 16384, group=16384, rounding="rceil", rotate=False), "group of 16384"),
        (quantiser("fp8_quantize", 2, 2048, tile=128, scales="amax", rotate=True), "rows of 2048"),
    ],
)
def test_what_no_kernel_serves_is_refused(request_, complaint):
    with pytest.raises(CompileError, match=complaint):
        BUILDERS[request_.op](request_)
