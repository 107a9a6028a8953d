"""Every kernel case of ``tests/interpreter`` on the GPU, and what only it can show: full width, 64-bit offsets."""

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kimigraph.ir.reference.kda_decode import kda_decode
from kimigraph.ir.reference.lightning_indexer import lightning_indexer
from kimigraph.ir.reference.sparse_attention import sparse_attention

pytestmark = pytest.mark.gpu


def cases_of(op: str, without: tuple[str, ...] = ()) -> ModuleType:
    """The interpreter's test module; its tests (``without`` some that another one covers) take the device here."""
    path = Path(__file__).parents[1] / "interpreter" / f"test_kernel_{op}.py"
    spec = importlib.util.spec_from_file_location(f"cases_{op}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = {
        name.replace("test_", f"test_{op}_", 1): test
        for name, test in vars(module).items()
        if name.startswith("test_") and name not in without
    }
    globals().update(tests)
    return module


INDEXER = cases_of("lightning_indexer")
ATTENTION = cases_of("sparse_attention")
DELTA = cases_of("kda_decode")
cases_of("lightning_indexer_hopper")
cases_of("lightning_indexer_packed")
ATTENTION_LAYOUTS = cases_of("attention_layouts")
PREFILL = cases_of("kda_prefill", without=("test_split_anywhere",))  # a build a length: see the cut at every token
cases_of("rows")
cases_of("reported_faults")
cases_of("short_conv")
cases_of("attention_residual")


