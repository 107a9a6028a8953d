"""A model of the K3 family by its sizes: parameters, and the work of a step on one rank.

Weights in bf16, but routed experts in MXFP4 (17 bytes for 32); latents in 656 bytes a token and index keys in 132
(fp8), states in fp32; each may be said otherwise. Formulas: ``docs/scale.md``.
"""

from dataclasses import dataclass

from kimigraph.ir.cost import Work

BF16, FP32 = 2, 4
MXFP4 = 17 / 32
EXPERT_LAUNCHES, LAYER_LAUNCHES = 4, 14
"""Launches of routed experts, and of the rest of a layer: a step of two ranks has 80 in four layers."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model: ``layers`` of which ``sparse`` are DSA and the others KDA, ``dense`` without experts."""

    name: str
    layers: int
    sparse: int
    hidden: int
    heads: int
    head_dim: int
    q_rank: int
    latent: int
    rope: int
    index_heads: int
    index_dim: int
    picks: int
    experts: int
    experts_a_token: int
    expert_width: int
    expert_hidden: int
    shared_width: int
    dense: int
    dense_width: int
    vocabulary: int
    residual_blocks: int
    expert_bytes: float = MXFP4
    latent_bytes: int = 656
    index_key_bytes: int = 132

    @property
    def kda(self) -> int:
        """KDA layers."""
        return self.layers - self.sparse

    @property
    def routed(self) -> int:
        """Parameters of one routed expert."""
        return 3 * self.expert_width * self.expert_hidden

    @property
    def parameters(self) -> int:
        """Parameters in all."""
        return round(self.weight_parameters(1) + self.weight_parameters(0))

    def weight_parameters(self, shared: int) -> int:
        """Parameters that ranks share out (1), routed experts among them, or of which each has all (0)."""
        held = (self._kda(), self._sparse(), self._sparse_layers_mlp(), self._dense_mlp(), (2 * self._table(), 0))
        counts = (self.kda, self.sparse, self.layers - self.dense, self.dense, 1)
        part = sum(count * each[1 - shared] for count, each in zip(counts, held, strict=True))
        return part + shared * (self.layers - self.dense) * self.experts * self.routed

    def _table(self) -> int:
        return self.vocabulary * self.hidden

    def _kda(self) -> tuple[int, int]:
        """Shared and replicated parameters of the attention of a KDA layer."""
        width = self.heads * self.head_dim
        return 5 * width * self.hidden + self.heads * self.hidden + self.head_dim * width, self.head_dim * self.hidden

    def _sparse(self) -> tuple[int, int]:
        width, query = self.heads * self.head_dim, self.heads * (self.head_dim + self.rope)
        shared = query * self.q_rank + 2 * width * self.latent + 2 * width * self.hidden
        indexer = self.index_heads * self.index_dim * self.q_rank + (self.index_dim + self.index_heads) * self.hidden
        return shared, (self.q_rank + self.latent + self.rope) * self.hidden + indexer

    def _sparse_layers_mlp(self) -> tuple[int, int]:
        outer = 2 * self.expert_hidden * self.hidden + 2 * self.experts * self.hidden  # the router is fp32
        return 3 * self.hidden * self.shared_width, outer

    def _dense_mlp(self) -> tuple[int, int]:
        return 3 * self.hidden * self.dense_width, 0

    def weight_bytes(self, tp: int, pp: int, ep: int) -> float:
        """Bytes of weights on a rank: the fullest stage has the layers rounded up."""
        share = -(-self.layers // pp) / self.layers
        experts = (self.layers - self.dense) * self.experts * self.routed
        rest = (self.weight_parameters(1) - experts) / tp + self.weight_parameters(0)
        return share * (BF16 * rest + self.expert_bytes * experts / (tp * ep))

    def cache_bytes(self, tokens: int, tp: int, pp: int, sp: int) -> float:
        """Bytes of one sequence on a rank: caches of ``tokens``, which tp replicates and sp shares out; states."""
        share = -(-self.layers // pp) / self.layers
        caches = self.sparse * tokens * (self.latent_bytes + self.index_key_bytes) / sp
        states = self.kda * self.heads * self.head_dim * (self.head_dim * FP32 + 9 * BF16) / tp
        return share * (caches + states)

    def step_work(self, rows: int, tokens: int, context: float, tp: int, ep: int, sp: int) -> Work:
        """The work of a rank in a step of ``rows`` sequences by ``tokens`` behind ``context``, all layers."""
        n = rows * tokens
        shared = self.weight_parameters(1) - (self.layers - self.dense) * self.experts * self.routed
        dense = shared / tp + self.weight_parameters(0) - self._table() / tp  # a lookup reads rows alone
        work = Work(round(BF16 * dense), {"bfloat16": round(2 * n * dense)}, self.layers * LAYER_LAUNCHES)
        work += self._experts(n, tp, ep) + self._states(rows, n, tp) + self._attention(n, tokens, context, tp, sp)
        activations = n * self.hidden * BF16 * self.layers * 2 * (self.residual_blocks / 2 + 4)
        return work + Work(round(activations))

    def _experts(self, n: int, tp: int, ep: int) -> Work:
        """Routed experts of ``n`` tokens on each of ``ep`` replicas: those that any of their tokens picks are read."""
        layers, everywhere = self.layers - self.dense, n * ep
        busy = self.experts * (1 - (1 - self.experts_a_token / self.experts) ** everywhere)
        read = layers * busy * self.routed * self.expert_bytes / (tp * ep)
        flops = layers * 2 * n * self.experts_a_token * self.routed / tp
        return Work(round(read), {"bfloat16": round(flops)}, layers * EXPERT_LAUNCHES)

    def _states(self, rows: int, n: int, tp: int) -> Work:
        state = self.heads / tp * self.head_dim * self.head_dim
        return Work(round(self.kda * rows * state * 2 * FP32), {"vector": round(self.kda * n * 7 * state)}, 0)

    def _attention(self, n: int, tokens: int, context: float, tp: int, sp: int) -> Work:
        rows = n // tokens
        ranks = max(sp, tp if rows % tp == 0 else 1)  # by keys, or by sequences
        keys = (
            rows * context * self.index_key_bytes * max(1, tokens // 128)
        )  # keys are read once for a block of queries
        picked = n * min(self.picks, context) * self.latent_bytes / min(tokens, 16)  # neighbours pick alike
        scores = 2 * self.index_heads * self.index_dim * n * context
        absorbed = 2 * self.heads / tp * min(self.picks, context) * n * (2 * self.latent + self.rope)
        return Work(
            round(self.sparse * (keys / ranks + picked / sp)),
            {"float8_e4m3fn": round(self.sparse * scores / ranks), "bfloat16": round(self.sparse * absorbed)},
        )


K31 = Sizes(
    name="K3.1 at full size",
    layers=93,
    sparse=24,
    hidden=7168,
    heads=96,
    head_dim=128,
    q_rank=1536,
    latent=512,
    rope=64,
    index_heads=64,
    index_dim=128,
    picks=2048,
    experts=896,
    experts_a_token=16,
    expert_width=3072,
    expert_hidden=3584,
    shared_width=6144,
    dense=1,
    dense_width=33792,
    vocabulary=163840,
    residual_blocks=8,
)
"""The sizes of Kimi K3's published configuration, its MLA layers with the indexer of DeepSeek-V3.2."""

AT_WIDTH = Sizes(
    name="K3.1 at width, 4 layers, in bf16",
    layers=4,
    sparse=1,
    hidden=2304,
    heads=32,
    head_dim=128,
    q_rank=1536,
    latent=512,
    rope=64,
    index_heads=64,
    index_dim=128,
    picks=2048,
    experts=256,
    experts_a_token=8,
    expert_width=1024,
    expert_hidden=1152,
    shared_width=1024,
    dense=1,
    dense_width=9216,
    vocabulary=163840,
    residual_blocks=2,
    expert_bytes=BF16,
    latent_bytes=1152,
    index_key_bytes=256,
)
"""``examples/k31`` with four layers, by which the formulas are checked against compiled programs."""
