"""Pictures of boxes and arrows as text: DOT for Graphviz, Mermaid for what renders Markdown."""

from collections.abc import Iterator

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


def as_dot(picture: Picture) -> str:
    """A ``digraph``: frames are clusters, states are cylinders."""
    lines = [
        "digraph program {",
        f"  label={_quoted(picture.title)};",
        '  node [shape=box, style="filled,rounded", fontname=Helvetica];',
    ]
    for number, (frame, boxes) in enumerate(_framed(picture)):
        indent = "    " if frame else "  "
        if frame:
            lines += [f"  subgraph cluster_{number} {{", f"    label={_quoted(frame)};"]
        for box in boxes:
            shape = ", shape=cylinder" if box.kind == "state" else ""
            label = _quoted("\n".join(box.lines))
            lines.append(f'{indent}{_quoted(box.name)} [label={label}, fillcolor="{COLORS[box.kind]}"{shape}];')
        lines += ["  }"] if frame else []
    for source, target, label in picture.arrows:
        shown = f" [label={_quoted(label)}]" if label else ""
        lines.append(f"  {_quoted(source)} -> {_quoted(target)}{shown};")
    return "\n".join([*lines, "}", ""])


def as_mermaid(picture: Picture) -> str:
    """A ``flowchart``: frames are subgraphs, states are cylinders."""
    names = {box.name: f"n{number}" for number, box in enumerate(picture.boxes)}
    lines = ["---", f"title: {_plain(picture.title)}", "---", "flowchart TD"]
    for number, (frame, boxes) in enumerate(_framed(picture)):
        indent = "    " if frame else "  "
        if frame:
            lines.append(f'  subgraph s{number}["{_plain(frame)}"]')
        for box in boxes:
            text = "<br/>".join(map(_plain, box.lines))
            opened, closed = ("[(", ")]") if box.kind == "state" else ("[", "]")
            lines.append(f'{indent}{names[box.name]}{opened}"{text}"{closed}:::{box.kind}')
        lines += ["  end"] if frame else []
    for source, target, label in picture.arrows:
        shown = f'-->|"{_plain(label)}"|' if label else "-->"
        lines.append(f"  {names[source]} {shown} {names[target]}")
    lines += [f"  classDef {kind} fill:{color},stroke:#666" for kind, color in COLORS.items()]
    return "\n".join([*lines, ""])


def _framed(picture: Picture) -> Iterator[tuple[str, list[Box]]]:
    """The boxes by frame, in the order in which frames begin."""
    frames: dict[str, list[Box]] = {}
    for box in picture.boxes:
        frames.setdefault(box.frame, []).append(box)
    yield from frames.items()


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _plain(text: str) -> str:
    """Text for Mermaid: what it would read as markup is written as an entity."""
    entities = {"&": "#amp;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "#": "#35;", "\n": " "}
    return "".join(entities.get(letter, letter) for letter in text)
