"""``--no-report`` of ``kimigraph compile``."""

from typing import Any


def test_the_report_is_on_unless_it_is_turned_off(cli: Any, compiler: Any) -> None:
    assert cli("compile", "model").exit_code == 0 and compiler.configs[0].report is True
    assert cli("compile", "model", "--no-report").exit_code == 0 and compiler.configs[-1].report is False
