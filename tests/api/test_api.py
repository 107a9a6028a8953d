"""``optimize``, ``Compiled``, ``load``: a compiled model is called as the model is."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kimigraph
import kimigraph.api as api
from kimigraph.capture import load_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import CaptureError, CorruptArtifactError, NumericsError, UsageError

REFERENCE = CompileConfig(target="cpu:reference")


class Model(nn.Module):
    """A cache updated in place, a keyword-only option, a result of every kind of leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(3)), requires_grad=False)

    def forward(
        self, x: Tensor, cache: dict[str, Tensor], shift: Tensor | None = None, *, scale: float = 1.0
    ) -> dict[str, Any]:
        y = x @ self.weight * scale
        if shift is not None:
            y = y + shift
        cache["cache.0.sum"].add_(y.sum(0))
        return {"y": y, "rest": (y.relu(), None, 7), "empty": None}


def fresh() -> dict[str, Tensor]:
    return {"cache.0.sum": torch.ones(4)}


def x_of(rows: int) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))


def assert_same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got["y"], want["y"])
    torch.testing.assert_close(got["rest"][0], want["rest"][0])
    assert got["rest"][1:] == want["rest"][1:] and got["empty"] is None and list(got) == list(want)


@pytest.fixture
def compiled() -> kimigraph.Compiled:
    return kimigraph.optimize(Model(), (x_of(3), fresh()), REFERENCE)


def test_results_have_the_models_structure_and_caches_change_in_place(compiled: kimigraph.Compiled) -> None:
    cache, expected = fresh(), fresh()
    memory = cache["cache.0.sum"]
    for _ in range(2):
        assert_same(compiled(x_of(3), cache), Model()(x_of(3), expected))
    assert cache["cache.0.sum"] is memory
    torch.testing.assert_close(memory, expected["cache.0.sum"])


def test_the_example_inputs_keep_their_values() -> None:
    cache, x = fresh(), x_of(3)
    kimigraph.optimize(Model(), (x, cache), REFERENCE)
    assert torch.equal(cache["cache.0.sum"], torch.ones(4)) and torch.equal(x, x_of(3))


def test_keyword_arguments_in_any_order_and_spelling() -> None:
    compiled = kimigraph.optimize(
        Model(), {"cache": fresh(), "x": x_of(3), "scale": 3.0, "shift": torch.ones(4)}, REFERENCE
    )
    want = Model()(x_of(3), fresh(), torch.ones(4), scale=3.0)
    assert_same(compiled(x=x_of(3), shift=torch.ones(4), cache=fresh(), scale=3.0), want)
    assert_same(compiled(x_of(3), fresh(), torch.ones(4), scale=3.0), want)
    assert_same(compiled(x_of(3), fresh(), shift=None, scale=2.0), Model()(x_of(3), fresh(), scale=2.0))


OTHERS: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: x_of(2),
    "strides": lambda: x_of(4).T,
    "expanded": lambda: x_of(1).expand(3, 4),
    "an offset": lambda: x_of(4)[1:],
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_shape_or_layout_is_another_program(compiled: kimigraph.Compiled, what: str) -> None:
    cache, expected, x = fresh(), fresh(), OTHERS[what]()
    for _ in range(2):
        assert_same(compiled(x, cache), Model()(x, expected))
    torch.testing.assert_close(cache, expected)


def test_another_dtype_is_another_program() -> None:
    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    compiled = kimigraph.optimize(Doubled(), (x_of(2),), REFERENCE)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert torch.equal(compiled(x_of(2).to(dtype)), x_of(2).to(dtype) * 2)


def test_programs_in_memory_are_bounded_and_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[int] = []
    original = api.capture_module

    def counted(module: Any, args: Any, *rest: Any) -> Any:
        captures.append(args[0].shape[0])
        return original(module, args, *rest)

    monkeypatch.setattr(api, "capture_module", counted)
    compiled = kimigraph.optimize(Model(), (x_of(1), fresh()), replace(REFERENCE, max_shapes=2))
    first = Path(str(compiled.report().artifact))
    for rows in (2, 1, 2, 1, 3, 1, 2):
        assert_same(compiled(x_of(rows), fresh()), Model()(x_of(rows), fresh()))
    assert captures == [1, 2, 3, 2]
    assert first.exists()
    compiled(x_of(4), fresh())
    compiled(x_of(5), fresh())
    assert not first.exists()


