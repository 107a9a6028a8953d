"""The instructions that make bf16 of MXFP4, one by one: the interpreter cannot run them, and computes otherwise."""

import inspect
import re

import pytest
import torch

from kimigraph.codegen.templates import mxfp4_weights
from kimigraph.ir.reference.e8m0 import from_e8m0
from kimigraph.ir.reference.mxfp4_quantize import E2M1

ALL = 0xFFFFFFFF


def halves(register):
    return torch.tensor([register & 0xFFFF, register >> 16], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def joined(pair):
    low, high = (int(half) & 0xFFFF for half in pair.view(torch.int16))
    return low | high << 16


def executed(word, factor):
    """The eight results, as fp32; all that the text may use is here."""
    text = re.search(r'"""\n(.*?)"""', inspect.getsource(mxfp4_weights.scaled_numbers.fn).split('"""', 2)[2], re.DOTALL)
    assert text is not None
    registers, results = {"$8": word, "$9": factor}, {}

    def value(name):
        return registers[name] if name in registers else int(name, 0)

    for line in (line.strip().rstrip(";") for line in text[1].splitlines()):
        if line in ("{", "}", "") or line.startswith(".reg"):
            continue
        operation, rest = line.split(" ", 1)
        if rest.startswith("{"):
            first, second, source = re.findall(r"\$\d|\w+", rest)
            results[first], results[second] = halves(registers[source]).float().tolist()
            continue
        target, *given = rest.split(", ")
        if operation == "mov.b32":
            registers[target] = value(given[0])
        elif operation == "fma.rn.bf16x2":
            a, b, c = (halves(value(name)).double() for name in given)
            registers[target] = joined((a * b + c).to(torch.bfloat16))
        else:
            one, other = map(value, given)
            steps = {"shl.b32": one << other, "shr.u32": one >> other, "and.b32": one & other, "or.b32": one | other}
            registers[target] = steps[operation] & ALL
    return [results[f"${place}"] for place in range(8)]


@pytest.mark.parametrize(
    "scale", [127, *(pytest.param(scale, marks=pytest.mark.slow) for scale in (0, 1, 60, 126, 128, 200, 251))]
)
def test_every_code_at_every_place(scale):
    half = 0x0040 if scale == 0 else scale << 7
    power = float(from_e8m0(torch.tensor([scale], dtype=torch.uint8)))
    table = [*E2M1, *(-magnitude for magnitude in E2M1)]
    generator = torch.Generator().manual_seed(scale)
    for first in range(16):
        others = torch.randint(0, 16, (8,), generator=generator).tolist()
        codes = [(first + place) % 16 for place in range(8)] if first % 2 else others
        word = sum(code << 4 * place for place, code in enumerate(codes))
        wanted = torch.tensor([table[code] for code in codes], dtype=torch.float64) * power
        # Below 2 ** -126 - 7 bits there is no bf16.
        assert executed(word, half * 0x00010001) == wanted.to(torch.bfloat16).tolist()


def test_a_scale_of_no_number_makes_none_of_all():
    assert all(value != value for value in executed(0x01234567, 0x7FC07FC0))
