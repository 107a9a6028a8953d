"""The short causal convolution of a step: window of cached inputs and new ones, conv1d, SiLU, write-back."""

from dataclasses import dataclass

import torch
from torch.fx import Node

from kimigraph.passes.algebra.frames import Frame, Occurrence, Operand, operand
from kimigraph.passes.algebra.layout import Layout, layout, peel
from kimigraph.passes.algebra.nodes import argument, described, dtype, packet, rank, shape
from kimigraph.passes.algebra.refusal import Refused

ATEN = torch.ops.aten


@dataclass(frozen=True)
class Convolution:
    """silu(conv1d(cat(state, x))) of new tokens: ``x`` [B, S, C], ``weight`` [C, 1, W], ``state`` [B, C, N]."""

    x: Operand
    weight: Operand
    state: Node
    write: Node
    path: tuple[Node, ...]


def convolution_at(activated: Node) -> Convolution:
    """The convolution of one token behind an activation. Refused when it is none, or its state is not written back as a
    window."""
    silu, above = peel(activated, casts="float")
    conv, chain = _convolution(silu)
    window, state = _window(conv, 0)
    _require_last_column(conv, layout(conv, chain))
    tokens = shape(argument(window, "tensors")[1])[2]
    if tokens != 1:
        raise Refused(f"{tokens} new tokens in one step", argument(window, "tensors")[1])
    return _found(window, state, (*above, silu, *chain, conv))


def convolution_over(silu: Node) -> Convolution:
    """The convolution of a run of tokens under SiLU of a column for every cached and every new input, zeros before
    them. Refused when it is none, or its state is not written back as a window."""
    conv, chain = _convolution(silu)
    window, state = _window(conv, shape(argument(conv, "weight"))[-1] - 1)
    found, columns, width = layout(conv, chain), shape(window)[-1], shape(conv)[-1]
    if found is None or found.offset or found.shape[-1] != columns or found.strides[-2:] != (width, 1):
        raise Refused(f"SiLU is of other columns of the convolution than the first {columns}: {found}", conv)
    return _found(window, state, (silu, *chain, conv))


def _convolution(silu: Node) -> tuple[Node, list[Node]]:
    """The convolution under a SiLU, and the views between them."""
    if packet(silu) != "silu":
        raise Refused(f"q, k and v come from {described(silu)}, not from SiLU of a convolution", silu)
    source = silu.args[0]
    assert isinstance(source, Node)
    conv, chain = peel(source, casts="float")
    if packet(conv) not in ("conv1d", "convolution") or argument(conv, "transposed"):
        raise Refused(f"SiLU is of {described(conv)}, not of a convolution", conv)
    return conv, chain


def _found(window: Node, state: Node, above: tuple[Node, ...]) -> Convolution:
    """The operands of the convolution over ``window``, and what it writes back."""
    newest = argument(window, "tensors")[1]
    batch, channels, tokens = shape(newest)
    sizes = {"b": batch, "s": tokens, "c": channels}
    base, links = peel(newest)
    x = operand(
        "the convolution's input", Occurrence(newest, base, tuple(links), Frame.of("bcs"), window), "bsc", sizes
    )
    write = _write_back(window, state, tokens)
    return Convolution(x, _weight(above[-1], channels), state, write, (*above, window, write))


def _window(conv: Node, padding: int) -> tuple[Node, Node]:
    """The concatenation under a depthwise convolution, and the state that is its first part."""
    source = conv.args[0]
    assert isinstance(source, Node)
    window, chain = peel(source, casts="float")
    plain = (argument(conv, "stride"), argument(conv, "padding"), argument(conv, "dilation")) == ([1], [padding], [1])
    if not plain or argument(conv, "bias") is not None or argument(conv, "groups") != shape(conv)[1]:
        told = f"a padding of {padding}" if padding else "padding"
        raise Refused(f"the convolution is not depthwise without bias, {told} and stride", conv)
    parts = argument(window, "tensors") if packet(window) == "cat" else ()
    if len(parts) != 2 or argument(window, "dim") not in (-1, 2) or layout(window, chain) != layout(window, ()):
        raise Refused("the convolution is not over cached and new inputs side by side", window)
    state, state_chain = peel(parts[0], casts="none")
    if state.op != "placeholder" or state_chain:
        raise Refused("the cached inputs are no input of the step", state)
    return window, state


def _require_last_column(conv: Node, found: Layout | None) -> None:
    batch, channels, columns = shape(conv)
    want = [(size, stride) for size, stride in ((batch, channels * columns), (channels, columns)) if size > 1]
    got = (
        []
        if found is None
        else [(size, stride) for size, stride in zip(found.shape, found.strides, strict=True) if size > 1]
    )
    if found is None or got != want or found.offset != columns - 1:
        raise Refused(f"what is used of the convolution is not its newest column: {found}", conv)


def _write_back(window: Node, state: Node, tokens: int) -> Node:
    """The copy that makes the newest inputs the state of the next step."""
    writes = [user for user in state.users if user.target is ATEN.copy_.default]
    if len(writes) != 1:
        raise Refused(f"the cached inputs are written {len(writes)} times", state)
    source = writes[0].args[1]
    assert isinstance(source, Node)
    # A window widened for the convolution may be what is copied: the copy narrows it again, which loses nothing.
    base, chain = peel(source)
    batch, channels, columns = shape(state)
    total = columns + tokens
    want = Layout.of(torch.empty(batch, channels, total, device="meta")[..., tokens:])
    if base is not window or layout(base, chain) != want:
        raise Refused("the cached inputs are not replaced by the newest ones", writes[0])
    if dtype(window) != dtype(state):
        raise Refused(f"the window is {dtype(window)}, the cached inputs are {dtype(state)}", window)
    return writes[0]


def _weight(conv: Node, channels: int) -> Operand:
    weight = conv.args[1]
    assert isinstance(weight, Node)
    base, chain = peel(weight)
    width = shape(weight)[-1]
    frame = Frame(("c", "w"), lambda tensor: tensor.squeeze(1))
    leaf = Occurrence(weight, base, tuple(chain), frame, conv)
    want = shape(base) if rank(base) in (2, 3) else (channels, 1, width)
    return operand("the convolution's weight", leaf, "cw", {"c": channels, "w": width}, want)
