"""SOURCE, as typed on the command line, to a model."""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from kimigraph.capture.function_source import function_source
from kimigraph.capture.source import ModelSource, StepPart, read_config
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.weights import weight_files

MODEL_TYPES = ("kimi_k3", "kimi_k31", "kimi_linear", "deepseek_v32", "glm_moe_dsa", "glm5_next", "glm5_next_text")
"""Model types of ``config.json`` that capture knows."""


FILES = (".onnx", ".pt2")
"""Suffixes of files that are sources."""


def load_source(source: str, config: CompileConfig, rows: bool = False, part: StepPart = "step") -> ModelSource:
    """Resolve SOURCE: a directory with ``config.json`` (and ``*.safetensors``), ``package.module:function``, or a file
    (``.onnx``, ``.pt2``).

    ``rows`` asks for a step as generation takes it, ``step(input_ids [B, S], lengths [B], cache) -> logits [B, 1, V]``
    of the last token, over rows of their own length that continue; only directories have one. Of a step that verifies
    drafts the logits are those of all tokens. ``part`` says what of the model that step is.

    Builds nothing large: weights are made or read when the model is first needed. Raises UsageError, one paragraph that
    names the thing and the remedy, for a source that cannot be.
    """
    path = Path(source)
    if path.is_dir():
        return _directory_source(path, config, rows, part)
    if path.suffix in FILES and path.is_file():
        return _file_source(path, config, rows)
    if path.exists():
        raise UsageError(
            f"{source} is a file: give a .onnx or .pt2 file, the directory that holds config.json, or "
            "package.module:function"
        )
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", source):
        if rows:
            raise UsageError(f"{source} is a function: generation takes the directory of a model, with its config.json")
        return function_source(source, config)
    raise UsageError(
        f"{source} does not exist: give a directory with config.json and *.safetensors, a .onnx or .pt2 file, or "
        "package.module:function"
    )


def _file_source(path: Path, config: CompileConfig, rows: bool) -> ModelSource:
    if rows:
        raise UsageError(f"{path} is one step: generation takes the directory of a model, with its config.json")
    if path.suffix == ".pt2":
        from kimigraph.capture.pt2.source import pt2_source

        return pt2_source(path, config)
    from kimigraph.capture.onnx.source import onnx_source

    return onnx_source(path, config)


def weights_of_file(path: Path) -> dict[str, Tensor]:
    """The parameters and buffers in a ``.onnx`` or ``.pt2`` file, by name. Errors as in ``load_source``."""
    if path.suffix == ".onnx":
        from kimigraph.capture.onnx.source import onnx_weights

        return onnx_weights(path)
    module = load_source(str(path), CompileConfig()).loaded.module
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _directory_source(directory: Path, config: CompileConfig, rows: bool, part: StepPart) -> ModelSource:
    document = read_config(directory)
    kind = document["model_type"]
    if kind not in MODEL_TYPES:
        raise UsageError(
            f"{directory / 'config.json'}: model_type {kind!r} is not known; known are {', '.join(MODEL_TYPES)}. "
            "Another model can be given as package.module:function"
        )
    seed = _weight_seed(document, config, directory)
    if kind in ("kimi_k3", "kimi_k31"):
        from kimigraph.capture.kimi_source import kimi_source

        if part != "step":
            raise UsageError(
                f"{directory / 'config.json'}: checkpoints of {kind} have no layer for the draft mtp: use ngram or a "
                "smaller model"
            )
        return kimi_source(directory, document, config, seed, last_only=rows and config.phase != "verify")
    from kimigraph.capture.transformers_source import transformers_source

    if part == "draft_head":
        from kimigraph.capture.draft_head import draft_head_source

        return draft_head_source(directory, document, config, seed)
    # A static cache counts the tokens of all its sequences together, and drafts stay one by one.
    return transformers_source(
        directory,
        document,
        config,
        seed,
        rows=rows or config.phase == "verify",
        with_hidden=part == "step_with_hidden",
    )


def _weight_seed(document: dict[str, Any], config: CompileConfig, directory: Path) -> int | None:
    """The seed of random weights, or None for weights from files, which then must be there."""
    asked = document.get("random_weights")
    if config.random_weights or (asked is not None and not list(directory.glob("*.safetensors"))):
        seed = asked.get("seed") if isinstance(asked, dict) else None
        return config.seed if seed is None else int(seed)
    weight_files(directory)
    return None
