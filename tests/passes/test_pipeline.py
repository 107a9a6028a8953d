"""The text form of pipelines, the registry, and which passes a configuration asks for."""

import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.passes import Pass, PassRegistry, Pipeline, default_pipeline, registered_passes
from kimigraph.passes.options import describe_options

FUSING = [
    "canonicalize",
    "split-stages",
    "raise-kda",
    "log-states",
    "defer-states",
    "raise-attention-residual",
    "raise-cache-writes",
    "raise-norms",
    "raise-moe",
    "fuse-lightning-indexer",
    "fuse-sparse-attention",
    "page-caches",
    "fuse-indexer-attention",
    "shard",
    "insert-quantization",
    "share-tokens",
    "prune-index-exchange",
]
MERGING = [
    *FUSING,
    "balance-indexer",
    "interleave-halves",
    "split-indexer-prolog",
    "share-indexer-rows",
    "fuse-collectives",
    "merge-horizontal",
    "fuse-pointwise",
    "merge-regions",
]
ALL = [*MERGING, "overlap-communication", "assign-streams", "plan-memory", "verify-schedule"]


@dataclass(frozen=True)
class Knobs(Pass):
    """A pass with one option of each kind."""

    name: ClassVar[str] = "knobs"
    summary: ClassVar[str] = "has options"

    k_max: int = 4
    scale: float = 1.0
    exact: bool = True
    label: str = "plain"
    limit: int | None = None


@dataclass(frozen=True)
class NeedsWidth(Pass):
    """A pass with an option that must be given."""

    name: ClassVar[str] = "needs-width"
    summary: ClassVar[str] = "has a required option"

    width: int


@dataclass(frozen=True)
class OddOption(Pass):
    """A pass with an option that has no text form."""

    name: ClassVar[str] = "odd-option"
    summary: ClassVar[str] = "has a list option"

    sizes: tuple[int, ...] = ()


@pytest.fixture
def registry() -> PassRegistry:
    return PassRegistry({item.name: item for item in (Knobs, NeedsWidth, OddOption)})


@given(
    k_max=st.integers(),
    scale=st.floats(allow_nan=False),
    exact=st.booleans(),
    label=st.text(),
    limit=st.none() | st.integers(),
    count=st.integers(1, 3),
)
def test_text_round_trips(k_max: int, scale: float, exact: bool, label: str, limit: int | None, count: int) -> None:
    registry = PassRegistry({"knobs": Knobs})
    pipeline = Pipeline((Knobs(k_max, scale, exact, label, limit),) * count)
    parsed = Pipeline.parse(str(pipeline), registry)
    assert parsed == pipeline
    assert repr(parsed) == repr(pipeline)  # tells -0.0 from 0.0
    assert str(parsed) == str(pipeline)


def test_defaults_are_left_out_and_names_are_dashed() -> None:
    assert str(Pipeline((Knobs(), Knobs(k_max=2048)))) == "knobs,knobs{k-max=2048}"
    assert str(Pipeline((Knobs(exact=False, label="a b"),))) == 'knobs{exact=false label="a b"}'
    assert str(Pipeline()) == ""


def test_spaces_do_not_matter(registry: PassRegistry) -> None:
    text = "  knobs { k-max=7   exact=false } ,\n needs-width{width=3}"
    assert Pipeline.parse(text, registry) == Pipeline((Knobs(k_max=7, exact=False), NeedsWidth(3)))
    assert Pipeline.parse("  ", registry) == Pipeline()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("knob", ["'knob'", "did you mean 'knobs'?", "knobs, needs-width, odd-option"]),
        ("knobs{kmax=3}", ["'knobs'", "'kmax'", "did you mean 'k-max'?"]),
        ("knobs{k-max=three}", ["'k-max'", "an integer", "'three'"]),
        ("knobs{k-max=1.5}", ["'k-max'", "an integer"]),
        ("knobs{scale=fast}", ["'scale'", "a number"]),
        ("knobs{exact=1}", ["'exact'", "'true' or 'false'", "'1'"]),
        ("knobs{limit=}", ["option=value"]),
        ("knobs{exact}", ["'exact'", "option=value"]),
        ("knobs{k-max=1,exact=true}", ["separated by spaces"]),
        ("knobs{k-max=1 k-max=2}", ["'k-max'", "twice"]),
        ("knobs{k-max=1", ["cannot read", "separated by commas"]),
        ("knobs,,knobs", ["cannot read"]),
        ("knobs,", ["cannot read"]),
        ("knobs knobs", ["cannot read"]),
        ("needs-width", ["needs-width{width=...}"]),
        ("odd-option{sizes=3}", ["'sizes'", "no text form"]),
    ],
)
def test_bad_text_is_a_usage_error_that_says_what_is_wrong(
    text: str, expected: list[str], registry: PassRegistry
) -> None:
    with pytest.raises(UsageError) as raised:
        Pipeline.parse(text, registry)
    assert [part for part in expected if part not in str(raised.value)] == []


