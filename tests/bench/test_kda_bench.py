"""What stands around the times of ``kimigraph bench kda``, on the CPU."""

import pytest
import torch

from kimigraph.bench.kda import PREFILL_POINTS, ratios_by_row
from kimigraph.bench.peers import PeerUnavailableError, torch_compile_kda
from kimigraph.bench.protocol import relative_error
from kimigraph.bench.reference import delta_rule, log_decay

ATTRIBUTES = {"scale": 128**-0.5, "lower_bound": -5.0}


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch):
    """The functions themselves: compiling them is the peer's business."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def operands(tokens: int) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    run = (1, tokens, 2, 128)
    return {
        **{name: normal(*run) for name in ("q", "k", "v", "g")},
        "beta": normal(1, tokens, 2),
        "initial_state": normal(1, 2, 128, 128, dtype=torch.float32) * 0.3,
        "a_log": torch.tensor([0.2, -0.1]),
        "dt_bias": normal(2, 128, dtype=torch.float32),
        "cu_seqlens": None,
    }


def test_the_compiled_peer_computes_the_recurrence():
    given = operands(96)
    call, written = torch_compile_kda.prefill(given, ATTRIBUTES)
    call()
    q, k, v, g, strength = (given[name][0].double() for name in ("q", "k", "v", "g", "beta"))
    g = log_decay(g, given["a_log"].double(), given["dt_bias"].double(), -5.0)
    out, state = delta_rule(q, k, v, g, strength.sigmoid(), given["initial_state"][0].double())
    assert relative_error(written["out"][0], out) < 6e-3
    assert relative_error(written["final_state"][0], state) < 6e-3


@pytest.mark.parametrize(("tokens", "packed"), [(96, True), (33, False), (16384, False)])
def test_the_compiled_peer_says_what_it_does_not_take(tokens, packed):
    given = operands(tokens) | {"cu_seqlens": torch.tensor([0, 40, 96]) if packed else None}
    with pytest.raises(PeerUnavailableError, match="one sequence of whole chunks"):
        torch_compile_kda.prefill(given, ATTRIBUTES)


def test_ragged_points_are_eight_sequences_of_about_4k():
    ragged = [lengths for _, lengths in PREFILL_POINTS if len(lengths) > 1]
    assert len(ragged) == 2 and all(len(lengths) == 8 and sum(lengths) == 8 * 4096 for lengths in ragged)
    assert all(2000 < length < 6100 for lengths in ragged for length in lengths)


def test_rows_join_the_points_that_one_claim_is_about():
    def point(ratio: float, **shape: object) -> dict[str, object]:
        return {**shape, "peers": {"fla": {"ratio": ratio}, "vllm": {"unavailable": "no"}}}

    document = {
        "decode": [point(2.0, batch=1), point(1.5, batch=8), point(1.1, batch=64)],
        "prefill": [point(3.0, heads=12, lengths=(4096,)), point(2.5, heads=12, lengths=(10, 20))],
    }
    assert ratios_by_row(document) == {
        "decode, fla B 1 and 8": [2.0, 1.5],
        "decode, fla B 64 and more": [1.1],
        "prefill H 12, fla": [3.0],
        "prefill H 12 N 2, fla": [2.5],
    }
