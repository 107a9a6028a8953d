"""What all tests share: no GPU is no failure, one thread, and a compile cache of their own."""

from collections.abc import Generator

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``slow`` run when asked for; those marked ``gpu`` are skipped where there is none."""
    if not config.getoption("--slow"):
        chosen = [item for item in items if "slow" not in item.keywords]
        config.hook.pytest_deselected(items=[item for item in items if "slow" in item.keywords])
        items[:] = chosen
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """An empty compile cache for each test, so that none sees what another one compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIMIGRAPH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
