"""Text of a growing list of tokens, piece by piece."""

from collections.abc import Callable

INCOMPLETE = "�"
"""What tokenizers put for bytes that are no character yet."""


class TextStream:
    """Text as it becomes certain: a character whose bytes are spread over several tokens comes whole, once."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._shown = ""

    def add(self, token: int) -> str:
        """The text that the token adds; empty while it ends within a character."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        return "" if text.endswith(INCOMPLETE) else self._new(text)

    def end(self) -> str:
        """What was held back."""
        return self._new(self._decode(self._tokens)) if self._tokens else ""

    def _new(self, text: str) -> str:
        if not text.startswith(self._shown):  # a later token changed how an earlier one reads
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new
