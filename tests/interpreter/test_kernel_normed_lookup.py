"""A lookup's launches share counters that only grow: each waits for its own rows, however many came before."""

from typing import Any

import pytest
import torch

from kimigraph.codegen.templates.normed_lookup import normed_lookup_dot

DEPTH, COLUMNS, TILE = 48, 40, 16
PROGRAMS = 3
BEFORE = 2**33
"""Launches so far: their programs and rows are past what 32 bits count."""


@pytest.mark.parametrize("rows", [2, 5])
def test_counters_are_those_of_all_launches(rows: int) -> None:
    """Five rows are more than there are programs: some norm two."""
    generator = torch.Generator().manual_seed(rows)
    table, norm, weight = (
        torch.randn(size, generator=generator).bfloat16() for size in ((9, DEPTH), (DEPTH,), (COLUMNS, DEPTH))
    )
    constants: dict[str, Any] = {
        "ROWS": rows, "COLUMNS": COLUMNS, "DEPTH": DEPTH, "PROGRAMS": PROGRAMS, "TILE": TILE, "LINES": 16, "STEP": 32,
        "BLOCK": 64, "EPS": 1e-5, "ROUNDS_FIRST": False, "INTERPRET": True,
    }  # fmt: skip
    counts = torch.tensor([BEFORE * rows, BEFORE * PROGRAMS])
    normed, found = torch.empty(rows, DEPTH, dtype=torch.bfloat16), torch.empty(rows, DEPTH, dtype=torch.bfloat16)
    for launch in range(1, 4):
        places = torch.randint(0, 9, (rows,), generator=generator)
        out = torch.full((rows, COLUMNS), float("nan"), dtype=torch.bfloat16)
        normed_lookup_dot[(PROGRAMS,)](table, places, norm, weight, found, out, normed, counts, **constants)
        wide = table[places].float()
        wanted = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * norm.float()).bfloat16()
        assert torch.equal(found, table[places])
        torch.testing.assert_close(normed, wanted, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(out.float(), wanted.float() @ weight.float().t(), rtol=1e-2, atol=5e-2)
        assert counts.tolist() == [(BEFORE + launch) * rows, (BEFORE + launch) * PROGRAMS]
