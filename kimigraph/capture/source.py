"""What a SOURCE names: a model with one example step."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import nn

from kimigraph.capture.example import StepInput
from kimigraph.capture.hints import CaptureHints
from kimigraph.capture.identity import call_digest, module_identity
from kimigraph.capture.shape import StepShape
from kimigraph.ir.errors import UsageError

StepPart = Literal["step", "step_with_hidden", "draft_head"]
"""What of a model generation asks for: its step, the same that also gives what its head reads, or the layer that
guesses further tokens from that."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one call."""


@dataclass(frozen=True)
class Loaded:
    """A built model. ``arguments(length)`` makes new example arguments, ``length`` tokens into the sequences (None: the
    source's own choice)."""

    module: nn.Module
    arguments: Callable[[int | None], Arguments]


@dataclass(frozen=True)
class ModelSource:
    """A resolved SOURCE.

    ``load(device)`` builds the model (on ``meta``: without weights; ``unfilled``: on the CPU, but nobody gives the
    weights their values, so that they take no time and no memory). ``shape`` is None where the source itself gives
    the example inputs, else ``inputs`` says what they look like. ``document`` is the configuration as used, overrides
    included. ``weight_seed`` is the seed of random weights.
    """

    name: str
    model_type: str
    phase: str
    load: Callable[[str], Loaded]
    shape: StepShape | None = None
    inputs: tuple[StepInput, ...] = ()
    hints: CaptureHints = field(default_factory=CaptureHints)
    document: dict[str, Any] = field(default_factory=lambda: {})
    random_weights: bool = False
    weight_seed: int | None = None
    notes: tuple[str, ...] = ()

    @cached_property
    def loaded(self) -> Loaded:
        """The model with its weights on the CPU; built once."""
        return self.load("cpu")

    @property
    def shape_key(self) -> str:
        """The shape as text, such as ``decode-b2-t1-c256``."""
        return self.shape.text if self.shape is not None else f"{self.phase}-{call_digest(*self.build()[1:])}"

    @cached_property
    def outline(self) -> Loaded:
        """The model as tracing needs it: no weight has a value, unless ``loaded`` was there already."""
        return self.loaded if "loaded" in vars(self) else self.load("unfilled")

    def build(self, length: int | None = None) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The eager module with weights, and seeded example arguments ``length`` tokens into the sequences.

        The default length is context - tokens for decode and 0 for prefill. Each call makes new tensors.
        """
        return self.loaded.module, *self.loaded.arguments(length)

    @cached_property
    def key(self) -> dict[str, Any]:
        """What identifies the captured graph before it is captured: plain JSON, equal in every process."""
        loaded = self.load("meta") if self.shape is not None else self.loaded
        call = loaded.arguments(None) if self.shape is None else None
        return {
            "document": self.document,
            "random_weights": self.random_weights,
            **module_identity(loaded.module, call),
        }


def read_config(directory: Path) -> dict[str, Any]:
    """The ``config.json`` of a directory; UsageError when there is none or it is not a JSON object."""
    path = directory / "config.json"
    if not path.is_file():
        raise UsageError(f"{directory} has no config.json: give a directory with config.json and *.safetensors files")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("model_type"), str):
        raise UsageError(f"{path} names no model_type: it must be the config.json of a model")
    return document


def vocabulary_size(document: dict[str, Any]) -> int:
    """The tokens that the model of a configuration knows."""
    return int(document["vocab_size"] if "vocab_size" in document else document["text_config"]["vocab_size"])


def stop_ids(directory: Path, end: int | None) -> tuple[int, ...]:
    """The tokens that end a text: of ``generation_config.json``, else of the configuration, and the tokenizer's."""
    documents: list[dict[str, Any]] = []
    path = directory / "generation_config.json"
    if path.is_file():
        documents.append(json.loads(path.read_text(encoding="utf-8")))
    document = read_config(directory)
    documents += [document, document.get("text_config", {})]
    found = next((item["eos_token_id"] for item in documents if item.get("eos_token_id") is not None), [])
    ids = set(found if isinstance(found, list) else [found])
    if end is not None:
        ids.add(end)
    return tuple(sorted(ids))
