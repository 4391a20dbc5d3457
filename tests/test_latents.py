"""Families with latent attention, against transformers in float32; and the operation itself, both ways that it is computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from backend.config import EngineConfig
from backend.errors import ModelError
from backend.model_checks import check_model
from backend.models.layers import ATTENTION
from backend.models.loading import check_gpu
from backend.step.worker import Worker
from kernels import ops, reference
from tests.families import Case, assert_close, check_case, edited, make_model, refused, rope
from tests.steps import make_worker
from tests.test_mixtures import check_fused, logits_of, on_ranks

SIZES = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 12, "num_key_value_heads": 4}
EXPERTS = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1}
DEEPSEEK = SIZES | EXPERTS | {"n_group": 2, "topk_group": 1}
ODD = {"kv_lora_rank": 11, "qk_nope_head_dim": 5, "qk_rope_head_dim": 6, "v_head_dim": 7, "q_lora_rank": 9}
YARN = rope("yarn", factor=4.0, mscale=0.7, mscale_all_dim=1.2, original_max_position_embeddings=32)
CASES = [
    Case("deepseek_v2", "queries of hidden states, without their bias, a factor", SIZES | EXPERTS | {"q_lora_rank": None, "attention_bias": True}
         | {"routed_scaling_factor": 1.7}),
    Case("deepseek_v2", "groups, yarn with mscale, biases", SIZES | EXPERTS | YARN | {"topk_method": "group_limited_greedy", "n_group": 3}
         | {"topk_group": 2, "num_experts_per_tok": 3, "attention_bias": True, "mlp_bias": True}),
    Case("deepseek_v2", "one layer, no dense one, one expert, tied", SIZES | EXPERTS | {"n_routed_experts": 1, "num_experts_per_tok": 1}
         | {"num_hidden_layers": 1, "first_k_dense_replace": 0, "tie_word_embeddings": True}),
    Case("deepseek_v3", "groups, queries of latents", DEEPSEEK),
    Case("deepseek_v3", "three dense layers of four, yarn, a norm of its own", DEEPSEEK | YARN | {"first_k_dense_replace": 3, "num_hidden_layers": 4}
         | {"rms_norm_eps": 1e-3, "attention_bias": True}),
    Case("deepseek_v3", "one of three experts, odd sizes", SIZES | EXPERTS | ODD | {"n_routed_experts": 3, "num_experts_per_tok": 1, "n_group": 1}
         | {"topk_group": 1, "first_k_dense_replace": 0}),
    Case("deepseek_v3", "a latent smaller than heads, not interleaved, all experts, not normalised", DEEPSEEK | {"kv_lora_rank": 8, "v_head_dim": 24}
         | {"qk_nope_head_dim": 16, "q_lora_rank": None, "rope_interleave": False, "num_experts_per_tok": 6, "n_group": 1, "norm_topk_prob": False}),
]  # fmt: skip


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Any, Path]:
    folder = tmp_path_factory.mktemp("model")
    return request.param, make_model(request.param, folder), folder


def test_as_transformers(case: tuple[Case, Any, Path]) -> None:
    check_case(*case, CASES)


def test_all_experts_in_one_weight(case: tuple[Case, Any, Path], tmp_path: Path) -> None:
    _, model, folder = case
    check_fused(model, folder, tmp_path / "fused")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a vocabulary that two ranks can split."""
    made = tmp_path_factory.mktemp("model")
    make_model(Case("deepseek_v3", config=DEEPSEEK | {"vocab_size": 302}), made)
    return made


