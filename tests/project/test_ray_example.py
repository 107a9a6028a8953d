"""The example of replicas behind Ray: with a stand-in for Ray, and with Ray itself where it is installed."""

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kimigraph import CompileConfig, Sampling

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "ray_replicas" / "replicas.py"


class Remote:
    """What ``ray.remote`` gives for a class or a function: it runs at once, in this process."""

    def __init__(self, target: Any, log: list[dict[str, Any]], options: dict[str, Any] | None = None) -> None:
        self._target, self._log, self._options = target, log, options or {}

    def options(self, **options: Any) -> "Remote":
        return Remote(self._target, self._log, options)

    def remote(self, *arguments: Any) -> Any:
        self._log.append({"target": self._target.__name__, **self._options})
        made = self._target(*arguments)
        return Actor(made, self._log) if isinstance(self._target, type) else made


class Actor:
    """An actor whose methods run at once."""

    def __init__(self, made: Any, log: list[dict[str, Any]]) -> None:
        self.generate = Remote(made.generate, log)


class Echo:
    """Generates each prompt backwards."""

    def __init__(self, source: str, config: CompileConfig) -> None:
        self.source = source

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Any]:
        return [SimpleNamespace(tokens=tuple(reversed(prompt))) for prompt in prompts]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, list[dict[str, Any]]]:
    """The example over a stand-in, and what it asked of Ray."""
    log: list[dict[str, Any]] = []
    ray = SimpleNamespace(remote=lambda target: Remote(target, log), get=lambda value: value, init=lambda: None)
    groups = SimpleNamespace(placement_group=lambda bundles, strategy: (bundles, strategy))
    strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group: group)
    for name, module in (
        ("ray", ray),
        ("ray.util.placement_group", groups),
        ("ray.util.scheduling_strategies", strategies),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("replicas", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "Generator", Echo)
    return module, log


def test_prompts_are_shared_out_and_come_back_in_order(
    example: tuple[ModuleType, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    module, log = example
    prompts = [part for ids in ("1,2", "3", "4,5,6") for part in ("--prompt-ids", ids)]
    module.main(["model", "--replicas", "2", "--target", "cpu:reference", *prompts])
    assert capsys.readouterr().out.splitlines() == ["2 1", "3", "6 5 4"]
    assert [entry["target"] for entry in log].count("Rank") == 2


def test_ranks_of_a_replica_find_one_another(example: tuple[ModuleType, list[dict[str, Any]]]) -> None:
    module, log = example
    replica = module.Replica("model", CompileConfig(target="cuda", tp=2, pp=2))
    ranks = [entry for entry in log if entry["target"] == "Rank"]
    assert len(replica.ranks) == len(ranks) == 4
    bundles, strategy = ranks[0]["scheduling_strategy"]
    assert bundles == [{"CPU": 1, "GPU": 1}] * 4 and strategy == "STRICT_PACK"
    told = [entry["runtime_env"]["env_vars"] for entry in ranks]
    assert [each["RANK"] for each in told] == ["0", "1", "2", "3"] and {each["WORLD_SIZE"] for each in told} == {"4"}
    assert len({each["MASTER_PORT"] for each in told}) == 1 and all(entry["num_gpus"] == 1 for entry in ranks)


@pytest.mark.slow
def test_with_ray_itself() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    asked = [str(EXAMPLE), str(ROOT / "examples" / "k31_tiny"), "--target", "cpu:reference", "--context", "32"]
    prompts = ["--prompt-ids", "1,2,3", "--prompt-ids", "7", "--max-new-tokens", "4"]
    done = subprocess.run([sys.executable, *asked, *prompts], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert [len(line.split()) for line in done.stdout.splitlines()[-2:]] == [4, 4]
