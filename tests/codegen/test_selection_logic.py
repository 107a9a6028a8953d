"""The selection of ``lightning_indexer_split`` on the CPU: its text runs over numpy stand-ins for Gluon, a thread a
program, so that ranks, ties, packing and what programs tell one another are checked where no GPU is."""

import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kimigraph.codegen import cross_compile_worker

TEMPLATES = Path(cross_compile_worker.__file__).parent / "templates"
PARTS = (
    "score_window", "row_histogram", "row_slices", "row_candidates", "row_listing", "indexer_selection", "few_codes",
    "indexer_bounded",
)  # fmt: skip
POOL = 2112  # the first word of the pooled codes
TYPES = {"int32": np.int32, "uint32": np.uint32, "int64": np.int64, "uint64": np.uint64}
LIST, LABELS = 4, 132  # where the shared list's values and labels begin


def typed(value, like):
    """A Python number takes the type of the tensor it meets."""
    return np.asarray(value).astype(np.int32 if like.dtype == np.bool_ else like.dtype)


class Value:
    """A tensor or scalar of the language: wraps around, and int32 with uint32 gives uint32."""

    def __init__(self, array):
        self.array = np.asarray(array)

    def combine(self, other, function, swapped=False):
        if isinstance(other, Pointer):
            return NotImplemented
        a = self.array
        b = other.array if isinstance(other, Value) else typed(other, a)
        if (a.dtype == np.bool_) != (b.dtype == np.bool_):
            a, b = (x.astype(np.int32) if x.dtype == np.bool_ else x for x in (a, b))
        if a.dtype != b.dtype:
            mixed = {a.dtype, b.dtype} == {np.dtype(np.int32), np.dtype(np.uint32)}
            wide = np.uint32 if mixed else np.promote_types(a.dtype, b.dtype)
            a, b = a.astype(wide), b.astype(wide)
        with np.errstate(over="ignore"):
            return Value(function(b, a) if swapped else function(a, b))

    def __bool__(self):
        return bool(self.array)

    def __index__(self):
        return int(self.array)

    def __hash__(self):
        return id(self)

    def to(self, dtype, bitcast=False):
        array = self.array
        return Value(array.view(TYPES[dtype]) if bitcast else array.astype(TYPES[dtype]))


OPERATORS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "floordiv": np.floor_divide, "mod": np.mod,
    "lshift": np.left_shift, "rshift": np.right_shift, "and": np.bitwise_and, "or": np.bitwise_or, "lt": np.less,
    "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
for name, function in OPERATORS.items():
    setattr(Value, f"__{name}__", lambda a, b, function=function: a.combine(b, function))
    setattr(Value, f"__r{name}__", lambda a, b, function=function: a.combine(b, function, swapped=True))


class Pointer:
    """Places in a memory of int32."""

    def __init__(self, memory, offset=0):
        self.memory, self.offset = memory, offset

    def __add__(self, other):
        return Pointer(self.memory, self.offset + (other.to("int64") if isinstance(other, Value) else other))

    __radd__ = __add__

    def places(self, mask):
        offset = self.offset.array if isinstance(self.offset, Value) else np.asarray(self.offset)
        chosen = mask.array if isinstance(mask, Value) else np.asarray(True if mask is None else mask)
        chosen = np.broadcast_to(chosen, offset.shape).astype(bool)
        assert np.all((offset[chosen] >= 0) & (offset[chosen] < len(self.memory)))
        return offset, chosen


def where(condition, a, b):
    like = a if isinstance(a, Value) else b if isinstance(b, Value) else Value(np.int32(0))
    return Value(np.where(condition.array, *(like.combine(x, lambda _, x: x).array for x in (a, b))))


def load(pointer, mask=None, other=0, cache_modifier=""):
    offset, chosen = pointer.places(mask)
    assert cache_modifier == ".cg"  # an earlier launch wrote it, or another program
    return Value(np.where(chosen, pointer.memory[np.where(chosen, offset, 0)], np.int32(other)))


def store(pointer, value, mask=None):
    offset, chosen = pointer.places(mask)
    written = offset[chosen]
    assert len(np.unique(written)) == written.size
    pointer.memory[written] = np.broadcast_to(value.array, offset.shape)[chosen].astype(np.int64).astype(np.int32)


