"""Verification and fold on the GPU: the interpreter's cases, full width to the bit, counts that graphs read anew."""

import importlib.util
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

_PATH = Path(__file__).parents[1] / "interpreter" / "test_kernel_kda_replay.py"
_SPEC = importlib.util.spec_from_file_location("cases_kda_replay", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
CASES = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(CASES)
globals().update({name: test for name, test in vars(CASES).items() if name.startswith("test_")})


@pytest.fixture(params=["cpu", "cuda"])
def target(request):
    """The form for any size ("cpu" has no other) and the one for heads of 128."""
    return request.param


@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("tokens", [2, 8, 9, 12])
def test_folds_at_width_are_decoding_to_the_bit(kernel, target, layout, tokens):
    operands = CASES.operands_of(5, 2, 12, tokens, 32, 128, 128, layout, torch.bfloat16)
    operands = CASES.on("cuda", operands)
    counts, attributes = [row % (tokens + 1) for row in range(12)], CASES.attributes_of(layout)
    log = CASES.empty_log(operands, layout)
    outs = [CASES.verify(kernel, operands, log, number, attributes, target) for number in range(2)]
    state, conv = CASES.replay(kernel, operands, log, counts, layout, target)
    wanted_state, wanted_conv, wanted_outs = CASES.decoded(kernel, operands, counts, attributes, target)
    exact = layout if target == "cpu" or tokens <= 9 else "sums of another form than decoding has"
    CASES.same_states((state, conv), (wanted_state, wanted_conv), exact)
    torch.testing.assert_close(torch.stack(outs), wanted_outs)


def test_a_graph_reads_the_counts_of_its_replay(kernel):
    operands = CASES.on("cuda", CASES.operands_of(6, 2, 3, 8, 4, 128, 128, "vk", torch.bfloat16))
    log = CASES.empty_log(operands)
    for number in range(2):
        CASES.verify(kernel, operands, log, number, CASES.attributes_of(), "cuda")
    tensors = {name: operands[name].clone() for name in ("state", "conv_state")} | log
    tensors["accepted"] = torch.tensor([1, 1, 1], dtype=torch.int32, device="cuda")
    launch = kernel("kda_replay", tensors, {"state_layout": "vk"}, target="cuda").launch
    launch(*tensors.values())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(*tensors.values())
    for counts in ((3, 0, 8), (2, 5, 1)):
        tensors["accepted"].copy_(torch.tensor(counts))
        for name in ("state", "conv_state"):
            tensors[name].copy_(operands[name])
        graph.replay()
        state, conv = CASES.replay(kernel, operands, log, counts, "vk", "cuda")
        assert torch.equal(tensors["state"], state) and torch.equal(tensors["conv_state"], conv)
