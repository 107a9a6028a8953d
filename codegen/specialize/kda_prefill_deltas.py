"""The gated delta rule over runs of tokens, with the corrected deltas as a third result."""

from kimigraph.codegen.kernel import KernelModule, KernelRequest
from kimigraph.codegen.specialize import kda_prefill

_HEAD = "\ndef launch("
_LAUNCH = '''

def launch(q, k, v, g, beta, initial_state=None, a_log=None, dt_bias=None, cu_seqlens=None, *, memory=torch):
    """The operator's tensors in schema order -> (out, final_state, deltas)."""
    deltas = memory.empty(CONSTANTS["out"], dtype=torch.float32, device=q.device)
    results = prefill(q, k, v, g, beta, initial_state, a_log, dt_bias, cu_seqlens, deltas=deltas, memory=memory)
    return (*results, deltas)
'''


def build(request: KernelRequest) -> KernelModule:
    """The launches of ``kda_prefill`` in the form that writes the deltas; CompileError as there."""
    module = kda_prefill.build(request, deltas=True)
    assert module.text.count(_HEAD) == 1
    return KernelModule(module.text.replace(_HEAD, "\ndef prefill(") + _LAUNCH, module.launches)
