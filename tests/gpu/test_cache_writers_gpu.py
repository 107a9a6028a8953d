"""The cache writers on the GPU: the interpreter's cases, and rows of many tokens."""

import importlib.util
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

_PATH = Path(__file__).parents[1] / "interpreter" / "test_kernel_cache_writers.py"
_SPEC = importlib.util.spec_from_file_location("cases_cache_writers", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
CASES = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(CASES)
globals().update({name: test for name, test in vars(CASES).items() if name.startswith("test_")})


@pytest.mark.parametrize("style", ["none", "half_split", "interleaved", "deinterleaved"])
def test_many_keys(kernel, style):
    """3000 tokens, normed and turned: no byte differs from the reference's."""
    data = CASES.Data("cuda", 7)
    table, pages = data.table(1, 50, 64)
    keys = torch.zeros(pages, 64, 132, dtype=torch.uint8, device="cuda")
    cos, sin = data.angles(1, 3000, 32) if style != "none" else (None, None)
    weight, bias = (data.normal(128, dtype=torch.float32, spread=False) for _ in range(2))
    operands = (keys, data.normal(1, 3000, 128), data.positions(1, 3000, 3200), weight, bias, cos, sin, table)
    attributes = {"norm_eps": 1e-6, "rope_style": style, "descriptor": str(CASES.key_form(64, "power2"))}
    CASES.written(kernel, "index_key_write", CASES.KEY_OPERANDS, operands, attributes, ["keys"])


@pytest.mark.parametrize(("order", "scales"), [("scales_rope", "amax"), ("rope_scales", "power2")])
def test_many_rows(kernel, order, scales):
    data = CASES.Data("cuda", 8)
    table, pages = data.table(1, 40, 64)
    form = CASES.latent_form(64, order, scales)
    latent = torch.zeros(pages, 64, 656, dtype=torch.uint8, device="cuda")
    cos, sin = data.angles(1, 2000, 32)
    positions = data.positions(1, 2000, 2560)
    operands = (latent, None, data.normal(1, 2000, 512), data.normal(1, 2000, 64), positions, cos, sin, table, None)
    attributes = {"rope_style": "interleaved", "descriptor": str(form)}
    CASES.written(kernel, "latent_write", CASES.LATENT_OPERANDS, operands, attributes, ["latent"])
