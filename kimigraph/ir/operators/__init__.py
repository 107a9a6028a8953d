"""The semantic operators, one file each: schema, fake implementation, cost. Importing this package registers them.

References live in ``kimigraph.ir.reference``.
"""

from torch.fx import Node
from torch.fx.node import map_arg

from kimigraph.ir.operators import (
    attention_residual,
    attention_residual_history,
    attention_residual_merge,
    exchange_picks,
    fp8_quantize,
    hadamard_rows,
    index_key_write,
    index_scores,
    kda_decode,
    kda_decode_logged,
    kda_prefill,
    kda_prefill_deltas,
    kda_replay,
    kda_verify,
    kda_verify_states,
    latent_attention,
    latent_write,
    lightning_indexer,
    moe_experts,
    mxfp4_quantize,
    mxfp8_quantize,
    rank_gather,
    rank_sum,
    rms_norm,
    short_conv,
    sparse_attention,
)
from kimigraph.ir.operators.registry import Cost, Operator

OPERATORS: dict[str, Operator] = {
    module.OPERATOR.name: module.OPERATOR
    for module in (
        lightning_indexer,
        index_scores,
        exchange_picks,
        sparse_attention,
        latent_attention,
        kda_decode,
        kda_decode_logged,
        kda_prefill,
        kda_prefill_deltas,
        kda_verify,
        kda_verify_states,
        kda_replay,
        rms_norm,
        short_conv,
        attention_residual,
        attention_residual_history,
        attention_residual_merge,
        latent_write,
        index_key_write,
        mxfp8_quantize,
        fp8_quantize,
        hadamard_rows,
        mxfp4_quantize,
        moe_experts,
        rank_sum,
        rank_gather,
    )
}
"""Every semantic operator by its bare name."""

__all__ = ["OPERATORS", "Cost", "Operator", "cost_of", "operator_of"]


def operator_of(node: Node) -> Operator | None:
    """The semantic operator that the node calls, or None."""
    if node.op != "call_function" or getattr(node.target, "namespace", "") != "kimigraph":
        return None
    return OPERATORS.get(str(node.target).split(".")[1])


def cost_of(node: Node) -> Cost:
    """Bytes and FLOPs of a semantic operator's node, from its arguments' values; ValueError on another node."""
    operator = operator_of(node)
    if operator is None:
        raise ValueError(f"node {node.name} calls {node.target}, which is no semantic operator")
    args, kwargs = map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    return operator.cost(*args, **kwargs)