def test_options_are_described_for_help() -> None:
    assert describe_options(Knobs)[0] == ("k-max", "int", "4")
    assert describe_options(Knobs)[4] == ("limit", "int | None", "none")
    assert describe_options(NeedsWidth) == [("width", "int", "required")]


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_level_runs_its_passes_in_order(level: int) -> None:
    pipeline = default_pipeline(CompileConfig(opt_level=level))
    assert pipeline.names == {1: [*FUSING, "verify-schedule"], 2: ALL, 3: ALL}[level]
    assert Pipeline.parse(str(pipeline)) == pipeline


def test_level_zero_runs_none() -> None:
    assert default_pipeline(CompileConfig(opt_level=0)) == Pipeline()


def test_disabling_takes_exact_names() -> None:
    names = default_pipeline(CompileConfig(disabled_passes=("fuse-lightning-indexer",))).names
    assert names == [name for name in ALL if name != "fuse-lightning-indexer"]
    with pytest.raises(UsageError, match="fuse-lightning"):
        default_pipeline(CompileConfig(disabled_passes=("fuse-lightning",)))


def test_given_passes_win_over_the_level_and_other_flags_apply_to_them() -> None:
    config = CompileConfig(opt_level=0, passes="raise-kda,canonicalize{decompact=false},raise-kda")
    assert str(default_pipeline(config)) == config.passes
    config = CompileConfig(passes="raise-kda,canonicalize,raise-kda", disabled_passes=("raise-kda",))
    assert default_pipeline(config).names == ["canonicalize"]
    assert default_pipeline(CompileConfig(passes="")) == Pipeline()


def test_a_given_schedule_is_verified() -> None:
    config = CompileConfig(passes="assign-streams{force=true},canonicalize")
    assert default_pipeline(config).names == ["assign-streams", "canonicalize", "verify-schedule"]
    config = CompileConfig(passes="verify-schedule,assign-streams", disabled_passes=("verify-schedule",))
    assert default_pipeline(config).names == ["assign-streams"]


def test_stop_after_truncates() -> None:
    pipeline = default_pipeline(CompileConfig(stop_after="raise-kda"))
    assert pipeline.names == ["canonicalize", "split-stages", "raise-kda"]
    with pytest.raises(UsageError, match="not in the pipeline"):
        default_pipeline(CompileConfig(stop_after="raise-kda", disabled_passes=("raise-kda",)))


@pytest.mark.parametrize(
    ("config", "option"),
    [
        (CompileConfig(disabled_passes=("raise-kad",)), "--disable-pass"),
        (CompileConfig(stop_after="raise-kad"), "--stop-after"),
        (CompileConfig(required_fusions=("raise-kad",)), "--require-fusion"),
    ],
)
def test_unknown_names_in_flags_answer_with_the_nearest(config: CompileConfig, option: str) -> None:
    with pytest.raises(UsageError) as raised:
        default_pipeline(config)
    assert option in str(raised.value) and "did you mean 'raise-kda'?" in str(raised.value)


def test_a_pass_that_is_no_fusion_cannot_be_required() -> None:
    with pytest.raises(UsageError, match=r"is no fusion.*fuse-sparse-attention"):
        default_pipeline(CompileConfig(required_fusions=("canonicalize",)))


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(UsageError, match="use 0, 1, 2 or 3"):
        default_pipeline(CompileConfig(opt_level=4))


def test_every_registered_pass_has_name_summary_and_docstring() -> None:
    passes = registered_passes()
    assert list(passes)[: len(MERGING)] == MERGING
    assert [name for name, item in passes.items() if item.name != name or not item.summary or not item.__doc__] == []


def test_two_passes_of_one_name_clash(registry: PassRegistry) -> None:
    registry.add("knobs", Knobs)  # the same one again is fine
    with pytest.raises(UsageError, match=r"two passes are called 'knobs'.*Knobs.*NeedsWidth"):
        registry.add("knobs", NeedsWidth)


@pytest.mark.parametrize("name", ["Knobs", "two words", "under_score", "", "brace{}", "-dash"])
def test_names_that_the_text_form_cannot_hold_are_refused(name: str, registry: PassRegistry) -> None:
    with pytest.raises(UsageError, match="is no name for a pass"):
        registry.add(name, Knobs)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("kimigraph.passes.no_such_module:Thing", "cannot be imported"),
        ("kimigraph.passes.pipeline:NoSuchClass", "cannot be imported"),
        ("kimigraph.passes.pipeline:Pipeline", "not a subclass of Pass"),
        ("kimigraph.passes.canonicalize:Canonicalize", "calls itself 'canonicalize'"),
    ],
)
def test_a_source_that_holds_no_such_pass_is_a_usage_error(source: str, expected: str) -> None:
    registry = PassRegistry()
    registry.add("thing", source)
    with pytest.raises(UsageError, match=expected):
        registry.load("thing")


def test_a_pass_is_imported_when_it_is_first_asked_for() -> None:
    code = (
        "import sys\n"
        "from kimigraph.passes.registry import default_registry\n"
        "print(default_registry().names[0], 'kimigraph.passes.canonicalize' in sys.modules)\n"
        "default_registry().load('canonicalize')\n"
        "print('kimigraph.passes.canonicalize' in sys.modules, 'kimigraph.passes.raise_kda' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["canonicalize", "False", "True", "False"]
