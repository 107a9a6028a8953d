"""A call in the model's own structure: arguments to the tensors of a program, and its results back."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kimigraph.ir.errors import UsageError
from kimigraph.ir.manifest import Manifest
from kimigraph.runtime.executor import InputMismatchError

TENSOR = "tensor"
"""The record of a leaf that is a tensor; another leaf is ``{"value": ...}`` or ``{"text": ...}``, as captured."""


@dataclass(frozen=True)
class CallStructure:
    """How a model is called and what it returns.

    ``arguments`` is the tree of (args, kwargs) at capture and ``result`` that of the model's result; None: a container
    has no text form, so arguments are taken in order and results come as a tuple of tensors. ``parameters`` are the
    names of the model's positional parameters. The leaves say which are tensors.
    """

    arguments: pytree.TreeSpec | None
    result: pytree.TreeSpec | None
    parameters: tuple[str, ...] = ()
    argument_leaves: tuple[Any, ...] = ()
    result_leaves: tuple[Any, ...] = ()

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> "CallStructure":
        """The structure that an artifact records. UsageError when this process does not know the class of a result."""
        try:
            arguments, result = manifest.in_tree(), manifest.out_tree()
        except (NotImplementedError, ValueError, KeyError) as error:
            raise UsageError(
                f"the model's arguments or results use a class that this process does not know ({error}): import the "
                "module that defines it before load()"
            ) from error
        return cls.of_info(arguments, result, manifest.info)

    @classmethod
    def of_info(cls, arguments: Any, result: Any, info: dict[str, Any]) -> "CallStructure":
        """The structure from the tree specifications and ``info`` of a captured program or a manifest."""
        leaves = (tuple(info.get(name, ())) for name in ("parameters", "argument_leaves", "result_leaves"))
        return cls(arguments, result, *leaves)

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call in the program's order.

        Keyword and positional spelling may differ from the captured call, and dicts may be in another order. Raises
        InputMismatchError when arguments are missing or extra, or when a plain value is not the captured one.
        """
        if self.arguments is None:
            return [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        try:
            leaves = self.arguments.flatten_up_to(self._respelled(args, kwargs))
        except ValueError as error:
            raise InputMismatchError(
                f"the arguments are not those that the program was compiled for: {error}"
            ) from None
        recorded = self.argument_leaves or (TENSOR,) * len(leaves)
        for place, (leaf, record) in enumerate(zip(leaves, recorded, strict=True)):
            if record != TENSOR and repr(leaf) != _text(record):
                raise InputMismatchError(
                    f"leaf {place} of the arguments is {leaf!r}, the program was compiled for {_text(record)}: "
                    "a plain value is part of the program, so compile for this one"
                )
        return [leaf for leaf, record in zip(leaves, recorded, strict=True) if record == TENSOR]

    def _respelled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The call with each parameter given by position or by name as in the captured call."""
        assert self.arguments is not None
        wanted_args, wanted_kwargs = pytree.tree_unflatten([None] * self.arguments.num_leaves, self.arguments)
        if len(args) == len(wanted_args) and kwargs.keys() == wanted_kwargs.keys():
            return args, kwargs
        given = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        names = [*self.parameters[: len(wanted_args)], *wanted_kwargs]
        if len(args) > len(self.parameters) or given.keys() != set(names):
            raise InputMismatchError(
                f"the program takes the arguments {', '.join(names) or '(none)'}; "
                f"given were {', '.join(given) or '(none)'}: leave out or add what differs"
            )
        return tuple(given[name] for name in names[: len(wanted_args)]), {name: given[name] for name in wanted_kwargs}

    def returned(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        """The program's outputs in the structure of the model's result."""
        if self.result is None:
            return outputs
        if self.result.num_leaves == 1 and self.result.is_leaf() and len(outputs) == 1:
            return outputs[0]
        following = iter(outputs)
        recorded = self.result_leaves or (TENSOR,) * self.result.num_leaves
        leaves = [next(following) if record == TENSOR else record["value"] for record in recorded]
        return pytree.tree_unflatten(leaves, self.result)


def _text(record: dict[str, Any]) -> str:
    return record["text"] if "text" in record else repr(record["value"])
