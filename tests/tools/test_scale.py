"""The figures on paper: parameters as published, formulas near compiled programs, a page that is up to date."""

from pathlib import Path

import pytest

from kimigraph.ir.mesh import DeviceMesh
from kimigraph.tools.scale.model import AT_WIDTH, K31
from kimigraph.tools.scale.plan import Link, Load, best, cluster_of, estimate
from kimigraph.tools.scale.tables import COMPILED, CONTEXT, with_tables

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "bench" / "results" / "tp2_k31.json"
CLUSTER, _ = cluster_of(None)


def test_parameters_are_those_of_the_published_model() -> None:
    assert K31.parameters == pytest.approx(2.78e12, rel=0.01)


def test_formulas_are_near_what_the_cost_model_says_of_compiled_programs() -> None:
    for (batch, tp), microseconds in COMPILED.items():
        seconds = AT_WIDTH.step_work(batch, 1, CONTEXT, tp, 1, 1).seconds(CLUSTER.device)
        assert seconds * 1e6 == pytest.approx(microseconds, rel=0.1), (batch, tp)


def test_eight_gpus_are_too_few_and_sixteen_are_not() -> None:
    loads = [Load(1, 1, CONTEXT, CONTEXT)]
    assert best(K31, CLUSTER, 8, loads, 1.0) is None
    found = best(K31, CLUSTER, 16, loads, 1.0)
    assert found is not None and found.fits and found.mesh.size == 16


def test_ranks_share_work_and_pay_for_it() -> None:
    load = Load(8, 1, CONTEXT, CONTEXT)
    one, two = (estimate(AT_WIDTH, CLUSTER, DeviceMesh(tp=tp), 1, load) for tp in (1, 2))
    assert one.communicating == 0 and one.link_bytes == {"tp": 0.0}
    assert two.computing < one.computing and two.communicating > 0 and two.memory < one.memory
    shared = estimate(AT_WIDTH, CLUSTER, DeviceMesh(tp=2, sp=2, over_tp=True), 1, load)
    assert shared.memory < two.memory and shared.link_bytes["sp"] > 0
    assert Link(1e9, 1e-6).all_reduce(1000, 4) == pytest.approx(1e-6 + 1.5e-6)


def test_a_run_on_two_gpus_calibrates_the_link(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(
        '{"collectives_us": [{"bytes": 1000, "all_reduce": 10.0}, {"bytes": 10001000, "all_reduce": 60.0}]}'
    )
    cluster, told = cluster_of(path)
    assert cluster.inside.latency == pytest.approx(10e-6) and cluster.inside.bytes_per_second == pytest.approx(2e11)
    assert "run.json" in told


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    measured = MEASURED if "measured on two GPUs" in page else None
    assert with_tables(page, measured) == page, "run python scripts/write_scale.py"
