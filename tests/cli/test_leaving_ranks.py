"""What a rank does at the end of a command: groups over Gloo end before the process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
import typer

from kimigraph.cli.errors import reports_errors
from kimigraph.ir import ranks
from kimigraph.ir.errors import UsageError


@pytest.fixture
def joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of this process alone, as torchrun would have it."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_who_ends_well_leaves_and_who_fails_does_not_wait(joined: None) -> None:
    @reports_errors
    def fails() -> None:
        raise UsageError("no")

    with pytest.raises(typer.Exit):
        fails()
    assert dist.is_initialized()
    reports_errors(lambda: None)()
    assert not dist.is_initialized()


def test_groups_of_another_backend_stay(joined: None) -> None:
    ranks.leave("nccl")
    assert dist.is_initialized()
    ranks.leave("gloo")
    assert not dist.is_initialized()
    ranks.leave("gloo")  # there is none