class Cluster:
    """The shared memories of the programs of a row, and where they meet."""

    def __init__(self, programs):
        self.counts, self.words, self.notes = (np.full((programs, n), -7, np.int32) for n in (10304, 520, 192))
        self.barrier = threading.Barrier(programs, timeout=20)


def language(program, cluster):
    """Stand-ins for a program (``program.row``, ``program.part``, ``program.warps``) of a cluster."""
    counts, words, notes = (memory[program.part] for memory in (cluster.counts, cluster.words, cluster.notes))

    def add_up(x, axis):
        return Value(np.sum(x.array, axis=axis, dtype=x.array.dtype))

    def held_once(x):
        assert x.array.size >= 32 * program.warps  # else several threads hold, and do, the same
        return x.array

    def append(value, label, joins, which):
        joins = held_once(joins) != 0
        values, labels = (np.broadcast_to(x.array, joins.shape)[joins] for x in (value, label))
        first, start = words[260 * which], 260 * which
        assert first + len(values) <= 128
        words[start + LIST + first : start + LIST + first + len(values)] = values[::-1]  # in no particular order
        words[start + LABELS + first : start + LABELS + first + len(values)] = labels[::-1]
        words[start] += len(values)

    def empty_lists():
        words[[0, 260]] = 0

    def reserve(number):
        begins = words[260] + np.cumsum(number.array) - number.array
        words[260] += number.array.sum()
        return Value(begins.astype(np.int32))

    def put_in_pool(place, code, position, live):
        chosen = held_once(live) & (place.array < 4096)
        for start, value in ((POOL, code), (POOL + 4096, position)):
            counts[start + place.array[chosen]] = np.broadcast_to(value.array, chosen.shape)[chosen]

    def mark(position, live):
        chosen = position.array[held_once(live)]
        np.bitwise_or.at(counts.view(np.uint32), chosen >> 5, np.uint32(1) << (chosen & 31).astype(np.uint32))

    def set_note(place, number):
        places = place.array if isinstance(place, Value) else place
        notes[places] = np.broadcast_to(number.array, np.shape(places))

    def note_three(live, *numbers):
        chosen = held_once(live)
        assert chosen.sum() <= 1
        for place, number in enumerate(numbers):
            notes[place] = number.array[chosen][0] if chosen.any() else notes[place]

    gl = SimpleNamespace(
        **{name: name for name in TYPES}, constexpr=object, BlockedLayout=lambda *_: None,
        SliceLayout=lambda *_: None, num_warps=lambda: program.warps, static_range=range,
        program_id=lambda _: Value(np.int32(program.row)), load=load, store=store,
        arange=lambda first, end, layout: Value(np.arange(first, end, dtype=np.int32)), where=where, sum=add_up,
        expand_dims=lambda x, axis: Value(np.expand_dims(x.array, axis)), convert_layout=lambda x, _: x,
        zeros_like=lambda x: Value(np.zeros_like(x.array)),
        full=lambda shape, value, dtype, layout: Value(np.full(shape, value).astype(TYPES[dtype])),
        to_tensor=lambda x: x if isinstance(x, Value) else Value(np.int32(x)),
        associative_scan=lambda x, axis, _: Value(np.cumsum(x.array, axis=axis, dtype=x.array.dtype)),
        max=lambda x, axis: Value(np.max(x.array, axis=axis)), min=lambda x, axis: Value(np.min(x.array, axis=axis)),
        reduce=lambda pair, axis, _: tuple(add_up(x, axis) for x in pair),
        minimum=lambda a, b: a.combine(b, np.minimum), maximum=lambda a, b: a.combine(b, np.maximum),
    )  # fmt: skip
    return {
        "gl": gl,
        "tl": SimpleNamespace(**{**vars(gl), "debug_barrier": lambda: None}),
        "declare_counts": lambda: None,
        "let_next_launch_start": lambda: None,
        "wait_for_earlier_launch": lambda: None,
        "everywhere": lambda *_: None,
        "rank_in_cluster": lambda: Value(np.int32(program.part)),
        "meet_cluster": cluster.barrier.wait,
        "done_with_cluster": lambda: None,
        "leave_cluster": lambda: None,
        "wait_for_cluster": cluster.barrier.wait,
        "put": lambda place, value, live: store(place, value, live),
        "count": lambda place: np.add.at(counts, held_once(place), 1),
        "get_counts": lambda place: Value(counts[place.array]),
        "get_two_counts": lambda place: Value(counts[place.array]),
        "set_counts": lambda place, number: counts.__setitem__(place.array, number.array),
        "set_count": lambda place, number: counts.__setitem__(
            place.array, np.broadcast_to(number.array, place.array.shape)
        ),
        "empty_lists": empty_lists,
        "append": append,
        "listed": lambda place, which: Value(words[260 * which + LIST + place.array]),
        "listed_labels": lambda place, which: Value(words[260 * which + LABELS + place.array]),
        "listed_by": lambda place, program: Value(cluster.words[program.array, LIST + place.array]),
        "set_note": set_note,
        "note_three": note_three,
        "declare_pool": lambda: None,
        "reserve": reserve,
        "reserved_by": lambda program: Value(cluster.words[program.array, 260]),
        "highest_bit": lambda x: Value(np.int32(int(x.array.view(np.uint32)).bit_length() - 1)),
        "put_in_pool": put_in_pool,
        "get_word": lambda place: Value(counts[place.array]),
        "mark": mark,
        "ones": lambda word: Value(np.bitwise_count(word.array.view(np.uint32)).astype(np.int32)),
        "get_note": lambda place: Value(notes[place.array if isinstance(place, Value) else place]),
        "note_of": lambda place, program: Value(cluster.notes[program.array, place.array]),
        "count_of": lambda place, program: Value(cluster.counts[program.array, place.array]),
    }


