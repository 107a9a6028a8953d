"""``kimigraph bench li`` and ``kimigraph bench sfa`` up to the device."""

from typing import Any

import pytest
import torch


@pytest.mark.parametrize("subject", ["dsa", "li", "li-mxfp8", "sfa"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_the_remedy_is_named(cli: Any, subject: str) -> None:
    done = cli("bench", subject)
    assert done.exit_code == 2 and "needs an NVIDIA GPU" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("attention",),
            "nothing to bench is called 'attention': choose attnres, dsa, kda, kda-logged, li, li-mxfp8, moe, "
            "pointwise, prolog, quantize, rollback, sfa",
        ),
        (("li", "--only", "flash_mla"), "--only flash_mla: choose deep_gemm"),
        (("sfa", "--only", "fla"), "--only fla: choose flash_mla"),
        (("li-mxfp8", "--only", "decode"), "--only decode: bench li-mxfp8 has no parts"),
    ],
)
def test_what_there_is_to_choose(cli: Any, arguments: tuple[str, ...], message: str) -> None:
    done = cli("bench", *arguments)
    assert done.exit_code == 2 and message in " ".join(done.stderr.split())