def test_programs_of_one_model_share_its_weights() -> None:
    model = Model()
    compiled = kimigraph.optimize(model, (x_of(3), fresh()), REFERENCE)
    compiled(x_of(2), fresh())
    model.weight.mul_(2)
    for rows in (2, 3):
        assert_same(compiled(x_of(rows), fresh()), model(x_of(rows), fresh()))


def test_cache_spec_and_new_caches(compiled: kimigraph.Compiled) -> None:
    (spec,) = compiled.cache_spec
    assert (spec.source, spec.shape, spec.dtype) == ("cache.0.sum", (4,), "float32")
    caches = compiled.new_caches()
    assert list(caches) == ["cache.0.sum"] and not caches["cache.0.sum"].any()
    assert_same(compiled(x_of(3), caches), Model()(x_of(3), fresh()))


def test_report_and_explain(compiled: kimigraph.Compiled) -> None:
    report = compiled.report()
    assert (report.source, report.target, report.cache["status"]) == ("Model", "cpu:reference", "miss")
    assert [entry["rule"] for entry in report.fusions] == [
        "raise-kda", "raise-attention-residual", "raise-cache-writes", "raise-norms", "raise-moe",
        "fuse-lightning-indexer", "fuse-sparse-attention", "fuse-indexer-attention",
        "merge-horizontal", "fuse-pointwise",
    ]  # fmt: skip
    assert "came near" in compiled.explain("fuse-sparse-attention")
    with pytest.raises(UsageError, match="fuse-nothing left no remark"):
        compiled.explain("fuse-nothing")
    again = kimigraph.optimize(Model(), (x_of(3), fresh()), REFERENCE)
    assert again.report().cache["status"] == "hit"
    assert_same(again(x_of(3), fresh()), Model()(x_of(3), fresh()))


def test_verify_is_honoured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import kimigraph.verify as verification

    config = CompileConfig(target="cpu:reference", verify=True)
    report = kimigraph.optimize(Model(), (x_of(3), fresh()), config).report()
    assert report.verify is not None and report.verify["passed"]
    original = verification.run_artifact

    def wrong(*args: Any) -> Any:
        values = original(*args).values
        return verification.StepValues({**values, "cache.0.sum": values["cache.0.sum"] + 1})

    monkeypatch.setattr(verification, "run_artifact", wrong)
    with pytest.raises(NumericsError, match=r"cache\.0\.sum differs by 1 absolute"):
        kimigraph.optimize(Model(), (x_of(3), fresh()), config)


def test_save_and_load_in_the_same_process(compiled: kimigraph.Compiled, tmp_path: Path) -> None:
    saved = compiled.save(tmp_path / "saved")
    compiled.save(saved)
    assert not list(saved.rglob("__pycache__")) and not list(saved.rglob("*.safetensors"))
    with pytest.raises(UsageError, match=r"holds no weights: pass weights=model.state_dict\(\)"):
        kimigraph.load(saved)
    loaded = kimigraph.load(saved, Model().state_dict())
    assert_same(loaded(x_of(3), cache=fresh()), Model()(x_of(3), fresh()))
    assert_same(loaded(cache=fresh(), x=x_of(3)), Model()(x_of(3), fresh()))
    assert loaded.report().artifact == str(saved)
    assert list(loaded.new_caches()) == ["cache.0.sum"]
    with pytest.raises(TypeError, match=r"\(2, 4\), the program was compiled for"):
        loaded(x_of(2), fresh())
    with pytest.raises(TypeError, match="takes the arguments x, cache; given were x, cache, scale"):
        loaded(x_of(3), fresh(), scale=2.0)
    with pytest.raises(UsageError, match="explain what optimize"):
        loaded.explain("raise-kda")
    (saved / "program.py").write_text("")
    with pytest.raises(CorruptArtifactError):
        kimigraph.load(saved, Model().state_dict())


LOADED = """
import sys, torch, kimigraph
weights, x = torch.load(sys.argv[2], weights_only=True)
compiled = kimigraph.load(sys.argv[1], weights)
cache = compiled.new_caches()
result = compiled(x, cache=cache)
torch.save((result["y"], cache["cache.0.sum"]), sys.argv[3])
print(result["rest"][1:], [name for name in sys.modules if name.startswith("transformers")])
"""


def test_a_saved_program_loads_in_a_new_process(
    compiled: kimigraph.Compiled, tmp_path: Path, python: Callable[..., str]
) -> None:
    saved = compiled.save(tmp_path / "saved")
    torch.save((Model().state_dict(), x_of(3)), tmp_path / "in.pt")
    assert python(LOADED, saved, tmp_path / "in.pt", tmp_path / "out.pt").strip() == "(None, 7) []"
    y, total = torch.load(tmp_path / "out.pt", weights_only=True)
    cache = {"cache.0.sum": torch.zeros(4)}
    torch.testing.assert_close(y, Model()(x_of(3), cache)["y"])
    torch.testing.assert_close(total, cache["cache.0.sum"])


