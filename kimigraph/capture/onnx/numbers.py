"""Numbers that ONNX holds in fp32, as people wrote them."""

import numpy

LARGEST = float(numpy.finfo(numpy.float32).max)


def shortest(value: float) -> float:
    """The shortest decimal that is this number in fp32: 1e-06 for what the file has as 9.99999997e-07."""
    short = float(str(numpy.float32(value)))
    return value if abs(short) > LARGEST else short
