"""Speculative decoding on the GPU, steps and folds as CUDA graphs: greedy tokens are those of plain decoding."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from kimigraph.generator import Generator
from kimigraph.ir.config import CompileConfig
from kimigraph.runtime.generation import Sampling

pytestmark = pytest.mark.gpu

_PATH = Path(__file__).parents[1] / "acceptance" / "test_speculation.py"
sys.path.append(str(_PATH.parent))  # for the helpers beside it
_SPEC = importlib.util.spec_from_file_location("cases_speculation", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
CASES = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(CASES)

GREEDY = Sampling(max_new_tokens=30, stop_ids=())


@pytest.fixture(scope="module")
def drafted(tmp_path_factory):
    """A generator in graph mode, and what each prompt goes on with in plain steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIMIGRAPH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        torch.backends.cuda.matmul.allow_tf32 = False
        config = CompileConfig(target="cuda", context=64, overrides=CASES.LAYERS, cuda_graph=True)
        draft = CASES.Scripted({}, "right")
        generator = Generator(
            CASES.EXAMPLE, config=config, max_batch=3, batches=(3,), chunks=(), draft=draft, draft_tokens=3
        )
        generator.speculation.adaptive = False
        yield generator, CASES.plainly(generator, GREEDY)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", CASES.MODES)
def test_greedy_tokens_are_those_of_plain_decoding(drafted, mode):
    """Accepted counts differ from round to round, and from those that the fold's graph was captured with."""
    generator, known = drafted
    generator.speculation.draft = CASES.Scripted(known, mode)
    before = generator.speculation.counts.accepted
    found = {done.prompt: done.tokens for done in generator.generate(CASES.PROMPTS, GREEDY)}
    assert found == known
    assert (generator.speculation.counts.accepted > before) == (mode not in ("wrong", "lapse"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "fields"), [("kimi_linear", {}), ("deepseek_v32", {"num_nextn_predict_layers": 1})])
def test_public_models_verify_drafts_and_take_their_own(tmp_path, family, fields):
    """A recurrent model's log in graph mode; a layer for drafts whose steps follow one another on the device."""
    write_config = importlib.import_module("tiny_configs").write_config
    torch.backends.cuda.matmul.allow_tf32 = False
    source = write_config(tmp_path / "tiny", family, **fields)
    config = CompileConfig(target="cuda", context=48, cuda_graph=True)
    draft = "mtp" if fields else CASES.Scripted({}, "random", vocabulary=96)
    generator = Generator(source, config=config, max_batch=2, batches=(2,), chunks=(), draft=draft, draft_tokens=3)
    generator.speculation.adaptive = False
    known = CASES.plainly(generator, GREEDY)
    if not fields:
        draft.known = known
    assert {done.prompt: done.tokens for done in generator.generate(CASES.PROMPTS, GREEDY)} == known
    assert generator.speculation.counts.rounds > 10
