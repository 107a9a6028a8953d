"""From a kernel request to kernel text: one builder an operator."""

from collections.abc import Callable

from kimigraph.codegen.kernel import KernelModule, KernelRequest
from kimigraph.codegen.specialize import (
    attention_residual,
    cache_writers,
    exchange_picks,
    index_scores,
    kda_decode,
    kda_prefill,
    kda_prefill_deltas,
    kda_replay,
    lightning_indexer,
    moe_experts,
    physical_rows,
    quantize,
    rank_exchange,
    residual_phases,
    rms_norm,
    short_conv,
    sparse_attention,
)

BUILDERS: dict[str, Callable[[KernelRequest], KernelModule]] = {
    "attention_residual": attention_residual.build,
    "attention_residual_history": residual_phases.build_history,
    "attention_residual_merge": residual_phases.build_merge,
    "exchange_picks": exchange_picks.build,
    "fp8_quantize": quantize.build_fp8,
    "index_key_write": cache_writers.build_index_key,
    "index_scores": index_scores.build,
    "kda_decode": kda_decode.build,
    "kda_decode_logged": kda_decode.build,
    "kda_prefill": kda_prefill.build,
    "kda_prefill_deltas": kda_prefill_deltas.build,
    "kda_replay": kda_replay.build,
    "kda_verify": kda_decode.build,
    "kda_verify_states": kda_decode.build,
    "latent_attention": sparse_attention.build,
    "latent_write": cache_writers.build_latent,
    "lightning_indexer": lightning_indexer.build,
    "moe_experts": moe_experts.build,
    "mxfp8_quantize": quantize.build_mxfp8,
    "rank_gather": rank_exchange.build_gather,
    "rank_sum": rank_exchange.build_sum,
    "rms_norm": rms_norm.build,
    "short_conv": short_conv.build,
    "sparse_attention": physical_rows.build_attention,
}
