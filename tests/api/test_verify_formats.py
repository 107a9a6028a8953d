"""Verification beyond fp32 decode steps: 16 bits against fp32, and a prefill."""

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    "fields",
    [{"dtype": "bfloat16", "context": 12, "seed": 5}, {"phase": "prefill", "context": 9}, {"context": 12, "tokens": 3}],
    ids=["bfloat16", "prefill", "three tokens"],
)
def test_a_tiny_model_is_verified(kimi: str, compiled: Any, tmp_path: Path, fields: dict[str, Any]) -> None:
    report = compiled(kimi, verify=True, batch=2, **fields)
    assert report.verify["passed"]
    assert report.verify["max_rel_err"] <= report.verify["tolerance"]
    assert report.verify["tolerance"] == 1e-4 if "dtype" not in fields else report.verify["tolerance"] >= 1e-2
