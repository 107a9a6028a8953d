"""The indexer over many query rows on the GPU: ties of the interpreter's cases, and prompts at width."""

import importlib.util
from pathlib import Path

import pytest
import torch

from kimigraph.codegen.specialize import lightning_indexer_prompt
from kimigraph.ir.reference.lightning_indexer import lightning_indexer

pytestmark = pytest.mark.gpu

_PATH = Path(__file__).parents[1] / "interpreter" / "test_kernel_lightning_indexer_prefill.py"
_SPEC = importlib.util.spec_from_file_location("cases_lightning_indexer_prefill", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
CASES = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(CASES)
# Each shape is a kernel that takes seconds to compile: those of the other cases run in the interpreter alone.
test_ties, test_scores_that_only_rise = CASES.test_ties, CASES.test_scores_that_only_rise


def one_launch(request):
    return CASES.prefill.build(request)


def slabs(request):
    return lightning_indexer_prompt.build(request, slab=128, groups=lightning_indexer_prompt.NARROW)


def wide_slabs(request):
    return lightning_indexer_prompt.build(request, slab=128, groups=lightning_indexer_prompt.WIDE)


@pytest.mark.parametrize(("build", "form"), [*((one_launch, form) for form in CASES.FORMS), (slabs, "fp8 pages")])
@pytest.mark.parametrize(("k", "heads", "lengths"), [(2048, 64, [1]), (128, 32, [5000]), (600, 128, [9000])])
def test_at_width(kernel, build, form, k, heads, lengths, monkeypatch):
    """Whole numbers: no rounding hides a wrong pick, and ties are everywhere."""
    check_at_width(kernel, build, form, k, heads, lengths, monkeypatch)


def test_wide_groups_at_width(kernel, monkeypatch):
    check_at_width(kernel, wide_slabs, "fp8 pages", 600, 64, [9000], monkeypatch)


def check_at_width(kernel, build, form, k, heads, lengths, monkeypatch):
    operands, descriptor = CASES.operands_of(form, 1, 300, 12288, heads, lengths, span=2)
    monkeypatch.setitem(CASES.BUILDERS, "lightning_indexer", build)
    moved = tuple(None if tensor is None else tensor.cuda() for tensor in operands)
    module = kernel("lightning_indexer", dict(zip(CASES.OPERANDS, moved, strict=True)), {"k": k, "scale": 0.5})
    assert hasattr(module, "score_prompt") == (build in (slabs, wide_slabs))
    found = module.launch(*moved)
    assert torch.equal(found, module.launch(*moved))
    q, keys, weights, limits, _, table = moved
    for first in range(0, 300, 100):
        part = slice(first, first + 100)
        wanted = lightning_indexer(
            q[:, part], keys, weights[:, part], limits + first, k=k, scale=0.5, block_table=table,
            descriptor=descriptor,
        )  # fmt: skip
        assert torch.equal(found[:, part], wanted)


@pytest.mark.parametrize("build", [slabs, wide_slabs])
def test_slabs_with_unmapped_pages_and_rows_of_the_cache(kernel, monkeypatch, build):
    """Two sequences, the end of a slab inside a block of rows, pages that are not there; rows instead of positions."""
    operands, descriptor = CASES.operands_of("fp8 pages", 2, 135, 4096, 64, [3000, 1], span=2)
    operands[5][0, 5] = -1
    monkeypatch.setitem(CASES.BUILDERS, "lightning_indexer", build)
    moved = tuple(None if tensor is None else tensor.cuda() for tensor in operands)
    attributes = {"k": 500, "scale": 0.5, "rows": True}
    module = kernel("lightning_indexer", dict(zip(CASES.OPERANDS, moved, strict=True)), attributes)
    q, keys, weights, lengths, _, table = moved
    wanted = lightning_indexer(
        q, keys, weights, lengths, k=500, scale=0.5, block_table=table, rows=True, descriptor=descriptor
    )
    assert torch.equal(module.launch(*moved), wanted)
