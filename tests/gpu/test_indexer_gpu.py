"""The indexer's two launches on Hopper: exact sets of long rows, ties, replays beside other work, large caches."""

import pytest
import torch

from kimigraph.bench.graph_nodes import graph_nodes
from kimigraph.ir.descriptors import IndexKeyDescriptor
from kimigraph.ir.reference.lightning_indexer import lightning_indexer

pytestmark = pytest.mark.gpu

OPERANDS = ("q", "keys", "weights", "lengths", "mask", "block_table")
PAGES = str(IndexKeyDescriptor("paged", "float8_e4m3fn", 128, page_size=64, scales="power2"))
PAGE_BYTES = 64 * 132
NOT_A_NUMBER = 0x7F
BOUNDED = [{"ctas": 1, "selects": "select_bounded"}, {"ctas": 16, "selects": "select_bounded"}]
SHORT = [{"ctas": 1}, {"ctas": 8}]  # how rows of 8,192 codes are selected from
LONG = [{"ctas": 1}, {"ctas": 16}, *BOUNDED]


@pytest.fixture(autouse=True)
def on_hopper():
    torch.manual_seed(0)
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the form for compute capability 9.0")


def whole(*shape, span=3):
    """Small integers: every sum is exact, and ties are many."""
    return torch.randint(-span, span + 1, shape, device="cuda").float()


def pages_of(count):
    """Shuffled-looking pages of small integers with scales of 0.5, 1 and 2."""
    pages = torch.empty(count, PAGE_BYTES, dtype=torch.uint8, device="cuda")
    pages[:, :8192] = whole(count, 8192).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.tensor([0.5, 1.0, 2.0], device="cuda")[torch.randint(0, 3, (count, 64), device="cuda")]
    pages[:, 8192:] = scales.view(torch.uint8).view(count, 256)
    return pages.view(count, 64, 132)


def packed(batch, total, tokens=1, heads=16, lengths=None):
    count = batch * total // 64
    table = torch.randperm(count, device="cuda").to(torch.int32).view(batch, -1)
    q = whole(batch, tokens, heads, 128).to(torch.float8_e4m3fn)
    limits = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return q, pages_of(count), whole(batch, tokens, heads, span=2), limits, None, table


def plain(batch, total, tokens=1, heads=16, lengths=None):
    q, keys = whole(batch, tokens, heads, 128).bfloat16(), whole(batch, total, 128).bfloat16()
    limits = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return q, keys, whole(batch, tokens, heads, span=2), limits, None, None


def built(kernel, operands, k, rows=False, **options):
    descriptor = PAGES if operands[1].dtype == torch.uint8 else ""
    attributes = {"k": k, "scale": 0.5, "rows": rows, "descriptor": descriptor}
    options = {"form": "two launches", "selects": "select_codes", **options}
    module = kernel(
        "lightning_indexer", dict(zip(OPERANDS, operands, strict=True)), attributes, target="cuda", **options
    )
    assert hasattr(module, options.get("selects", "select_codes"))
    return module.launch


def expected(operands, k, rows=False):
    q, keys, weights, lengths, mask, table = operands
    options = {"block_table": table, "rows": rows, "descriptor": PAGES if keys.dtype == torch.uint8 else ""}
    return lightning_indexer(q, keys, weights, lengths, mask, k=k, scale=0.5, **options)


def agree(kernel, operands, k, **options):
    launch = built(kernel, operands, k, **options)
    picked = launch(*operands)
    assert torch.equal(picked, expected(operands, k))
    assert torch.equal(picked, launch(*operands))


@pytest.mark.parametrize("make", [packed, plain])
@pytest.mark.parametrize(("ctas", "k"), [(None, 2048), (1, 1), (1, 8192), (4, 8192), (16, 100)])
def test_exact_sets(kernel, make, ctas, k):
    agree(kernel, make(3, 32768, lengths=[32768, 20011, 1500]), k, ctas=ctas)


@pytest.mark.parametrize("how", [*SHORT, *BOUNDED])
def test_query_rows_have_limits_of_their_own(kernel, how):
    agree(kernel, packed(2, 16384, tokens=3, lengths=[16000, 700]), 512, **how)


