"""The instructions that make 16-bit floats of MXFP8 keys and queries, one by one: no interpreter runs their kernels."""

import inspect
import re

import numpy as np
import pytest
import torch

from kimigraph.codegen.templates import group_operands
from kimigraph.ir.reference.e4m3 import from_e4m3

TYPES = {"f16x2": torch.float16, "bf16x2": torch.bfloat16}
EVERY = np.arange(256, dtype=np.uint8)
VALUES = from_e4m3(torch.from_numpy(EVERY)).double()
NUMBERS = torch.from_numpy((EVERY & 0x7F) != 0x7F)
WORDS = EVERY.view(np.uint32)


def halves(registers, dtype):
    """[n] registers -> [n, 2] floats, the low half first."""
    return torch.from_numpy(np.stack([registers & 0xFFFF, registers >> 16], 1).astype(np.uint16)).view(dtype)


def joined(floats):
    low, high = floats.view(torch.uint16).numpy().astype(np.uint32).T
    return low | high << 16


def permuted(low, high, selector):
    taken = np.concatenate([x.reshape(-1, 1).view(np.uint8) for x in (low, np.broadcast_to(high, low.shape).copy())], 1)
    numbers = [int(selector) >> 4 * place & 15 for place in range(4)]
    made = [np.where(taken[:, n & 7] & 0x80, 0xFF, 0) if n & 8 else taken[:, n & 7] for n in numbers]
    return np.ascontiguousarray(np.stack(made, 1).astype(np.uint8)).view(np.uint32)[:, 0]


def executed(function, factor):
    """What two registers hold after the function's instructions, for all words; all that the text may use is here."""
    text = re.search(r'"""\n\s+\{(.*?)"""', inspect.getsource(function.fn), re.DOTALL)
    assert text is not None
    registers = {"$2": WORDS, "$3": np.full_like(WORDS, factor)}

    def value(name):
        return registers[name] if name in registers else np.uint32(int(name, 0))

    for line in (line.strip().rstrip(";") for line in text[1].splitlines()):
        if line in ("", "}") or line.startswith(".reg"):
            continue
        operation, rest = line.split(" ", 1)
        if rest.startswith("{"):
            first, second, source = re.findall(r"[$\w]+", rest)
            registers[first], registers[second] = registers[source] & 0xFFFF, registers[source] >> 16
            continue
        target, *given = rest.split(", ")
        numbers = [value(name) for name in given]
        if operation == "cvt.rn.f16x2.e4m3x2":
            registers[target] = joined(VALUES[np.stack([numbers[0] & 0xFF, numbers[0] >> 8], 1)].half())
        elif operation.startswith("mul.rn."):
            dtype = TYPES[operation.removeprefix("mul.rn.")]
            a, b = (halves(number, dtype).double() for number in numbers)
            registers[target] = joined((a * b).to(dtype))
        elif operation == "prmt.b32":
            registers[target] = permuted(*numbers)
        else:
            one, other = numbers
            steps = {"shl.b32": np.left_shift, "shr.b32": np.right_shift, "and.b32": np.bitwise_and}
            registers[target] = {**steps, "or.b32": np.bitwise_or}[operation](one, other)
    return registers["$0"], registers["$1"]


def values_of(function, factor, dtype):
    """What the function makes of every code."""
    return torch.cat([halves(register, dtype) for register in executed(function, factor * 0x00010001)], 1).flatten()


@pytest.mark.parametrize("below", [0, 1, 7, 14, 21])
@pytest.mark.parametrize(("name", "shift"), [("half_pairs", 7), ("half_pairs_by_bits", 15)])
def test_fp16_holds_every_number_under_its_factor(name, shift, below):
    """The second leaves values over 2 ** 8, which the factor of queries makes good."""
    found = values_of(getattr(group_operands, name), max(shift + 15 - below, 0) << 10, torch.float16)
    assert torch.equal(found.double()[NUMBERS], (VALUES * 2.0 ** (7 - below))[NUMBERS])


@pytest.mark.parametrize("below", [0, 1, 22, 60, 110])
def test_bf16_reaches_further(below):
    found = values_of(group_operands.scaled_pairs, (247 - below) << 7, torch.bfloat16)
    assert torch.equal(found.double()[NUMBERS], (VALUES * 2.0**-below)[NUMBERS])