def selection(kernel, row, part, warps, cluster):
    """The kernel for one program."""
    names: dict[str, Any] = language(SimpleNamespace(row=row, part=part, warps=warps), cluster)
    texts = [(part, (TEMPLATES / f"{part}.py").read_text(encoding="utf-8")) for part in PARTS]
    scores = (TEMPLATES / "indexer_scores.py").read_text(encoding="utf-8")
    limit = re.search(r"^def row_limit\(.*?(?=^@)", scores, flags=re.DOTALL | re.MULTILINE)
    assert limit is not None
    for part, text in [("indexer_scores", limit.group(0)), *texts]:
        text = re.sub(
            r"^(from [^\n]*\(\n.*?\n\)|(from|import) [^\n]*|@(gluon|triton)\.jit)\n",
            "",
            text,
            flags=re.DOTALL | re.MULTILINE,
        )
        exec(compile(text, part, "exec"), names)
    return names[kernel]


def largest_of_groups(codes, splits, each):
    """What the scores' launch leaves: the largest code of a warp's 16 keys over ``each`` tiles of a program."""
    tiles = codes.reshape(len(codes), -1, splits, 4, 16).max(4)
    return tiles.reshape(len(codes), -1, each, splits, 4).max(2).reshape(len(codes), -1).view(np.int32)


