"""Kimi K3.1 in plain PyTorch: the published Kimi K3 skeleton with DeepSeek sparse attention on its MLA layers.

config = KimiK31Config.from_file(Path("examples/k31_tiny/config.json"))
model = initialize(KimiK31ForCausalLM(config, device="meta"), seed=0)
logits = model(input_ids, lengths, new_cache(config, batch=2, context=256))
"""

from kimigraph.models.initialization import initialize
from kimigraph.models.kimi_k31.cache import new_cache
from kimigraph.models.kimi_k31.configuration import KimiK31Config
from kimigraph.models.kimi_k31.model import KimiK31ForCausalLM

__all__ = ["KimiK31Config", "KimiK31ForCausalLM", "initialize", "new_cache"]
