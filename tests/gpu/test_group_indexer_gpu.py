"""The indexer over MXFP8 keys in groups of 32 on Hopper: few rows and many, pages and sequences, picks against fp64.

Cases of one shape share their kernels: what they compile is most of their time.
"""

from dataclasses import replace

import pytest
import torch

from kimigraph.codegen.specialize import BUILDERS, lightning_indexer_group_prompt, lightning_indexer_groups
from kimigraph.codegen.specialize.lightning_indexer_groups import ALONE, LONG, TOGETHER
from kimigraph.codegen.specialize.lightning_indexer_prompt import NARROW, WIDE
from kimigraph.ir.descriptors import IndexKeyDescriptor
from kimigraph.ir.reference.cache_bytes import index_key_bytes, index_key_planes, read_index_keys
from kimigraph.ir.reference.lightning_indexer import lightning_indexer
from kimigraph.ir.reference.mxfp8_quantize import mxfp8_dequantize, mxfp8_quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
NAMES = ("q", "keys", "weights", "lengths", "mask", "block_table", "q_scales")


class Case:
    """Operands whose groups differ by binades; ``kind`` changes some of the keys."""

    def __init__(self, batch, tokens, heads, total, paged=True, kind="normal", lengths="ragged", dtype=torch.float32):
        self.generator = torch.Generator("cuda").manual_seed(batch * 7 + tokens * 3 + heads + total)
        layout = ("paged", 64) if paged else ("contiguous", 0)
        self.form = IndexKeyDescriptor(layout[0], "float8_e4m3fn", 128, layout[1], "e8m0", 32)
        pages = batch * total // 64 + 3
        shape = (pages, 64) if paged else (batch, total)
        values = self.spread(*shape)
        if kind == "zeros":
            values[:, ::2, :64], values[:, 5] = 0, 0
        if kind == "equal":
            values[:] = 1
        if kind == "far apart":
            values[:, ::3, :32] *= 2.0**60
            values[:, 1::3, 32:] *= 2.0**-70
        if kind == "nan":
            values[:, 3, 17] = float("nan")
        self.keys = torch.zeros(*shape, 132, dtype=torch.uint8, device="cuda")
        parts = index_key_bytes(values, str(self.form))
        for plane, part in zip(index_key_planes(self.keys, str(self.form)), parts, strict=True):
            plane.copy_(part)
        self.q = self.spread(batch, tokens, heads).bfloat16()
        self.weights = torch.randn(batch, tokens, heads, device="cuda", generator=self.generator).to(dtype)
        self.table = None
        if paged:
            order = torch.randperm(pages, device="cuda", generator=self.generator)
            self.table = order[: batch * total // 64].to(torch.int32).view(batch, -1)
        if kind == "holes":
            self.table[:, 1::5] = -1
        self.lengths = torch.full((batch,), total - tokens + 1, dtype=torch.int32, device="cuda")
        self.lengths[1:] = torch.randint(0, total + 1, (batch - 1,), device="cuda", generator=self.generator)
        if lengths is None:
            self.lengths = None

    def spread(self, *shape):
        x = torch.randn(*shape, 4, 32, device="cuda", generator=self.generator)
        power = torch.randint(-4, 4, (*shape, 4, 1), device="cuda", generator=self.generator).float()
        return (x * power.exp2()).flatten(-2)

    def picks(self, kernel, k, quantise="before", rows=False):
        """The kernel's route, its picks, and the reference's."""
        codes, scales = mxfp8_quantize(self.q, group=32)
        given = (self.q, None) if quantise == "inside" else (codes, scales)
        operands = (given[0], self.keys, self.weights, self.lengths, None, self.table, given[1])
        attributes = {"k": k, "scale": 0.5, "rows": rows, "descriptor": str(self.form)}
        module = kernel(
            "lightning_indexer",
            dict(zip(NAMES, operands, strict=True)),
            {**attributes, "quantises_q": quantise == "inside"},
        )
        found = module.launch(*operands)
        assert torch.equal(found, module.launch(*operands))
        want = lightning_indexer(
            codes, self.keys, self.weights, self.lengths, block_table=self.table, q_scales=scales, **attributes
        )
        return module.CONSTANTS["route"], found, want

    def check(self, found, want):
        """Listed ascending, as many as there are; where they differ the scores are as near as sums in fp32 can tell."""
        keys, (codes, scales) = read_index_keys(self.keys, str(self.form)), mxfp8_quantize(self.q, group=32)
        q = mxfp8_dequantize(codes, scales, group=32)
        for row, token in torch.cartesian_prod(torch.arange(found.shape[0]), torch.arange(found.shape[1])).tolist():
            some, wanted = (picks[row, token][picks[row, token] >= 0].long() for picks in (found, want))
            assert len(some) == len(wanted) and bool((some[1:] > some[:-1]).all())
            odd = torch.cat([some[~torch.isin(some, wanted)], wanted[~torch.isin(wanted, some)]])
            if len(odd) == 0:
                continue
            own = keys[row] if self.table is None else keys[self.table[row].clamp_min(0).long()].flatten(0, 1)
            scores = self.weights[row, token].double() @ (q[row, token].double() @ own.double().T).mul(0.5).relu()
            near = (scores[odd] - scores[wanted].min()).abs().max() / scores[scores.isfinite()].abs().max()
            assert near < 1e-5


BASE = {"batch": 2, "tokens": 1, "heads": 64, "total": 4096}
FEW = [
    *({**BASE, "kind": kind} for kind in ("normal", "zeros", "far apart", "holes", "nan")),
    {"batch": 2, "tokens": 1, "heads": 16, "total": 4096, "dtype": torch.bfloat16},
    {"batch": 2, "tokens": 2, "heads": 128, "total": 4096, "lengths": None, "paged": False},
]
MANY = [
    {"batch": 1, "tokens": 100, "heads": 64, "total": 8192, "kind": "holes"},
    {"batch": 2, "tokens": 70, "heads": 32, "total": 4096, "paged": False},
    {"batch": 2, "tokens": 71, "heads": 64, "total": 4096, "paged": False},
]


SHAPES = [ALONE, replace(ALONE, half=True), TOGETHER, LONG]


@pytest.fixture
def built(monkeypatch):
    """Has the indexer take a form with some options."""

    def ask(form, **options):
        monkeypatch.setitem(BUILDERS, "lightning_indexer", lambda request: form.build(request, **options))

    return ask


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("quantise", ["before", "inside"])
@pytest.mark.parametrize("sizes", FEW, ids=str)
def test_few_rows(kernel, built, sizes, quantise, shape):
    built(lightning_indexer_groups, shape=shape if sizes["heads"] <= 64 else None)
    case = Case(**sizes)
    route, found, want = case.picks(kernel, 1024, quantise)
    assert route.startswith("MXFP8, two launches")
    case.check(found, want)


@pytest.mark.parametrize(
    ("sizes", "groups"), [(MANY[0], NARROW), (MANY[0], WIDE), (MANY[1], NARROW), (MANY[2], WIDE)], ids=str
)
def test_many_rows(kernel, built, sizes, groups):
    built(lightning_indexer_group_prompt, groups=groups)
    case = Case(**sizes)
    route, found, want = case.picks(kernel, 1024, "before" if case.table is None else "inside")
    assert route.startswith("MXFP8, many rows")
    case.check(found, want)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("selects", ["select_codes", "select_bounded"])
def test_more_programs_than_fit_at_once(kernel, built, shape, selects):
    """Programs that take the place of others, and stages that are filled again: every run lists the same."""
    built(lightning_indexer_groups, shape=shape, selects=selects)
    case = Case(64, 1, 64, 32768)
    _, before, want = case.picks(kernel, 2048)
    _, inside, _ = case.picks(kernel, 2048, "inside")
    assert torch.equal(before, inside)
    case.check(before, want)


@pytest.mark.parametrize("shape", SHAPES[-2:], ids=str)
def test_ties_fall_to_the_lower_index(kernel, built, shape):
    built(lightning_indexer_groups, shape=shape)
    _, found, want = Case(**BASE, kind="equal").picks(kernel, 1024)
    assert torch.equal(found, want)


def test_rows_of_pages_are_listed_in_the_order_of_positions(kernel, built):
    built(lightning_indexer_groups)
    case = Case(**BASE)
    positions, rows = case.picks(kernel, 1024)[1][0], case.picks(kernel, 1024, rows=True)[1][0]
    listed = case.table[0][positions.clamp_min(0).long() // 64] * 64 + positions % 64
    assert torch.equal(torch.where(positions < 0, -1, listed).int(), rows)