def test_a_loaded_random_model_has_its_own_weights(kimi: str, tmp_path: Path) -> None:
    """Its weights are seeded with 5, the example inputs with 2."""
    from kimigraph.compiler import compile_source
    from kimigraph.run import run_artifact

    config = CompileConfig(target="cpu:reference", context=12, seed=2)
    compile_source(kimi, [config], tmp_path / "out", print)
    loaded = kimigraph.load(tmp_path / "out")
    model, args, _ = load_source(kimi, config).build(4)
    _, same, _ = load_source(kimi, config).build(4)
    with torch.no_grad():
        want = model(*args)
    torch.testing.assert_close(loaded(*same), want, atol=1e-5, rtol=1e-4)
    for name, tensor in args[2].items():
        torch.testing.assert_close(same[2][name], tensor, atol=1e-5, rtol=1e-4)
    assert run_artifact(tmp_path / "out", None, None, 1)["passed"] is True


def test_a_model_of_the_package_is_optimized_like_any_other(kimi: str) -> None:
    config = CompileConfig(target="cpu:reference", context=12)
    source = load_source(kimi, config)
    model, args, _ = source.build(5)
    compiled = kimigraph.optimize(model, args, config)
    counts = {entry["rule"]: entry["count"] for entry in compiled.report().fusions}
    assert counts.pop("merge-horizontal") > 0 and counts.pop("fuse-pointwise") > 0
    assert counts.pop("raise-norms") > 0
    assert counts == {
        "raise-kda": 1,
        "raise-attention-residual": 4,
        "raise-moe": 1,
        "raise-cache-writes": 0,
        "fuse-lightning-indexer": 1,
        "fuse-sparse-attention": 1,
        "fuse-indexer-attention": 0,
    }
    _, same, _ = source.build(5)
    with torch.no_grad():
        want = model(*args)
    torch.testing.assert_close(compiled(*same), want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(same[2], args[2], atol=1e-5, rtol=1e-4)
    assert {spec.source for spec in compiled.cache_spec} == set(args[2])
    assert "passed" in compiled.explain("raise-kda")


def test_a_dataclass_like_result_comes_back_as_it_is() -> None:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class Step(nn.Module):
        def forward(self, x: Tensor) -> CausalLMOutputWithPast:
            return CausalLMOutputWithPast(loss=None, logits=x + 1)

    result = kimigraph.optimize(Step(), (x_of(2),), REFERENCE)(x_of(2))
    assert isinstance(result, CausalLMOutputWithPast)
    assert result.loss is None
    torch.testing.assert_close(result.logits, x_of(2) + 1)


def test_two_equal_results_are_two_tensors() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x + 1, x + 1

    first, second = kimigraph.optimize(Twice(), (x_of(2),), REFERENCE)(x_of(2))
    first.zero_()
    torch.testing.assert_close(second, x_of(2) + 1)


def test_a_result_that_is_a_view_of_an_input_stays_one() -> None:
    class View(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(-1)

    big = torch.arange(9.0)
    result = kimigraph.optimize(View(), (big[1:5],), REFERENCE)(big[1:5])
    assert torch.equal(result, big[1:5]) and result.data_ptr() == big[1:5].data_ptr()


def test_errors_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    example = (x_of(3), fresh())
    for fields, message in (
        ({"dtype": "bfloat16"}, "dtype does not apply"),
        ({"overrides": (("a", "1"),)}, "overrides"),
    ):
        with pytest.raises(UsageError, match=message):
            kimigraph.optimize(Model(), example, CompileConfig(**fields))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="runs on a CUDA device"):
        kimigraph.optimize(Model(), example, CompileConfig(target="cuda"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(sys.modules, "triton", object())
    with pytest.raises(UsageError, match="set TRITON_INTERPRET=1 before the first import of triton"):
        kimigraph.optimize(Model(), example, CompileConfig(target="cpu"))

    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.5, training=True)

    with pytest.raises(CaptureError, match="random numbers"):
        kimigraph.optimize(Drops(), (x_of(2),), REFERENCE)
    with pytest.raises(UsageError, match="nothing is compiled yet"):
        kimigraph.Compiled(lambda args, kwargs: None).report()
