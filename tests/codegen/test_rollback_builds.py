"""The kernels that verify drafts, fold what was accepted or log states, compiled for Hopper: forms and registers."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from kimigraph.codegen import cross_compile_worker
from kimigraph.codegen.kernel import KernelRequest, TensorSpec
from kimigraph.codegen.specialize import BUILDERS
from kimigraph.ir.env import compiler_environment
from kimigraph.ir.errors import CompileError

HEADS, SIDE, CHANNELS = 32, 128, 3 * 32 * 128
ATTRIBUTES = {"scale": 0.088, "l2_eps": 1e-6, "lower_bound": -5.0, "norm_eps": 1e-5, "state_layout": "vk"}


def tensor(*shape, dtype="bfloat16"):
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return TensorSpec(shape, tuple(strides), dtype)


def verifying(op="kda_verify", tokens=8):
    """A token and drafts of 32 sequences."""
    rows = (32, tokens)
    kept = {"states": tensor(*rows, HEADS, SIDE, SIDE, dtype="float32")}
    if op == "kda_verify":
        kept = {name: tensor(*rows, HEADS, SIDE, dtype="float32") for name in ("keys", "decays", "deltas")}
    tensors = {
        "qkv": tensor(*rows, CHANNELS),
        "conv_weight": tensor(CHANNELS, 4),
        "conv_state": tensor(32, CHANNELS, 3),
        "gate": tensor(*rows, HEADS * SIDE),
        "dt_bias": tensor(HEADS * SIDE, dtype="float32"),
        "a_log": tensor(HEADS, dtype="float32"),
        "beta": tensor(*rows, HEADS),
        "state": tensor(32, HEADS, SIDE, SIDE, dtype="float32"),
        **kept,
        "inputs": tensor(*rows, CHANNELS),
        "out_gate": tensor(*rows, HEADS, SIDE),
        "norm_weight": tensor(SIDE),
    }
    return KernelRequest(op, tensors, ATTRIBUTES, "cuda:sm_90")


def fold(tokens=8):
    rows = (6, 32)
    tensors = {
        "state": tensor(*rows, HEADS, SIDE, SIDE, dtype="float32"),
        "conv_state": tensor(*rows, CHANNELS, 3),
        **{name: tensor(*rows, tokens, HEADS, SIDE, dtype="float32") for name in ("keys", "decays", "deltas")},
        "inputs": tensor(*rows, tokens, CHANNELS),
        "accepted": tensor(32, dtype="int32"),
    }
    return KernelRequest("kda_replay", tensors, {"state_layout": "vk"}, "cuda:sm_90")


def as_kimi_linear(request):
    """States [H, K, V] and a convolution that keeps as many columns as it has taps, as models of transformers do."""
    tensors = dict(request.tensors)
    *rows, _ = tensors["conv_state"].shape
    tensors["conv_state"] = tensor(*rows, 4)
    attributes = dict(request.attributes) | {"state_layout": "kv"}
    if "lower_bound" in attributes:
        attributes["lower_bound"] = None
    return KernelRequest(request.op, tensors, attributes, request.target)


def logged(length=8):
    """A token of 32 sequences whose states are written with every eighth."""
    request = verifying(tokens=1)
    filled = {"filled": tensor(32, dtype="int32")}
    tensors = {name: spec for name, spec in request.tensors.items() if name != "inputs"}
    tensors |= {name: tensor(32, length, HEADS, SIDE, dtype="float32") for name in ("keys", "decays", "deltas")}
    last = {name: tensors.pop(name) for name in ("out_gate", "norm_weight")}
    return KernelRequest("kda_decode_logged", tensors | filled | last, ATTRIBUTES, "cuda:sm_90")


CASES = {  # request, form for heads of 128, bytes of spills a thread
    "verify": (verifying(), True, 16),
    "verify_two": (verifying(tokens=2), True, 0),
    "verify_nine": (verifying(tokens=9), True, 32),
    "verify_twelve": (verifying(tokens=12), False, 64),
    "verify_kimi_linear": (as_kimi_linear(verifying()), True, 80),
    "fold_kimi_linear": (as_kimi_linear(fold()), False, 0),
    "states": (verifying("kda_verify_states"), True, 0),
    "logged": (logged(), True, 16),
    "logged_seventeen": (logged(17), False, 0),
    "fold": (fold(), True, 0),
    "fold_seventeen": (fold(tokens=17), False, 0),
}


@pytest.fixture(scope="module")
def spills(tmp_path_factory):
    """Bytes that each case's kernel keeps outside registers."""
    directory = tmp_path_factory.mktemp("cubins")
    jobs = []
    for name, (request, _, _) in CASES.items():
        module = BUILDERS[request.op](request)
        (directory / f"{name}.py").write_text(module.text, encoding="utf-8")
        (launch,) = module.launches
        jobs.append({"source": f"{name}.py", "stem": name, "arch": 90, **asdict(launch)})
    text = "\n".join(json.dumps(part) for part in ({"directory": str(directory), "arch": 90}, *jobs))
    command = [sys.executable, "-P", cross_compile_worker.__file__]
    subprocess.run(
        command, input=text, text=True, check=True, env=compiler_environment(), stdout=subprocess.DEVNULL, timeout=280
    )
    return {name: json.loads(Path(directory, f"{name}.json").read_text())["stack_bytes"] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_forms_and_registers(spills, name):
    request, is_narrow, most = CASES[name]
    assert ("gluon" in BUILDERS[request.op](request).text) is is_narrow
    assert spills[name] <= most


@pytest.mark.parametrize("name", ["keys", "inputs"])
def test_records_that_are_not_contiguous_are_refused(name):
    request = verifying()
    spec = request.tensors[name]
    request.tensors[name] = TensorSpec(spec.shape, tuple(2 * step for step in spec.stride), spec.dtype)
    with pytest.raises(CompileError, match=f"{name} has the strides .* give a contiguous tensor"):
        BUILDERS[request.op](request)
