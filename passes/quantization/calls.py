"""The form of a call whose caches changed: an argument less where two caches became one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node
from torch.utils import _pytree as pytree

from kimigraph.ir.program import CapturedProgram, InputSpec
from kimigraph.passes.algebra.refusal import Refused

_LEAVES = "argument_leaves"
_TENSOR = "tensor"


def without_argument(program: CapturedProgram, spec: InputSpec, cache: Node) -> tuple[Any, list[Any]]:
    """``in_spec`` and the records of its leaves without the argument ``spec``; the program stays as it is.

    Refused where that argument is no entry of a dict: a call without it would have another form.
    """
    place = [one.name for one in program.inputs if not one.bound].index(spec.name)
    records = list(program.info.get(_LEAVES, ()))
    tensors = [leaf for leaf, record in enumerate(records) if record == _TENSOR]
    if program.in_spec is None:
        return None, [record for leaf, record in enumerate(records) if not tensors or leaf != tensors[place]]
    leaf = tensors[place] if tensors else place
    tree = pytree.tree_unflatten(list(range(program.in_spec.num_leaves)), program.in_spec)
    pruned = _pruned(tree, leaf)
    left: list[Any] = pytree.tree_leaves(pruned)
    if leaf in left:
        raise Refused(f"{spec.source} is no entry of a dict among the arguments", cache)
    return pytree.tree_structure(pruned), [record for number, record in enumerate(records) if number != leaf]


def with_inputs(program: CapturedProgram, inputs: Sequence[InputSpec]) -> CapturedProgram:
    """``program`` as it is called when its caches are those of ``inputs``: an argument less for each merged cache."""
    changed = replace(program, info=dict(program.info))
    for source in [source for spec in inputs for source, _ in spec.parts[1:]]:
        spec = next((one for one in changed.inputs if one.source == source), None)
        if spec is not None:
            set_arguments(changed, *without_argument(changed, spec, changed.placeholders[spec.name]))
            changed.inputs = tuple(one for one in changed.inputs if one is not spec)
    return changed


def set_arguments(program: CapturedProgram, in_spec: Any, leaves: list[Any]) -> None:
    """Give the program what ``without_argument`` made."""
    program.in_spec = in_spec
    if _LEAVES in program.info:
        program.info[_LEAVES] = leaves


def _pruned(value: Any, leaf: int) -> Any:
    """``value`` without the dict entry that is ``leaf``."""
    if type(value) is dict:
        return {key: _pruned(item, leaf) for key, item in value.items() if item is not leaf and item != leaf}
    if type(value) in (list, tuple):
        return type(value)(_pruned(item, leaf) for item in value)
    return value
