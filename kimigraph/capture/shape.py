"""The shape of one step: how many sequences, how many new tokens each, how large the caches."""

from dataclasses import dataclass

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError

DEFAULT_CONTEXT = 4096
DEFAULT_VERIFIED = 8


@dataclass(frozen=True)
class StepShape:
    """``batch`` sequences take ``tokens`` new tokens each; their caches hold ``context`` tokens."""

    phase: str
    batch: int
    tokens: int
    context: int

    @property
    def text(self) -> str:
        """The shape key, such as ``decode-b2-t1-c256``."""
        return f"{self.phase}-b{self.batch}-t{self.tokens}-c{self.context}"

    def notes(self, index_topk: int) -> tuple[str, ...]:
        """What a person should know about an indexer that picks ``index_topk`` tokens in this context."""
        if index_topk <= self.context:
            return ()
        return (
            f"index_topk {index_topk} is larger than the context {self.context}: the indexer picks every visible token",
        )

    @property
    def default_length(self) -> int:
        """Tokens in the caches before an example step: a prefill starts empty, a decode step fills the last places."""
        return 0 if self.phase == "prefill" else self.context - self.tokens

    def checked_length(self, length: int | None) -> int:
        """``length`` or the default; UsageError when the step would not fit behind that many tokens."""
        if length is None:
            return self.default_length
        if self.phase == "prefill" and length != 0:
            raise UsageError(f"a prefill starts with empty caches, but length {length} was asked for: use phase decode")
        if not 0 <= length <= self.context - self.tokens:
            raise UsageError(
                f"length {length} leaves no room for {self.tokens} new tokens in a context of {self.context}: "
                f"choose 0 to {self.context - self.tokens}"
            )
        return length


def step_shape(config: CompileConfig, largest_context: int | None = None) -> StepShape:
    """The step that ``config`` asks for; ``largest_context`` is the most that the model takes.

    Raises UsageError, naming option, value and remedy, for a shape that cannot be.
    """
    phase = config.phase
    if phase not in ("decode", "prefill", "verify"):
        raise UsageError(f"unknown phase {phase!r}: use --phase decode, --phase prefill or --phase verify")
    context = config.context
    if context is None:
        context = min(DEFAULT_CONTEXT, largest_context or DEFAULT_CONTEXT)
    tokens = config.tokens
    if tokens is None:
        tokens = {"prefill": context, "verify": min(DEFAULT_VERIFIED, context)}.get(phase, 1)
    for option, value in (("--batch", config.batch), ("--tokens", tokens), ("--context", context)):
        if value < 1:
            raise UsageError(f"{option} {value} is not a shape: give a number of at least 1")
    if phase == "verify" and tokens < 2:
        raise UsageError("--phase verify --tokens 1 verifies no draft: give at least 2, the last token and one draft")
    if tokens > context:
        raise UsageError(
            f"--tokens {tokens} does not fit into --context {context}: the cache holds all tokens of a sequence, "
            f"so give a context of at least {tokens} or fewer tokens"
        )
    if largest_context is not None and context > largest_context:
        raise UsageError(
            f"--context {context} is more than the model's max_position_embeddings {largest_context}: "
            f"give at most {largest_context}, or raise it with --set max_position_embeddings={context}"
        )
    return StepShape(phase, config.batch, tokens, context)
