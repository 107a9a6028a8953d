"""Kimi K3 in plain PyTorch: Kimi Delta Attention, dense gated MLA without positions, block Attention Residuals and
latent experts. Its parts lie in ``kimigraph.models.kimi_k31``, the same model with sparse attention.

config = KimiK3Config.from_file(Path("config.json"))
model = initialize(KimiK3ForCausalLM(config, device="meta"), seed=0)
logits = model(input_ids, lengths, new_cache(config, batch=2, context=256))
"""

from kimigraph.models.initialization import initialize
from kimigraph.models.kimi_k31.cache import new_cache
from kimigraph.models.kimi_k31.configuration import KimiK3Config
from kimigraph.models.kimi_k31.model import KimiK3ForCausalLM

__all__ = ["KimiK3Config", "KimiK3ForCausalLM", "initialize", "new_cache"]