@pytest.mark.parametrize("make", [packed, plain])
@pytest.mark.parametrize("k", [100, 2048, 4500])
@pytest.mark.parametrize("how", BOUNDED)
def test_few_codes_are_looked_at(kernel, make, k, how):
    """Fewer than 4,096 reach the bound, or more; short rows beside long ones."""
    agree(kernel, make(3, 131072, lengths=[131072, 70011, 1500]), k, **how)


@pytest.mark.parametrize("heads", [32, 64, 128])
def test_heads(kernel, heads):
    agree(kernel, packed(5, 8192, heads=heads), 300, ctas=1)


@pytest.mark.parametrize("how", SHORT)
def test_short_rows(kernel, how):
    agree(kernel, packed(5, 8192, lengths=[0, 1, 64, 299, 300]), 300, **how)


@pytest.mark.parametrize("how", SHORT)
def test_unmapped_pages(kernel, how):
    operands = packed(5, 8192, lengths=[8192] * 5)
    operands[5][0, 7:40] = -1
    operands[5][1, 3:] = -1
    agree(kernel, operands, 300, **how)


@pytest.mark.parametrize("how", LONG)
@pytest.mark.parametrize("values", [(3.0,), (0.0,), (1.0, 0.0), (1.0, 1.0078125), (-1.0, -2.0), (1e-4, 1e4, -3.0)])
def test_crowded_bins(kernel, how, values):
    """Rows of few values: ties are cut by index."""
    q = torch.zeros(1, 1, 16, 128, dtype=torch.bfloat16, device="cuda")
    q[0, 0, 0, 0], q[0, 0, 1, 0] = 1.0, -1.0
    weights = torch.zeros(1, 1, 16, device="cuda")
    weights[0, 0, :2] = torch.tensor([1.0, -1.0])
    keys = torch.zeros(1, 65536, 128, dtype=torch.bfloat16, device="cuda")
    keys[0, :, 0] = torch.tensor(values, device="cuda").repeat(65536)[:65536]
    for k in (64, 2048):
        agree(kernel, (q, keys, weights, None, None, None), k, **how)


@pytest.mark.parametrize("how", LONG)
@pytest.mark.parametrize("outlier", [1e3, 1e20, float("inf"), float("nan")])
def test_near_constant_rows_with_outliers(kernel, how, outlier):
    q = torch.zeros(1, 1, 16, 128, dtype=torch.bfloat16, device="cuda")
    q[0, 0, 0, 0], q[0, 0, 1, 0] = 1.0, -1.0
    weights = torch.zeros(1, 1, 16, device="cuda")
    weights[0, 0, :2] = torch.tensor([1.0, -1.0])
    keys = torch.zeros(1, 65536, 128, dtype=torch.bfloat16, device="cuda")
    keys[0, :, 0] = 1.0 + torch.randint(0, 3, (65536,), device="cuda") / 128
    keys[0, 5::16384, 0] = outlier
    agree(kernel, (q, keys, weights, None, None, None), 2048, **how)