def select(codes, peaks, lengths, table, k, warps, ctas, columns, tiles, kernel="select_codes"):
    """All programs of all rows; memory that the launch finds holds rubbish."""
    rows, total = codes.shape
    memory = codes.view(np.int32).flatten()
    picked, kept = np.full(rows * k, -99, np.int32), np.full(rows * total, 5, np.int32)
    pages = None if table is None else Pointer(table.flatten())
    failures = []

    splits, each = 8, 2
    tops = largest_of_groups(codes, splits, each)

    def run(row, part, cluster):
        given, out = (Pointer(lengths), pages), Pointer(picked)
        shared = (1, total, k, 1, (total // 64, 1), splits, ctas, 8, columns, tiles, -(-tiles // 4))
        number = tops.shape[1]
        few = (number, each, max(number // warps, 32), 1024, max(2048, total // 32))
        arguments = {
            "select_codes": (Pointer(peaks.flatten()), *given, Pointer(kept), out, *shared),
            "select_bounded": (
                Pointer(tops.flatten()), Pointer(peaks.flatten()), *given, Pointer(kept), out, *shared, *few,
            ),
        }  # fmt: skip
        try:
            selection(kernel, row, part, warps, cluster)(Pointer(memory), *arguments[kernel])
        except BaseException as error:
            failures.append(error)
            cluster.barrier.abort()

    for row in range(rows):
        cluster = Cluster(ctas)
        threads = [threading.Thread(target=run, args=(row, part, cluster)) for part in range(ctas)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return picked.reshape(rows, k)


def wanted(codes, lengths, table, k):
    rows = []
    for row, limit in enumerate(lengths):
        order = np.lexsort((np.arange(limit), -codes[row, :limit].astype(np.int64)))
        order = np.sort(order[codes[row, order] > 0][:k])
        listed = order if table is None else table[row, order // 64] * 64 + order % 64
        rows.append(np.concatenate([listed, np.full(k - len(order), -1)]))
    return np.stack(rows)


def rows_of(kind, total, generator):
    normal = generator.standard_normal((2, total))
    return {
        "gaussian": lambda: normal,
        "equal": lambda: np.full((2, total), 1.5),
        "half zeros": lambda: np.maximum(normal, 0),
        "mostly negative": lambda: -np.maximum(normal, 0),
        "two values": lambda: generator.choice([1.0, 1.0078125], size=(2, total)),
        "outliers": lambda: np.where(generator.random((2, total)) < 0.002, 1e20, 1 + np.round(normal) / 128),
        "tiny": lambda: np.where(generator.random((2, total)) < 0.001, 1e5, normal * 1e-30),
        "ascending": lambda: np.sort(normal, 1),
    }[kind]().astype(np.float32)


def written(kind, total, lengths, k, generator):
    """Codes as the scores' launch leaves them, the largest magnitudes, and for one k a table of pages."""
    scores = rows_of(kind, total, generator)
    bits = (scores + np.float32(0)).view(np.uint32)
    codes = np.where(bits >> 31, ~bits, bits ^ np.uint32(1 << 31)).astype(np.uint32)
    codes[:, 128:192] = 0  # a page that is not there
    peaks = np.zeros((2, 8), np.int32)
    for row, limit in enumerate(lengths):
        seen = -(-limit // 64) * 64
        codes[row, limit:seen], codes[row, seen:] = 0, generator.integers(0, 1 << 32, total - seen)
        peaks[row, 2] = np.abs(scores[row, :limit]).max(initial=0).view(np.int32)
    table = generator.permutation(total // 32).reshape(2, -1).astype(np.int32) if k == 40 else None
    return codes, peaks, table


@pytest.mark.parametrize(
    ("total", "warps", "ctas", "columns", "tiles"),
    [(2048, 2, 1, 1024, 1), (4096, 16, 2, 256, 1), (4096, 2, 1, 512, 4), (4096, 2, 4, 256, 2)],
)
@pytest.mark.parametrize(
    "kind", ["gaussian", "equal", "half zeros", "mostly negative", "two values", "outliers", "tiny", "ascending"]
)
def test_rows_are_cut_exactly(total, warps, ctas, columns, tiles, kind):
    generator = np.random.default_rng(len(kind) + total + ctas)
    for k in (1, 40, 700):
        for lengths in ([total, total - 77], [k, k - 1], [300, 0]):
            given, peaks, table = written(kind, total, np.array(lengths, np.int32), k, generator)
            wins = wanted(given, lengths, table, k)
            picked = select(given, peaks, np.array(lengths, np.int32), table, k, warps, ctas, columns, tiles)
            assert np.array_equal(picked, wins), (k, lengths)


@pytest.mark.parametrize(("total", "warps", "ctas"), [(16384, 4, 1), (16384, 16, 2), (16384, 2, 4)])
@pytest.mark.parametrize(
    "kind", ["gaussian", "equal", "half zeros", "mostly negative", "two values", "outliers", "tiny", "ascending"]
)
def test_rows_of_which_few_codes_are_looked_at_are_cut_exactly(total, warps, ctas, kind):
    """Pooled where few codes reach the bound, as by all programs where many do."""
    generator = np.random.default_rng(len(kind) + warps)
    for k in (40, 500):
        for lengths in ([total, total - 77], [k, k - 1], [5000, 0]):
            given, peaks, table = written(kind, total, np.array(lengths, np.int32), k, generator)
            wins, columns = wanted(given, lengths, table, k), 512
            sizes, limits = (columns, total // (ctas * warps * columns)), np.array(lengths, np.int32)
            picked = select(given, peaks, limits, table, k, warps, ctas, *sizes, "select_bounded")
            assert np.array_equal(picked, wins), (k, lengths)