# -- the operation --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query_lens", [(1, 3), (70,), (1, 40, 5)], ids=str)
def test_attention_over_latents(query_lens: tuple[int, ...]) -> None:
    """Of requests whose pages lie anywhere: keys and values of every head, made first, in float64."""
    generator = torch.Generator().manual_seed(2)
    num_heads, still, turning, rank, value, size = 3, 5, 4, 32, 7, 8
    seq_lens = [n + 11 for n in query_lens]
    counts = [-(-n // size) for n in seq_lens]
    order = torch.randperm(sum(counts), generator=generator).tolist()
    pages = [[order.pop() for _ in range(count)] for count in counts]
    latents = torch.randn(sum(counts), size, 1, rank + turning, generator=generator)
    key_up, value_up = (torch.randn(num_heads, n, rank, generator=generator) * 0.2 for n in (still, value))
    query = torch.randn(sum(query_lens), num_heads, still + turning, generator=generator)
    plan = reference.plan_attention(query_lens, seq_lens, pages, size, 1, torch.float32)
    got = ops.latent_attention(query, latents, plan, key_up, value_up, 0.3).double()
    begin = 0
    for count, length, own in zip(query_lens, seq_lens, pages):
        entries = latents[own].flatten(0, 2)[:length].double()
        for i in range(count):
            seen = entries[: length - count + i + 1]
            keys = torch.cat([torch.einsum("sr,hnr->hsn", seen[:, :rank], key_up.double()), seen[:, rank:].expand(num_heads, -1, -1)], dim=-1)
            shares = (torch.einsum("hn,hsn->hs", query[begin + i].double(), keys) * 0.3).softmax(dim=-1)
            expected = torch.einsum("hs,sr,hvr->hv", shares, seen[:, :rank], value_up.double())
            torch.testing.assert_close(got[begin + i], expected, rtol=1e-4, atol=1e-5)
        begin += count


def test_long_prompts_make_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """And few queries never do."""
    made: list[int] = []
    own: Callable[..., torch.Tensor] = F.scaled_dot_product_attention

    def watched(query: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        made.append(query.shape[2])
        return own(query, *arguments, **options)

    monkeypatch.setattr("kernels.reference.latent.F.scaled_dot_product_attention", watched)
    for count in (1, 17, 33, 60):
        plan = reference.plan_attention([count], [count], [list(range(8))], 8, 1, torch.float32)
        ops.latent_attention(torch.randn(count, 2, 12), torch.randn(8, 8, 1, 20), plan, torch.randn(2, 8, 16), torch.randn(2, 8, 16), 1.0)
    assert made == [33, 60]


# -- what is kept, and where ----------------------------------------------------------------------------------------------------


def test_a_token_keeps_one_latent_a_layer(folder: Path) -> None:
    spec = make_worker(folder).store.specs[ATTENTION]
    assert (spec.shape, spec.num_planes) == ((1, 16 + 8), 2)


@pytest.mark.parametrize("is_spread", [False, True], ids=["split", "spread"])
def test_two_ranks_compute_what_one_does(is_spread: bool, folder: Path) -> None:
    values = {"model": str(folder), "device": "cpu", "dtype": "float32", "kv_cache_memory": "1MiB", "page_size": 8, "max_batch_size": 4}
    config = EngineConfig.from_dict(values | {"parallel_config": {"tensor_parallel_size": 2, "expert_parallel": is_spread}})
    own = on_ranks(2, lambda ranks: logits_of(Worker(config, ranks)))
    assert torch.equal(own[0], own[1])
    assert_close(own[0], logits_of(make_worker(folder)))


def test_sizes_that_a_gpu_does_not_take(folder: Path) -> None:
    spec = check_model(folder)
    check_gpu(spec, torch.float32)
    with pytest.raises(ModelError, match=r"config.json: q_lora_rank 12: a GPU serves multiples of 8 in torch.bfloat16; use --device cpu"):
        check_gpu(spec, torch.bfloat16)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; it must be even"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be an integer from 1"),
        ({"kv_lora_rank": ...}, "has no 'kv_lora_rank'"),
        ({"q_lora_rank": 13}, "weight model.layers.0.self_attn.q_a_proj.weight has shape"),
        ({"q_lora_rank": None}, "weight model.layers.0.self_attn.q_proj.weight"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; known: sigmoid"),
        ({"n_group": ..., "topk_group": ...}, "n_group is None; it must be an integer"),
        ({"rope_interleave": 1}, "rope_interleave is 1; it must be true or false"),
        ({"architectures": ["DeepseekV2ForCausalLM"]}, "norm_topk_prob is True; it must be false"),
        ({"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported; known: greedy, group"),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else "",
)
def test_values_that_no_model_has(values: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    refused(edited(folder, tmp_path / "model", **values), str(tmp_path / "model"), message)
