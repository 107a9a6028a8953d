"""What a compilation was asked to do. Every field is part of the cache key unless marked ``debug_only``."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from kimigraph.ir.mesh import DeviceMesh

Phase = Literal["decode", "prefill", "verify"]
ONNXRUNTIME = "cpu:onnxruntime"
TARGETS = ("auto", "cpu", "cpu:reference", ONNXRUNTIME, "cuda", "cuda:sm_90")
MAX_SHAPES = 16
STREAMS = 3
MAX_GRAPHS = 16


def debug_only(default: Any) -> Any:
    """A field that changes what is reported but never what is built."""
    return field(default=default, metadata={"debug_only": True})


@dataclass(frozen=True)
class CompileConfig:
    """Options of one compilation; the command line and the Python API fill the same fields.

    ``batch`` and ``tokens`` are sequences and new tokens per sequence; ``context`` is the cache capacity per sequence.
    ``device`` is the text of a device file to price by (``kimigraph.ir.device``); None: the target's own.
    ``policy`` is the name of a quantization policy or the text of a policy file (``kimigraph.ir.policy``).
    ``streams`` is the largest number of streams that a program uses; ``force_streams`` forks wherever it is legal.
    ``max_shapes`` is how many programs a compiled model keeps in memory, and how many shapes one command may ask for.
    ``half_batches`` makes a decode step two interleaved halves of its batch: ``auto`` where that pays, ``on``, ``off``.
    ``cuda_graph`` replays a step on tensors that came before as one CUDA graph; ``max_graphs`` of them are kept.
    ``cache_layout`` is ``model`` (caches as the model has them) or ``paged``: pages of ``page_size`` tokens under one
    block table, ``pages`` of them beside the scratch page (None: as many as ``batch`` full sequences have).
    ``tp`` ranks share out heads, widths and vocabulary of one program (``passes.shard``).
    ``sp`` times as many share out the tokens of caches (``passes.prune_index_exchange``), pages having ``page_size``
    tokens on each of them.
    ``pp`` stages share out its layers (``passes.split_stages``), and ``stage`` is the one that is compiled. A step of a
    pipeline is taken in up to ``micro_batches`` parts of its rows, so that stages work at the same time.
    ``state_log`` is the number of decoded tokens after which a step writes recurrent states, logging what is between.
    ``reference`` is what ``verify`` compares with: the eager model, or onnxruntime on the captured graph.
    A shape field that is None takes the default of ``kimigraph compile`` (decode: 1 token; prefill: tokens = context;
    verify, a token and the drafts behind it: 8).
    """

    target: str = "auto"
    opt_level: int = 2
    phase: Phase = "decode"
    batch: int = 1
    tokens: int | None = None
    context: int | None = None
    dtype: str | None = None
    seed: int = 0
    passes: str | None = None
    disabled_passes: tuple[str, ...] = ()
    required_fusions: tuple[str, ...] = ()
    stop_after: str | None = None
    marks: bool = True
    random_weights: bool = False
    overrides: tuple[tuple[str, str], ...] = ()
    device: str | None = None
    streams: int = STREAMS
    force_streams: bool = False
    half_batches: Literal["auto", "on", "off"] = "auto"
    policy: str = "off"
    cache_layout: Literal["model", "paged"] = "model"
    page_size: int = 64
    pages: int | None = None
    state_log: int = 1
    tp: int = 1
    sp: int = 1
    pp: int = 1
    stage: int = 0
    micro_batches: int = debug_only(1)
    max_shapes: int = debug_only(MAX_SHAPES)
    cuda_graph: bool = debug_only(False)
    max_graphs: int = debug_only(MAX_GRAPHS)
    cache: str = debug_only("use")
    verify: bool = debug_only(False)
    reference: Literal["eager", "onnxruntime"] = debug_only("eager")
    check_numerics: bool = debug_only(False)
    time_passes: bool = debug_only(False)
    dump_passes: str | None = debug_only(None)
    report: bool = debug_only(True)

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks of one replica; UsageError for a size that no mesh has."""
        return DeviceMesh(pp=self.pp, tp=self.tp, sp=self.sp)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page, on all ranks that share it out."""
        return self.page_size * self.sp

    def key_fields(self) -> dict[str, Any]:
        """The fields that enter the cache key, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if not f.metadata.get("debug_only")}
