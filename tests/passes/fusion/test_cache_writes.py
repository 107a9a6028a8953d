"""Writes to caches get their names, with the norm and the rotation before them, and the numbers stay."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kimigraph.ir.purity import storage_root
from kimigraph.passes.canonicalize import Canonicalize
from kimigraph.passes.fuse_lightning_indexer import FuseLightningIndexer
from kimigraph.passes.fuse_sparse_attention import FuseSparseAttention
from kimigraph.passes.raise_cache_writes import RaiseCacheWrites
from kimigraph.passes.raise_kda import RaiseKda

ATEN = torch.ops.aten
MakeStep = Callable[..., Any]
PASSES = (Canonicalize(), RaiseKda(), RaiseCacheWrites(), FuseLightningIndexer(), FuseSparseAttention())
STYLES = {"none": "none", "half_split": "half_split", "interleaved": "interleaved"}


def names(step: Any) -> list[str]:
    return [node.name for node in step.graph.nodes if node.name.startswith(("latent_write", "index_key_write"))]


@pytest.mark.parametrize("rope", list(STYLES))
@pytest.mark.parametrize(("tokens", "dtype"), [(1, "float32"), (3, "float32"), (1, "bfloat16")])
def test_own_model_in_every_rotation(rope: str, tokens: int, dtype: str, step: MakeStep) -> None:
    fused = step("kimi_k31", "eager", options={"tokens": tokens, "dtype": dtype}, index_rope=rope, start=10)
    remarks = fused.fuse(PASSES)
    assert names(fused) == ["latent_write", "index_key_write"]
    assert fused.count(ATEN.index_put_.default, ATEN.layer_norm.default) == 0
    write = fused.operator("index_key_write")
    assert write.kwargs["rope_style"] == STYLES[rope] and write.args[3] is not None and write.kwargs["norm_eps"] == 1e-6
    assert (write.args[5] is None) == (rope == "none")
    latent = fused.operator("latent_write")
    assert latent.kwargs["norm_weight"] is not None and latent.kwargs["norm_eps"] == 1e-5
    roots = {storage_root(operator.args[place]).name for operator, place in ((latent, 4), (write, 2))}
    assert (roots == {"lengths"}) == (tokens == 1), "one token's position is a length, in any integer type"
    assert {"lightning_indexer", "sparse_attention"} <= set(fused.fused())
    assert {remark.node for remark in remarks if remark.pass_name == "raise-cache-writes"} == set(names(fused))
    assert fused.error(3) < (1e-5 if dtype == "float32" else 0.05)


@pytest.mark.parametrize(("batch", "tokens"), [(2, 1), (1, 3), (2, 3), (1, 1)])
def test_a_public_model_with_its_two_rotations(batch: int, tokens: int, step: MakeStep) -> None:
    """DeepSeek turns the rope part by pairs that it takes apart, and index keys by halves."""
    fused = step("deepseek_v32", "sdpa", options={"batch": batch, "tokens": tokens}, start=10)
    fused.fuse(PASSES)
    assert names(fused) == ["latent_write", "index_key_write", "latent_write_1", "index_key_write_1"]
    assert fused.count(ATEN.index_copy_.default, ATEN.layer_norm.default) == 0
    assert fused.operator("latent_write").kwargs["rope_style"] == "deinterleaved"
    assert fused.operator("index_key_write").kwargs["rope_style"] == "half_split"
    for operator in ("latent_write", "index_key_write"):
        cos = fused.operator(operator).args[5].meta["val"]
        assert cos.shape == (batch, tokens, 8)
        assert batch == 1 or cos.stride()[0] == 0, "angles are the same for all sequences: nothing is copied"
    assert fused.error(3) < 1e-5


def test_pooled_keys_keep_their_write(step: MakeStep) -> None:
    """The pooled indexer's cache has no descriptor; the latents have one, and no rope part."""
    fused = step("glm5_next", "eager")
    fused.fuse(PASSES)
    assert names(fused) == ["latent_write"] and fused.operator("latent_write").args[1] is None
    assert fused.error(3) < 1e-5


def test_a_norm_that_something_else_uses_stays(step: MakeStep) -> None:
    """The write is named all the same, with the normed values."""
    fused = step("kimi_k31", "eager", index_rope="half_split")
    Canonicalize().apply(fused.program, context())
    norm = next(node for node in fused.graph.nodes if node.target is ATEN.layer_norm.default)
    output = fused.graph.output_node()
    output.args = ((*output.args[0], norm),)
    fused.program = replace(
        fused.program, outputs=(*fused.program.outputs, replace(fused.program.outputs[0], name="x"))
    )
    RaiseCacheWrites().apply(fused.program, context())
    write = fused.operator("index_key_write")
    assert write.args[3] is None and write.kwargs["rope_style"] == "half_split" and write.args[1] is norm


def test_a_latent_norm_that_something_else_uses_stays(step: MakeStep) -> None:
    """And so do its other users' numbers: the write takes what was normed."""
    fused = step("kimi_k31", "eager")
    Canonicalize().apply(fused.program, context())
    write = next(node for node in fused.graph.nodes if node.target is ATEN.index_put_.default)
    output = fused.graph.output_node()
    output.args = ((*output.args[0], write.args[2]),)
    fused.program = replace(
        fused.program, outputs=(*fused.program.outputs, replace(fused.program.outputs[0], name="x"))
    )
    RaiseCacheWrites().apply(fused.program, context())
    assert "norm_weight" not in fused.operator("latent_write").kwargs


def test_positions_that_change_before_the_write_are_copied(step: MakeStep) -> None:
    """Lengths that a step counts up itself are not where its new rows go."""
    fused = step("kimi_k31", "eager")
    Canonicalize().apply(fused.program, context())
    write = next(node for node in fused.graph.nodes if node.target is ATEN.index_put_.default)
    lengths = next(node for node in fused.graph.nodes if node.name == "lengths")
    with fused.graph.inserting_before(write):
        counted = fused.graph.call_function(ATEN.add_.Tensor, (lengths, 1))
    counted.meta = dict(lengths.meta)
    RaiseCacheWrites().apply(fused.program, context())
    assert storage_root(fused.operator("latent_write").args[4]).name != "lengths"


def context() -> Any:
    from kimigraph.ir.config import CompileConfig
    from kimigraph.passes.base import PassContext

    return PassContext(CompileConfig())
