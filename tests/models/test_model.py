from collections import Counter

import pytest
import torch

from kimigraph.models.kimi_k31 import new_cache

CONTEXT = 96
CHOOSE_ALL = {"index_topk": CONTEXT, "num_experts_per_token": 8}
"""Without a choice between near equals, two orders of summation stay close everywhere."""
SHORT = {"num_hidden_layers": 2, "linear": {"kda_layers": [1], "full_attn_layers": [2]}}
"""One layer of each kind."""


def prompt(rows, tokens):
    return torch.randint(0, 256, (rows, tokens))


def lengths_of(*values):
    return torch.tensor(values, dtype=torch.int32)


def run(model, ids, cache, start, sizes):
    """Logits of ``ids`` fed in pieces of those sizes, from ``start`` tokens a row."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(model(ids[:, at : at + size], start + at, cache))
        at += size
    return torch.cat(pieces, dim=1)


@pytest.mark.parametrize("linear", [{}, {"gate_lower_bound": None}])
@pytest.mark.parametrize("sizes", [[1] * 70, [33, 1, 1, 35], [64, 6], [5, 1, 64]])
def test_pieces_equal_one_prefill(build, sizes, linear):
    model, ids = build(linear=linear, **CHOOSE_ALL), prompt(2, 70)
    whole, parts = (new_cache(model.config, 2, CONTEXT) for _ in range(2))
    want = model(ids, lengths_of(0, 0), whole)
    got = run(model, ids, parts, lengths_of(0, 0), sizes)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-3)
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-3, atol=2e-3)


def test_pieces_equal_one_prefill_with_choices(build):
    """Rounding moves a few choices between near equals, of experts and of tokens; the others must agree."""
    model, ids = build(num_hidden_layers=4), prompt(2, 70)
    want = model(ids, lengths_of(0, 0), new_cache(model.config, 2, CONTEXT))
    got = run(model, ids, new_cache(model.config, 2, CONTEXT), lengths_of(0, 0), [1] * 70)
    close = ((got - want).abs().amax(-1) < 1e-3).float().mean()
    assert close > 0.95


def test_rows_of_different_lengths(build):
    """Each row of a ragged batch equals the same sequence alone."""
    model, ids, starts = build(**CHOOSE_ALL), prompt(3, 50), [0, 7, 40]
    cache = new_cache(model.config, 3, CONTEXT)
    wants = []
    for row, start in enumerate(starts):
        alone = new_cache(model.config, 1, CONTEXT)
        if start:
            model(ids[row : row + 1, :start], lengths_of(0), alone)
        for name in cache:
            cache[name][row] = alone[name][0]
        wants.append(model(ids[row : row + 1, start : start + 10], lengths_of(start), alone))
    following = torch.stack([ids[row, start : start + 10] for row, start in enumerate(starts)])
    got = run(model, following, cache, lengths_of(*starts), [1, 1, 3, 1, 4])
    torch.testing.assert_close(got, torch.cat(wants), rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("tokens", [1, 3])
def test_no_sequences_give_no_logits(build, tokens):
    model = build()
    got = model(torch.zeros(0, tokens, dtype=torch.int64), lengths_of(), new_cache(model.config, 0, 32))
    assert got.shape == (0, tokens, 256)


def test_unwritten_slots_do_not_matter(build):
    model, ids = build(), prompt(2, 1)
    cache = new_cache(model.config, 2, CONTEXT)
    model(prompt(2, 20), lengths_of(0, 0), cache)
    dirty = {name: tensor.clone() for name, tensor in cache.items()}
    for name, tensor in dirty.items():
        if name.startswith("cache."):
            tensor[:, 21:] = 50.0
    want = model(ids, lengths_of(20, 20), cache)
    assert torch.equal(model(ids, lengths_of(20, 20), dirty), want)


def test_every_parameter_but_the_first_query_matters(build):
    """Other values of any parameter change the logits: nothing is left out of the computation."""
    model, ids = build(num_hidden_layers=4), prompt(1, 40)
    want = model(ids, lengths_of(0), new_cache(model.config, 1, 40))
    unused = set()
    for name, parameter in model.named_parameters():
        original = parameter.clone()
        parameter.copy_(3 * parameter.flip(-1))
        got = model(ids, lengths_of(0), new_cache(model.config, 1, 40))
        parameter.copy_(original)
        if torch.equal(got, want):
            unused.add(name)
    assert unused == {f"model.layers.0.self_attention_res_{part}.weight" for part in ("norm", "proj")}


def test_parameter_names_are_the_published_ones(build):
    names = {name for name, _ in build().named_parameters()}
    assert {name.removeprefix("model.layers.1.") for name in names if ".layers.1." in name} == set(
        "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight self_attn.conv1d.weight"
        " self_attn.f_a_proj.weight self_attn.f_b_proj.weight self_attn.b_proj.weight self_attn.g_proj.weight"
        " self_attn.o_proj.weight self_attn.o_norm.weight self_attn.A_log self_attn.dt_bias input_layernorm.weight"
        " post_attention_layernorm.weight self_attention_res_norm.weight self_attention_res_proj.weight"
        " mlp_res_norm.weight mlp_res_proj.weight block_sparse_moe.gate.weight"
        " block_sparse_moe.gate.e_score_correction_bias block_sparse_moe.routed_expert_down_proj.weight"
        " block_sparse_moe.experts.gate_up_proj block_sparse_moe.experts.down_proj"
        " block_sparse_moe.routed_expert_norm.weight block_sparse_moe.routed_expert_up_proj.weight"
        " block_sparse_moe.shared_experts.gate_proj.weight block_sparse_moe.shared_experts.up_proj.weight"
        " block_sparse_moe.shared_experts.down_proj.weight".split()
    )
    assert {name.removeprefix("model.layers.3.self_attn.") for name in names if ".layers.3.self_attn." in name} == set(
        "q_a_proj.weight q_a_layernorm.weight q_b_proj.weight kv_a_proj_with_mqa.weight kv_a_layernorm.weight"
        " kv_b_proj.weight g_proj.weight o_proj.weight indexer.wq_b.weight indexer.wk.weight indexer.k_norm.weight"
        " indexer.k_norm.bias indexer.weights_proj.weight".split()
    )
    assert {name for name in names if ".layers." not in name} == set(
        "model.embed_tokens.weight model.norm.weight model.output_attn_res_norm.weight"
        " model.output_attn_res_proj.weight lm_head.weight".split()
    )
    assert "model.layers.0.mlp.gate_proj.weight" in names


def test_sensitive_parameters_stay_fp32(build):
    wide = {name for name, parameter in build(dtype="bfloat16").named_parameters() if parameter.dtype == torch.float32}
    kinds = Counter(name.split(".", 3)[-1] for name in wide)
    assert kinds == {
        "self_attn.A_log": 6,
        "self_attn.dt_bias": 6,
        "self_attn.conv1d.weight": 6,
        "self_attn.o_norm.weight": 6,
        "self_attn.indexer.weights_proj.weight": 2,
        "block_sparse_moe.gate.weight": 7,
        "block_sparse_moe.gate.e_score_correction_bias": 7,
    }


@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_bf16_stays_near_fp32(build, tokens):
    narrow = build(dtype="bfloat16", num_hidden_layers=2)
    wide = build(num_hidden_layers=2)
    wide.load_state_dict(narrow.state_dict())
    ids = prompt(2, tokens)
    got = narrow(ids, lengths_of(0, 0), new_cache(narrow.config, 2, 48))
    want = wide(ids, lengths_of(0, 0), new_cache(wide.config, 2, 48))
    assert got.dtype == torch.bfloat16
    error = (got.float() - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.median() < 0.05  # the rest: tokens that rounding sends to another expert


@pytest.mark.parametrize(("tokens", "fields"), [(1, {}), (5, {}), (5, {"dtype": "bfloat16"})])
def test_export_keeps_numbers_and_updates_caches(build, tokens, fields):
    model, ids, lengths = build(**SHORT, **fields), prompt(2, tokens), lengths_of(3, 20)
    cache = new_cache(model.config, 2, 32)
    for tensor in cache.values():
        tensor.normal_()
    exported_cache, eager_cache = ({name: tensor.clone() for name, tensor in cache.items()} for _ in range(2))
    program = torch.export.export(model, (ids, lengths, cache), strict=False).run_decompositions({})
    mutated = program.graph_signature.user_inputs_to_mutate.values()
    assert sorted(name.removeprefix("cache_").replace("_", ".", 2) for name in mutated) == sorted(cache)
    targets = Counter(str(node.target) for node in program.graph.nodes if node.op == "call_function")
    assert targets["aten.topk.default"] == 2  # the picks and the experts
    assert not any("kimigraph" in target or "higher_order" in target for target in targets)

    got = program.module()(ids, lengths, exported_cache)
    want = model(ids, lengths, eager_cache)
    torch.testing.assert_close(got, want)
    for name in cache:
        assert not torch.equal(cache[name], eager_cache[name])
        torch.testing.assert_close(exported_cache[name], eager_cache[name])
    assert lengths.tolist() == [3, 20]


@pytest.mark.parametrize("tokens", [1, 5])
def test_dynamo_takes_the_model_as_one_graph(build, tokens):
    model, ids, lengths = build(**SHORT), prompt(2, tokens), lengths_of(3, 20)
    caches = [new_cache(model.config, 2, 32) for _ in range(2)]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids, lengths, caches[0]), model(ids, lengths, caches[1]))
    for name, tensor in caches[0].items():
        torch.testing.assert_close(tensor, caches[1][name])
