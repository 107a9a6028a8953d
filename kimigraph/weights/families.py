"""The layouts of the model families, by ``model_type``.

Sources: the published checkpoints of Kimi-Linear, Kimi K3, DeepSeek-V3.2 and GLM, as transformers and vLLM read them. A
model type without an entry is read by its own names.
"""

from kimigraph.weights.layout import Concatenated, Layout, Part, Renamed, Rule, Stacked

_ROTARY = r"\.rotary_emb\.inv_freq$"
"""A table that the model computes; old checkpoints hold it."""

_SHORT_CONVOLUTION = Concatenated(
    r"(.*self_attn\.)conv1d\.weight", (r"\1q_conv1d.weight", r"\1k_conv1d.weight", r"\1v_conv1d.weight")
)
_FORGET_GATE: tuple[Rule, ...] = (
    Renamed(r"(.*self_attn\.)forget_gate\.A_log", r"\1A_log", padded=True),
    Renamed(r"(.*self_attn\.)forget_gate\.dt_bias", r"\1dt_bias", padded=True),
    Renamed(r"(.*self_attn\.)forget_gate\.(f_[ab]_proj\..*)", r"\1\2"),
)


def _experts(prefix: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Experts of ``prefix`` (a pattern with one group), published one by one below the template."""
    each = r"experts.{expert}."
    return (
        Stacked(rf"{prefix}experts\.gate_up_proj", (rf"\1{each}{gate}.weight", rf"\1{each}{up}.weight")),
        Stacked(rf"{prefix}experts\.down_proj", (rf"\1{each}{down}.weight",)),
    )


def _fused(pattern: str, source: str, parts: tuple[str, ...]) -> Part:
    """Parts ``(pattern)part.weight`` of a published ``source.weight``."""
    names = "|".join(parts)
    return Part(rf"{pattern}(?:{names})\.weight", rf"\1{source}.weight", tuple(rf"\1{part}.weight" for part in parts))


_FUSED: tuple[Rule, ...] = (
    _fused(r"(.*(?:mlp|shared_experts)\.)", "gate_up_proj", ("gate_proj", "up_proj")),
    _fused(r"(.*self_attn\.)", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
    _fused(r"(.*self_attn\.)", "fused_qkv_a_proj_with_mqa", ("q_a_proj", "kv_a_proj_with_mqa")),
)

_HYPER_CONNECTIONS: tuple[Rule, ...] = (
    Renamed(r"(.*\.)attn_hc\.(fn|base|scale)", r"\1hc_attn_\2"),
    Renamed(r"(.*\.)ffn_hc\.(fn|base|scale)", r"\1hc_ffn_\2"),
)

_HEAD = "lm_head.weight"

KIMI_K31 = Layout(
    rules=(
        _SHORT_CONVOLUTION,
        Renamed(r"(.*self_attn\.conv1d\.weight)", r"\1", padded=True),
        Renamed(r"(.*self_attn\.(?:A_log|dt_bias))", r"\1", padded=True),
        *_experts(r"(.*block_sparse_moe\.)", "w1", "w3", "w2"),
        *_FUSED,
    ),
    prefixes=("", "language_model."),
    ignored=(r"(^|\.)(vision_tower|mm_projector)\.", _ROTARY),
)

KIMI_LINEAR = Layout(
    rules=(
        _SHORT_CONVOLUTION,
        *_FORGET_GATE,
        Stacked(
            r"(.*)mlp\.experts\.gate_up_proj",
            (r"\1block_sparse_moe.experts.{expert}.w1.weight", r"\1block_sparse_moe.experts.{expert}.w3.weight"),
        ),
        Stacked(r"(.*)mlp\.experts\.down_proj", (r"\1block_sparse_moe.experts.{expert}.w2.weight",)),
        Renamed(r"(.*\.)mlp\.((?!experts\.).*)", r"\1block_sparse_moe.\2"),
        *_FUSED,
    ),
    tied=(("model.embed_tokens.weight", _HEAD),),
    ignored=(_ROTARY,),
)

DEEPSEEK = Layout(
    rules=(*_experts(r"(.*mlp\.)", "gate_proj", "up_proj", "down_proj"), *_FUSED),
    tied=(("model.embed_tokens.weight", _HEAD),),
    ignored=(_ROTARY,),
)

_GLM_RULES = (
    _SHORT_CONVOLUTION,
    *_FORGET_GATE,
    *_HYPER_CONNECTIONS,
    *_experts(r"(.*mlp\.)", "gate_proj", "up_proj", "down_proj"),
    *_FUSED,
)

GLM = Layout(
    rules=_GLM_RULES,
    tied=(("model.language_model.embed_tokens.weight", _HEAD),),
    ignored=(r"^model\.visual\.", r"\.shared_head\.", _ROTARY),
)

GLM_TEXT = Layout(
    rules=_GLM_RULES,
    prefixes=("", "model.", "model.language_model."),
    ignored=(r"^model\.visual\.", r"\.shared_head\.", r"^lm_head\.", _ROTARY),
)

_LAYOUTS = {
    "kimi_k3": KIMI_K31,
    "kimi_k31": KIMI_K31,
    "kimi_linear": KIMI_LINEAR,
    "deepseek_v32": DEEPSEEK,
    "glm_moe_dsa": DEEPSEEK,
    "glm5_next": GLM,
    "glm5_next_text": GLM_TEXT,
}


def layout_of(model_type: str) -> Layout:
    """The layout of a model type; one that reads tensors by the model's own names where none is known."""
    return _LAYOUTS.get(model_type, Layout())
