"""HTML as values: text is escaped where it enters, so that nothing of a model can become markup."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

VOID = frozenset(("br", "meta", "link", "input"))
_NUMBER = '<td class="number">'


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Child = str | int | float | None | Iterable["Child"]


def element(tag: str, *children: Child, **attributes: Any) -> Html:
    """``<tag ...>children</tag>``.

    Plain text is escaped, ``Html`` is not, None is left out. Attributes: an underscore at the end of a name is dropped
    (``class_``), one inside becomes a dash, True is an attribute without a value, None and False are none.
    """
    opening = tag + "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in VOID:
        return Html(f"<{opening}>")
    return Html(f"<{opening}>{join(children)}</{tag}>")


def join(children: Iterable[Child]) -> Html:
    """The children one after the other."""
    return Html("".join(_text(child) for child in children))


def table(headings: Sequence[str], rows: Iterable[Iterable[Child]], **attributes: Any) -> Html:
    """A table in a frame that scrolls sideways; a cell that ``number`` made stays one, and its heading follows it."""
    cells = [[_cell(cell) for cell in row] for row in rows]
    numeric = {column for row in cells for column, cell in enumerate(row) if cell.startswith(_NUMBER)}
    kinds = ["number" if column in numeric else None for column, _ in enumerate(headings)]
    heads = [element("th", text, scope="col", class_=kind) for text, kind in zip(headings, kinds, strict=True)]
    head = element("thead", element("tr", heads))
    body = element("tbody", [element("tr", row) for row in cells])
    return element("div", element("table", head, body, **attributes), class_="scroll")


def number(text: Child) -> Html:
    """A table cell for a number."""
    return element("td", text, class_="number")


def _cell(cell: Child) -> Html:
    return cell if isinstance(cell, Html) and cell.startswith(_NUMBER) else element("td", cell)


def _text(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, str | int | float):
        return escape(str(child))
    return join(child)


def _attribute(name: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'
