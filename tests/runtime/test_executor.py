"""The executor: what it accepts, what it refuses, and that caches and state are the caller's own memory."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kimigraph.ir.errors import CorruptArtifactError, KimigraphError, UsageError
from kimigraph.runtime.executor import Executor, InputMismatchError, require_runnable


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), torch.full((4,), 0.5)


def weights(toy: Any) -> dict[str, Tensor]:
    return dict(toy.state_dict())


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(4, 4),
    "transposed": lambda: torch.randn(4, 4).T,
    "with an offset": lambda: torch.randn(5, 4)[1:],
    "unaligned": lambda: torch.randn(17)[1:].view(4, 4),
    "every other row": lambda: torch.randn(8, 4)[::2],
    "expanded": lambda: torch.randn(4).expand(4, 4),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_input_of_any_layout_gives_the_eager_result(built: Path, toy: Any, layout: str) -> None:
    x = LAYOUTS[layout]()
    kept = x.clone()
    y, positive = Executor(built, weights(toy))(x, torch.zeros(4))
    torch.testing.assert_close(y, toy(x, {"cache.0.sum": torch.zeros(4)})["y"])
    torch.testing.assert_close(positive, y.relu())
    assert torch.equal(x, kept)


def test_caches_are_updated_in_the_callers_memory(built: Path, toy: Any) -> None:
    x, cache = inputs()
    expected = cache.clone()
    executor = Executor(built, weights(toy))
    address = cache.data_ptr()
    for _ in range(3):
        executor(x, cache)
        expected += toy(x, {"cache.0.sum": torch.zeros(4)})["y"].sum(0)
    assert cache.data_ptr() == address
    torch.testing.assert_close(cache, expected)


def test_a_cache_that_is_a_slice_of_a_pool_changes_there_alone(built: Path, toy: Any) -> None:
    x, _ = inputs()
    pool = torch.zeros(3, 4)
    Executor(built, weights(toy))(x, pool[1])
    assert pool[1].abs().sum() > 0
    assert not pool[0].any() and not pool[2].any()


def test_state_that_the_model_keeps_is_the_models_own(built: Path, toy: Any) -> None:
    executor = Executor(built, weights(toy))
    x, cache = inputs()
    executor(x, cache)
    executor(x, cache)
    assert toy.steps.item() == 2


def test_weights_are_bound_not_copied(built: Path, toy: Any) -> None:
    executor = Executor(built, weights(toy))
    x, cache = inputs()
    toy.weight.zero_()
    assert not executor(x, cache)[0].any()


BAD: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Any, ...]], str]] = {
    "shape": (lambda x, cache: (x[:3], cache), r"x is torch.float32 \(3, 4\), the program was compiled for"),
    "dtype": (lambda x, cache: (x.half(), cache), "x is torch.float16"),
    "device": (lambda x, cache: (x.to("meta"), cache), "x is on meta, the program runs on cpu"),
    "count": (lambda x, cache: (x,), "takes 2 tensors, 1 were given"),
    "no tensor": (lambda x, cache: (x, 3.0), "cache.0.sum is a float"),
    "strides of a cache": (lambda x, cache: (x, torch.zeros(8)[::2]), "cache.0.sum has strides .*new_caches"),
    "expanded cache": (lambda x, cache: (x, torch.zeros(1).expand(4)), "cache.0.sum has strides .*new_caches"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_tensor_that_does_not_fit_is_a_type_error_that_says_what_does(built: Path, toy: Any, what: str) -> None:
    change, message = BAD[what]
    x, cache = inputs()
    kept = cache.clone()
    with pytest.raises(TypeError, match=message) as raised:
        Executor(built, weights(toy))(*change(x, cache))
    assert isinstance(raised.value, InputMismatchError)
    assert isinstance(raised.value, KimigraphError)
    assert torch.equal(cache, kept)


def test_missing_weights_are_named(built: Path, toy: Any) -> None:
    with pytest.raises(UsageError, match="weights that were not given: weight"):
        Executor(built, {"steps": toy.steps})


def test_a_weight_of_another_shape_or_dtype_is_refused(built: Path, toy: Any) -> None:
    with pytest.raises(UsageError, match=r"weight is torch\.float64"):
        Executor(built, {"steps": toy.steps, "weight": toy.weight.double()})


def test_executors_of_one_artifact_are_apart(built: Path, toy: Any) -> None:
    x, cache = inputs()
    first = Executor(built, weights(toy))
    second = Executor(built, {"weight": torch.eye(4), "steps": torch.zeros(1)})
    torch.testing.assert_close(second(x, cache.clone())[0], 2 * x)
    torch.testing.assert_close(first(x, cache.clone())[0], 2 * x @ toy.weight)


def test_an_artifact_may_move(built: Path, toy: Any, tmp_path: Path) -> None:
    moved = tmp_path / "a folder with spaces" / "кімі"
    shutil.copytree(built, moved)
    x, cache = inputs()
    torch.testing.assert_close(Executor(moved, weights(toy))(x, cache)[0], 2 * x @ toy.weight)
    assert not list(moved.rglob("__pycache__"))


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a bit of program.py": lambda path: _flip(path / "program.py"),
    "program.py cut short": lambda path: (path / "program.py").write_bytes((path / "program.py").read_bytes()[:-9]),
    "a file missing": lambda path: (path / "support" / "seeded.py").unlink(),
    "manifest cut short": lambda path: (path / "manifest.json").write_bytes(
        (path / "manifest.json").read_bytes()[:200]
    ),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_artifact_is_refused_before_it_runs(built: Path, toy: Any, tmp_path: Path, damage: str) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(built, broken)
    DAMAGES[damage](broken)
    with pytest.raises(CorruptArtifactError, match="broken") as raised:
        Executor(broken, weights(toy))
    assert raised.value.exit_code == 5


def test_the_interpreter_cannot_be_had_once_triton_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(sys.modules, "triton", object())
    with pytest.raises(UsageError, match=r"TRITON_INTERPRET=1 before the first import of triton.*cpu:reference"):
        require_runnable("cpu")


def test_cuda_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for target in ("cuda", "cuda:sm_90"):
        with pytest.raises(UsageError, match=f"'{target}' runs on a CUDA device.*cpu:reference"):
            require_runnable(target)


def test_compiled_kernels_do_not_run_in_an_interpreting_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UsageError, match="unset TRITON_INTERPRET"):
        require_runnable("cuda")
