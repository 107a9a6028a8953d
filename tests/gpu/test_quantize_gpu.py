"""The quantisers, the MXFP8 writer and the MXFP8 indexer on the GPU: the interpreter's cases, and published sizes."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kimigraph.ir.reference.lightning_indexer import lightning_indexer
from kimigraph.ir.reference.mxfp8_quantize import mxfp8_quantize

pytestmark = pytest.mark.gpu


def cases(name: str) -> ModuleType:
    path = Path(__file__).parents[1] / "interpreter" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"cases_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


QUANTIZE, INDEXER = cases("test_kernel_quantize"), cases("test_kernel_mxfp8_indexer")
globals().update({name: test for name, test in vars(QUANTIZE).items() if name.startswith("test_")})
# The indexer's products are rounded in another order here: near-ties may fall otherwise.
globals().update(
    {name: test for name, test in vars(INDEXER).items() if name.startswith(("test_writer", "test_scales"))}
)


@pytest.mark.parametrize("batch", [1, 4])
def test_the_indexer_at_published_sizes(kernel, batch):
    data, form = INDEXER.Data("cpu", batch), INDEXER.form(page=64)
    table = data.table(batch, 64)
    keys = torch.zeros(batch * 64 + 1, 64, 132, dtype=torch.uint8)
    INDEXER.filled(keys, data.normal(batch, 4096, 128), form, table)
    codes, scales = mxfp8_quantize(data.normal(batch, 1, 64, 128), group=32)
    weights = data.normal(batch, 1, 64, dtype=torch.float32)
    operands = (codes, keys, weights, torch.full((batch,), 4000, dtype=torch.int32), None, table, scales)
    named = {n: None if x is None else x.cuda() for n, x in zip(INDEXER.INDEXER, operands, strict=True)}
    attributes = {"k": 2048, "scale": 0.5, "descriptor": str(form)}
    got = kernel("lightning_indexer", named, attributes).launch(*named.values()).cpu()
    want = lightning_indexer(*operands[:4], block_table=table, q_scales=scales, **attributes)
    for found, wanted in zip(got[:, 0], want[:, 0], strict=True):
        assert bool((found[1:] > found[:-1]).all()) and int(torch.isin(found, wanted).sum()) >= 2044
