"""Which published tensors a model's own tensor is made of.

A model names and packs its weights as its code needs them; a checkpoint as those who published it did. A ``Layout``
says for a family of models how to find one in the other. A tensor of the model is filled piece by piece.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
"""Shapes of all the model's tensors, by their own names."""


@dataclass(frozen=True)
class Piece:
    """``target[put]`` is the published tensor ``source``, or of its rows those of ``take`` (first, behind the last).

    ``padded``: the published tensor may have more elements, which are zero, and dims of size 1.
    """

    source: str
    put: tuple[int | slice, ...] = ()
    take: tuple[int, int] | None = None
    padded: bool = False


class Rule(Protocol):
    """One way in which checkpoints hold some of a model's tensors."""

    def pieces(self, name: str, shapes: Shapes) -> list[Piece]:
        """What the model's tensor ``name`` is made of; empty where the rule does not apply."""
        ...


@dataclass(frozen=True)
class Renamed:
    """The tensors that match ``pattern`` are published as ``source`` (a template of ``re``)."""

    pattern: str
    source: str
    padded: bool = False

    def pieces(self, name: str, shapes: Shapes) -> list[Piece]:
        match = re.fullmatch(self.pattern, name)
        return [Piece(match.expand(self.source), padded=self.padded)] if match else []


@dataclass(frozen=True)
class Concatenated:
    """Published apart, as ``sources`` of equal size; the model has them one below the other."""

    pattern: str
    sources: tuple[str, ...]

    def pieces(self, name: str, shapes: Shapes) -> list[Piece]:
        match = re.fullmatch(self.pattern, name)
        if match is None:
            return []
        rows = shapes[name][0] // len(self.sources)
        return [
            Piece(match.expand(source), (slice(part * rows, (part + 1) * rows),))
            for part, source in enumerate(self.sources)
        ]


@dataclass(frozen=True)
class Stacked:
    """Published expert by expert (``{expert}`` in ``sources``); the model has [experts, rows, columns], and for several
    sources their rows one below the other."""

    pattern: str
    sources: tuple[str, ...]

    def pieces(self, name: str, shapes: Shapes) -> list[Piece]:
        match = re.fullmatch(self.pattern, name)
        if match is None:
            return []
        experts, rows = shapes[name][0], shapes[name][1] // len(self.sources)
        templates = [match.expand(source) for source in self.sources]
        return [
            Piece(template.format(expert=expert), (expert, slice(part * rows, (part + 1) * rows)))
            for expert in range(experts)
            for part, template in enumerate(templates)
        ]


@dataclass(frozen=True)
class Part:
    """Published in one tensor ``source`` with ``siblings``; the model has them apart. ``siblings`` lists all the parts,
    as the model names them, in order."""

    pattern: str
    source: str
    siblings: tuple[str, ...]

    def pieces(self, name: str, shapes: Shapes) -> list[Piece]:
        match = re.fullmatch(self.pattern, name)
        if match is None:
            return []
        first = 0
        for sibling in (match.expand(template) for template in self.siblings):
            if sibling == name:
                return [Piece(match.expand(self.source), take=(first, first + shapes[name][0]))]
            if sibling not in shapes:
                return []
            first += shapes[sibling][0]
        return []


@dataclass(frozen=True)
class Layout:
    """How checkpoints of a family hold its models' tensors.

    ``rules`` come after the model's own name. Published names may have one of ``prefixes`` in front. Of ``tied`` names
    a model has both, apart or as one tensor. Tensors that match ``ignored`` belong to parts that the model leaves out.
    """

    rules: tuple[Rule, ...] = ()
    prefixes: tuple[str, ...] = ("",)
    tied: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()

    def forms(self, name: str, shapes: Shapes) -> Iterator[list[Piece]]:
        """The ways in which the model's tensor ``name`` may have been published, the likeliest first."""
        yield [Piece(name)]
        for rule in self.rules:
            if pieces := rule.pieces(name, shapes):
                yield pieces

    def ignores(self, published: str) -> bool:
        """Whether no model of the family has a place for the published tensor."""
        return any(re.search(pattern, published) for pattern in self.ignored)

    def without_layers(self, numbers: range) -> "Layout":
        """The layout of a model that has no place for the layers of these numbers, such as those that guess further
        tokens."""
        beyond = rf"(^|\.)layers\.({'|'.join(map(str, numbers))})\."
        return replace(self, ignored=(*self.ignored, beyond)) if numbers else self