@pytest.mark.parametrize("how", SHORT)
def test_what_lies_behind_the_row_is_not_read_into_it(kernel, how):
    operands = packed(5, 8192, lengths=[5000, 900, 0, 64, 8000])
    clean = built(kernel, operands, 300, **how)(*operands)
    flat = operands[1].view(-1, PAGE_BYTES)
    for row, limit in enumerate((5000, 900, 0, 64, 8000)):
        page, offset = operands[5][row, limit // 64].long(), limit % 64
        flat[page, offset * 128 : 8192] = NOT_A_NUMBER
        flat[page, 8192 + 4 * offset :] = NOT_A_NUMBER | 0x80
        flat[operands[5][row, limit // 64 + 1 :].long()] = NOT_A_NUMBER
    assert torch.equal(clean, built(kernel, operands, 300, **how)(*operands))


@pytest.mark.parametrize("how", [{"ctas": 1}, {"ctas": 4}])
def test_cache_rows(kernel, how):
    operands = packed(3, 8192, lengths=[8192, 700, 0])
    picked = built(kernel, operands, 512, rows=True, **how)(*operands)
    assert torch.equal(picked, expected(operands, 512, rows=True))


def test_forms_agree_on_rows_of_reals(kernel):
    """The plain form and this one: sets differ where scores agree to rounding alone."""
    q, weights = torch.randn(2, 1, 64, 128, device="cuda"), torch.randn(2, 1, 64, device="cuda")
    operands = (q.bfloat16(), torch.randn(2, 32768, 128, device="cuda").bfloat16(), weights, None, None, None)
    ours = built(kernel, operands, 2048)(*operands)
    attributes = {"k": 2048, "scale": 0.5, "descriptor": ""}
    other = kernel("lightning_indexer", dict(zip(OPERANDS, operands, strict=True)), attributes, target="cpu")
    theirs = other.launch(*operands)
    for row in range(2):
        dots = (operands[0][row, 0].float() @ operands[1][row].float().T * 0.5).relu()
        scores = weights[row, 0] @ dots
        mine, yours = ours[row, 0], theirs[row, 0]
        odd = torch.cat([mine[~torch.isin(mine, yours)], yours[~torch.isin(yours, mine)]])
        cut = scores[theirs[row, 0].long()].min()
        assert (scores[odd.long()] - cut).abs().le(1e-4 * scores.abs().max()).all()


def test_a_million_keys(kernel):
    agree(kernel, packed(1, 1 << 20, lengths=[(1 << 20) - 777]), 2048)
    agree(kernel, packed(1, 1 << 20, heads=16), 8192)


def test_pages_past_31_bits_of_bytes(kernel):
    """The cache is larger than 2 ** 32 bytes; pages of both ends are read."""
    count = (1 << 32) // PAGE_BYTES + 64
    pool = torch.empty(count, 64, 132, dtype=torch.uint8, device="cuda")
    used = torch.cat([torch.arange(64, device="cuda"), torch.arange(count - 64, count, device="cuda")])
    used = used[torch.randperm(128, device="cuda")]
    pool[used] = pages_of(128)
    operands = (*packed(2, 4096)[:1], pool, whole(2, 1, 16, span=2), None, None, used.to(torch.int32).view(2, 64))
    picked = built(kernel, operands, 300)(*operands)
    small = (operands[0], pool[used], *operands[2:5], torch.arange(128, device="cuda", dtype=torch.int32).view(2, 64))
    assert torch.equal(picked, expected(small, 300))


@pytest.mark.parametrize("how", SHORT)
def test_a_call_is_two_kernels_in_a_graph(kernel, how, monkeypatch):
    """Nothing has to be cleared between calls, so no memset stands beside them."""
    operands = packed(5, 8192)
    launch = built(kernel, operands, 300, **how)
    # The fixture's poison is a kernel for each new tensor.
    monkeypatch.setitem(launch.__globals__, "torch", torch)
    if launch.__kwdefaults__:
        monkeypatch.setitem(launch.__kwdefaults__, "memory", torch)
    assert graph_nodes(lambda: launch(*operands)) == {"kernels": 2, "memsets": 0}


def captured(launch, operands, wanted, wrong, calls=4):
    """A graph of some calls that counts results other than ``wanted`` in ``wrong``."""
    launch(*operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            picked = launch(*operands)
        wrong += (picked != wanted).sum()
    return graph


@pytest.mark.parametrize("how", [{"ctas": 8}, {"ctas": 8, "selects": "select_bounded"}])
def test_replays_beside_random_delays_give_the_same_bits(kernel, how):
    """10,000 replays, while another stream takes multiprocessors away for random times."""
    operands = packed(8, 32768, lengths=[32768, 30000, 25000, 20000, 15000, 10000, 5000, 100])
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    graph = captured(built(kernel, operands, 2048, **how), operands, expected(operands, 2048), wrong)
    delays = torch.cuda.Stream()
    load = torch.randn(1 << 22, device="cuda")
    cycles = torch.randint(100, 60000, (10000,)).tolist()
    for number in range(10000):
        graph.replay()
        if number % 3 == 0:
            with torch.cuda.stream(delays):
                torch.cuda._sleep(cycles[number])
                load.mul_(1.0)
    torch.cuda.synchronize()
    assert int(wrong) == 0


def test_graphs_of_one_kernel_run_side_by_side(kernel):
    operands = packed(4, 32768)
    launch, wanted = built(kernel, operands, 2048, ctas=8), expected(operands, 2048)
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")
    graphs = [captured(launch, operands, wanted, wrong[number]) for number in range(2)]
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(500):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0]
