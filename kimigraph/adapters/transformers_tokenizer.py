# pyright: basic
# Reason: tokenizers of transformers carry no usable types.
"""The tokenizer that lies beside a model, through transformers."""

from pathlib import Path
from typing import Any

from kimigraph.ir.errors import UsageError

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model")
"""One of these is there where a directory has a tokenizer."""


class Tokenizer:
    """Text to tokens and back. ``end`` is the token that ends a text, or None."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.end: int | None = tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text``, with those that the tokenizer puts in front."""
        return [int(token) for token in self._tokenizer(text)["input_ids"]]

    def decode(self, tokens: list[int]) -> str:
        """The text of ``tokens``, special ones left out."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


def has_tokenizer(directory: Path) -> bool:
    """Whether ``directory`` holds a tokenizer's files."""
    return any((directory / name).is_file() for name in FILES)


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer of ``directory``; None where it has none, or transformers is not installed.

    Code that lies in the directory is not run: UsageError for a tokenizer that needs it, or cannot be read.
    """
    if not has_tokenizer(directory):
        return None
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return None
    try:
        return Tokenizer(AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True))
    except Exception as error:  # transformers raises what the tokenizer's files make it raise
        complaint = " ".join(str(error).split())[:300]
        raise UsageError(f"{directory}: its tokenizer cannot be read ({complaint}): give token ids") from error
