"""The pages say nothing that is not there: links lead somewhere, options, passes and make targets exist."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from kimigraph.cli.app import make_app
from kimigraph.passes import registered_passes

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
USER_PAGES = ["README.md", *(page for page in PAGES if page.startswith("docs/") and "decisions" not in page)]


def options(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from (option for option in parameter.opts if option.startswith("-"))
    for child in getattr(command, "commands", {}).values():
        yield from options(child)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text(encoding="utf-8"))
    missing = [
        target for target in targets if "://" not in target and not (ROOT / page).parent.joinpath(target).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("page", USER_PAGES)
def test_options_exist(page: str) -> None:
    known = {"--help", "--nproc-per-node", *options(typer.main.get_command(make_app()))}
    unknown: set[str] = set()
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", line))
        script = re.search(r"python ((?:bench|scripts)/\w+\.py)", line)
        of_script = {name for name in named if script and f'"{name}"' in (ROOT / script[1]).read_text(encoding="utf-8")}
        unknown |= named - known - of_script
    assert unknown == set()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = re.findall(r"(?:^|`)make ([a-z ]+)", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    targets = {target for words in named for target in words.split()}
    assert targets and [target for target in targets if f"\n{target}:" not in makefile] == []


def test_the_table_of_fusions_has_every_fusion_pass_and_no_other() -> None:
    page = (ROOT / "docs/fusions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z-]+)` \| [^|]+ \| `[a-z_]+`[^|]*\|", page, re.MULTILINE)
    assert rows == [name for name, pass_class in registered_passes().items() if pass_class.fusion]
