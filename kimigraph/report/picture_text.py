"""Pictures of boxes and arrows as text: DOT for Graphviz, Mermaid for what renders Markdown."""

from collections.abc import Iterator
from html import escape

from kimigraph.report.picture import Box, Picture

COLORS = {
    "input": "#dbe9f6",
    "state": "#d9f0ea",
    "output": "#dbe9f6",
    "operator": "#fde0c5",
    "region": "#e2f0d9",
    "group": "#f3f3f3",
    "call": "#ffffff",
}
"""Fill of a box by its kind."""


EDGE, FAR = "#555555", "#b8b8b8"
"""Colors of arrows from one layer to the next, and of those that pass over layers."""


def as_dot(picture: Picture) -> str:
    """A ``digraph``: frames are clusters, states are cylinders, arrows over layers are pale."""
    lines = [
        "digraph program {",
        f"  graph [label={_quoted(picture.title)}, labelloc=t, fontname=Helvetica, fontsize=16, ranksep=0.4];",
        f'  node [shape=box, style="filled,rounded", fontname=Helvetica, fontsize=11, color="{EDGE}"];',
        f'  edge [fontname=Helvetica, fontsize=9, color="{EDGE}", fontcolor="{EDGE}", arrowsize=0.7];',
    ]
    for number, (frame, boxes) in enumerate(_framed(picture)):
        indent = "    " if frame else "  "
        if frame:
            lines += [
                f"  subgraph cluster_{number} {{",
                f'    graph [label={_quoted(frame)}, labeljust=l, style=rounded, color="{FAR}", fontsize=12];',
            ]
        for box in boxes:
            shape = ", shape=cylinder, style=filled" if box.kind == "state" else ""
            label = _titled(box.lines)
            lines.append(f'{indent}{_quoted(box.name)} [label={label}, fillcolor="{COLORS[box.kind]}"{shape}];')
        lines += ["  }"] if frame else []
    for arrow in picture.arrows:
        facts = [f"label={_quoted(arrow.label)}"] if arrow.label and not arrow.far else []
        facts += [f'color="{FAR}", weight=0, penwidth=0.8'] if arrow.far else ["weight=4"]
        lines.append(f"  {_quoted(arrow.source)} -> {_quoted(arrow.target)} [{', '.join(facts)}];")
    return "\n".join([*lines, "}", ""])


def as_mermaid(picture: Picture) -> str:
    """A ``flowchart``: frames are subgraphs, states are cylinders, arrows over layers are dotted."""
    names = {box.name: f"n{number}" for number, box in enumerate(picture.boxes)}
    lines = ["---", f"title: {_plain(picture.title)}", "---", "flowchart TD"]
    frames: list[str] = []
    for number, (frame, boxes) in enumerate(_framed(picture)):
        indent = "    " if frame else "  "
        if frame:
            lines.append(f'  subgraph s{number}["{_plain(frame)}"]')
            frames.append(f"s{number}")
        for box in boxes:
            first, *rest = map(_plain, box.lines)
            text = "<br/>".join([f"<b>{first}</b>" if rest else first, *rest])
            opened, closed = ("[(", ")]") if box.kind == "state" else ("[", "]")
            lines.append(f'{indent}{names[box.name]}{opened}"{text}"{closed}:::{box.kind}_box')
        lines += ["  end"] if frame else []
    far: list[str] = []
    for number, arrow in enumerate(picture.arrows):
        line = "-.->" if arrow.far else f'-->|"{_plain(arrow.label)}"|' if arrow.label else "-->"
        lines.append(f"  {names[arrow.source]} {line} {names[arrow.target]}")
        far += [str(number)] if arrow.far else []
    # Mermaid reads some words alone, such as "call", as its own.
    lines += [f"  classDef {kind}_box fill:{color},stroke:{EDGE},color:#222" for kind, color in COLORS.items()]
    lines += (
        [f"  classDef frame_box fill:#fafafa,stroke:{FAR}", f"  class {','.join(frames)} frame_box"] if frames else []
    )
    lines += [f"  linkStyle {','.join(far)} stroke:{FAR}"] if far else []
    return "\n".join([*lines, ""])


def _framed(picture: Picture) -> Iterator[tuple[str, list[Box]]]:
    """The boxes by frame, in the order in which frames begin."""
    frames: dict[str, list[Box]] = {}
    for box in picture.boxes:
        frames.setdefault(box.frame, []).append(box)
    yield from frames.items()


def _titled(lines: tuple[str, ...]) -> str:
    """The lines of a box as a label of Graphviz, the first of several in bold."""
    first, *rest = map(escape, lines)
    return f"<{'<br/>'.join([f'<b>{first}</b>', *rest])}>" if rest else _quoted(lines[0])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _plain(text: str) -> str:
    """Text for Mermaid: what it would read as markup is written as an entity."""
    entities = {"&": "#amp;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "#": "#35;", "\n": " "}
    return "".join(entities.get(letter, letter) for letter in text)