def gaussian(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("batch", "total", "k"), [(1, 32768, 2048), (8, 8192, 2048), (3, 20000, 8192), (2, 131072, 512)]
)
def test_indexer_at_width(kernel, batch, total, k):
    """The set differs from the reference's only where scores agree to rounding."""
    q, keys, weights = (
        gaussian(batch, 1, 64, 128),
        gaussian(batch, total, 128),
        gaussian(batch, 1, 64, dtype=torch.float32),
    )
    lengths = torch.randint(k // 2, total + 1, (batch,), device="cuda", dtype=torch.int32)
    lengths[0] = total
    scale = 128**-0.5
    tensors = dict(zip(INDEXER.OPERANDS, (q, keys, weights, lengths, None, None), strict=True))
    module = kernel("lightning_indexer", tensors, {"k": k, "scale": scale, "descriptor": ""})
    picked = module.launch(q, keys, weights, lengths)
    assert torch.equal(picked, module.launch(q, keys, weights, lengths))
    expected = lightning_indexer(q, keys, weights, lengths, k=k, scale=scale)
    assert torch.equal(picked == -1, expected == -1)
    for row in range(batch):
        ours, theirs = picked[row, 0], expected[row, 0]
        ours, theirs = ours[ours >= 0].long(), theirs[theirs >= 0].long()
        assert (ours[1:] > ours[:-1]).all() and ours.max() < lengths[row]
        dots = (q[row, 0].float() @ keys[row].float().T * scale).relu()
        scores = weights[row, 0] @ dots
        odd = torch.cat([ours[~torch.isin(ours, theirs)], theirs[~torch.isin(theirs, ours)]])
        assert (scores[odd] - scores[theirs].min()).abs().le(1e-4 * scores.abs().max()).all()


def test_indexer_ties_at_width(kernel):
    scores = torch.zeros(1, 8320)
    scores[0, torch.randperm(8320)[:100]] = 1.0
    picked = INDEXER.run(kernel, "cuda", *INDEXER.identity(scores), k=2048, scale=1.0)[0, 0].tolist()
    low = [t for t in range(8320) if scores[0, t] == 0][:1948]
    assert picked == sorted(scores[0].nonzero().flatten().tolist() + low)


@pytest.mark.parametrize("heads", [8, 32, 64, 128])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_attention_at_width(kernel, heads, batch):
    total, picks = 4096, 2048
    q_latent, q_rope = gaussian(batch, 1, heads, 512), gaussian(batch, 1, heads, 64)
    latent, rope = gaussian(batch, total, 512), gaussian(batch, total, 64)
    indices = torch.stack([torch.randperm(total, device="cuda")[:picks].sort().values for _ in range(batch)])
    indices = indices.int().unsqueeze(1)
    indices[-1, :, picks // 3 :] = -1
    operands = (q_latent, q_rope, latent, rope, indices, None)
    module = kernel(
        "sparse_attention", dict(zip(ATTENTION.OPERANDS, operands, strict=True)), {"scale": 0.07, "descriptor": ""}
    )
    result = module.launch(*operands)
    assert all(torch.equal(a, b) for a, b in zip(result, module.launch(*operands), strict=True))
    ATTENTION.agree(result, sparse_attention(*operands[:5], scale=0.07))


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_delta_step_at_width(kernel, batch, tokens, layout, target, lower_bound):
    """The form for any size ("cpu" has no other) and the one for heads of 128."""
    operands = DELTA.operands_of(0, batch, tokens, 32, 128, 128, layout=layout, dtype=torch.bfloat16)
    operands = {name: tensor.cuda() for name, tensor in operands.items()}
    attributes = DELTA.attributes_of(layout, lower_bound) | {"scale": 128**-0.5}
    expected = {name: tensor.clone() for name, tensor in operands.items()}
    module = kernel("kda_decode", operands, attributes, target=target)
    out, wanted = module.launch(*operands.values()), kda_decode(**expected, **attributes)
    assert DELTA.error(out, wanted) < 4e-3
    assert DELTA.error(operands["state"], expected["state"]) < 1e-5
    assert torch.equal(operands["conv_state"], expected["conv_state"])


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("tokens", "rank"), [(1, 128), (3, 96)])
def test_delta_step_with_a_gate_of_low_rank_at_width(kernel, batch, tokens, rank):
    operands = DELTA.operands_of(2, batch, tokens, 32, 128, 128, layout="vk", dtype=torch.bfloat16)
    operands = DELTA.low_rank(operands, rank)
    operands = {name: tensor if tensor is None else tensor.cuda() for name, tensor in operands.items()}
    attributes = DELTA.attributes_of("vk", -5.0) | {"scale": 128**-0.5}
    expected = {name: tensor if tensor is None else tensor.clone() for name, tensor in operands.items()}
    module = kernel("kda_decode", operands, attributes, target="cuda")
    out, wanted = module.launch(*operands.values()), kda_decode(**expected, **attributes)
    assert DELTA.error(out, wanted) < 4e-3
    assert DELTA.error(operands["state"], expected["state"]) < 1e-5
    assert torch.equal(operands["conv_state"], expected["conv_state"])


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_delta_step_on_a_pool_at_width(kernel, tokens, state_dtype):
    """Slots in any order, two padded rows, and NaN in every entry that is nobody's."""
    operands = DELTA.operands_of(1, 6, tokens, 32, 128, 128, layout="vk", dtype=torch.bfloat16, state_dtype=state_dtype)
    operands = {name: tensor.cuda() for name, tensor in operands.items()}
    slots = torch.tensor([9, 0, 3, 1, -1, 4], device="cuda", dtype=torch.int32)
    for name in ("state", "conv_state"):
        pool = torch.full((10, *operands[name].shape[1:]), math.nan, device="cuda", dtype=operands[name].dtype)
        pool[slots[slots > 0].long()] = operands[name][slots > 0]
        operands[name] = pool
    operands["slots"] = slots
    attributes = DELTA.attributes_of("vk", -5.0) | {"scale": 128**-0.5}
    expected = {name: tensor.clone() for name, tensor in operands.items()}
    module = kernel("kda_decode", operands, attributes, target="cuda")
    out, wanted = module.launch(*operands.values()), kda_decode(**expected, **attributes)
    assert DELTA.error(out, wanted) < 4e-3 and (out[slots < 1] == 0).all()
    entries = slots[slots > 0].long()
    tolerance = 1e-5 if state_dtype == torch.float32 else 4e-3
    assert DELTA.error(operands["state"][entries], expected["state"][entries]) < tolerance
    assert torch.equal(operands["conv_state"].isnan(), expected["conv_state"].isnan())
    assert torch.equal(operands["state"].isnan(), expected["state"].isnan())
    assert torch.equal(operands["conv_state"][entries], expected["conv_state"][entries])


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("lengths", [(130,), (65, 0, 1, 300), (32, 33)])
def test_prefill_at_width(kernel, lengths, raw, lower_bound):
    """Heads of 128: on Hopper the chunks go in pairs and the states through warp-group products."""
    operands = PREFILL.operands_of(
        2, heads=3, key_dim=128, value_dim=128, layout="vk", dtype=torch.bfloat16, raw=raw, lengths=lengths,
        floor=lower_bound,
    )  # fmt: skip
    PREFILL.check(kernel, "cuda", operands, PREFILL.attributes_of("vk", lower_bound))


@pytest.mark.parametrize("tokens", [64, 33])
def test_prefill_of_operands_that_lie_channel_by_channel(kernel, tokens):
    """As a convolution over [B, C, T] leaves them: no tile of such rows can be copied as it lies."""
    operands = PREFILL.operands_of(
        5, tokens=tokens, batch=1, key_dim=128, value_dim=128, layout="vk", dtype=torch.bfloat16, raw=True
    )
    for name in ("q", "k", "v"):
        given = operands[name]
        operands[name] = given.flatten(2).mT.contiguous().mT.unflatten(2, given.shape[2:])
        assert operands[name].stride(1) == 1
    PREFILL.check(kernel, "cuda", operands, PREFILL.attributes_of("vk", None))


def test_prefill_keeps_sequences_apart(kernel):
    """NaN in one batch row stays there, also where its chunks share a program with another row's."""
    operands = PREFILL.operands_of(
        3, tokens=33, batch=2, key_dim=128, value_dim=128, layout="vk", dtype=torch.bfloat16, raw=True
    )
    attributes = PREFILL.attributes_of("vk", -5.0)
    placed = PREFILL.on("cuda", operands)
    module = kernel("kda_prefill", placed, attributes, target="cuda")
    clean, _ = module.launch(*placed.values())
    placed["v"][1] = math.nan
    out, final = module.launch(*placed.values())
    assert torch.equal(out[0], clean[0]) and final[0].isfinite().all() and out[1].isnan().all()


def far_apart(count: int, *shape: int) -> torch.Tensor:
    """``count`` blocks of a pool whose last one begins after 2 ** 31 elements; all but the blocks is untouched."""
    stride = 2**31 // (count - 1) + 4096
    block = math.prod(shape)
    pool = torch.empty((count - 1) * stride + block, device="cuda", dtype=torch.bfloat16)
    inner = torch.empty(shape, device="meta").stride()
    return pool.as_strided((count, *shape), (stride, *inner)).normal_()


def test_indexer_pages_past_32_bit_offsets(kernel):
    pool = far_apart(4, 64, 32)
    table = torch.tensor([[3, 0, 2]], device="cuda", dtype=torch.int32)
    keys = pool[table[0].long()].flatten(0, 1).unsqueeze(0)
    q, weights = gaussian(1, 1, 16, 32), gaussian(1, 1, 16, dtype=torch.float32)
    picked = INDEXER.run(kernel, "cuda", q, pool, weights, None, None, table, k=20)
    assert torch.equal(picked, lightning_indexer(q, keys, weights, k=20, scale=0.5).cpu())


def test_attention_rows_past_32_bit_offsets(kernel):
    latent, rope = far_apart(3, 32).unsqueeze(0), far_apart(3, 16).unsqueeze(0)
    q_latent, q_rope = gaussian(1, 1, 4, 32), gaussian(1, 1, 4, 16)
    operands = (q_latent, q_rope, latent, rope, torch.tensor([[[2, 0]]], device="cuda", dtype=torch.int32), None)
    module = kernel(
        "sparse_attention", dict(zip(ATTENTION.OPERANDS, operands, strict=True)), {"scale": 0.2, "descriptor": ""}
    )
    ATTENTION.agree(module.launch(*operands), sparse_attention(*operands[:5], scale=0.2))
