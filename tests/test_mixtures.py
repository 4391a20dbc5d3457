"""Families with mixtures of experts, against transformers in float32: every rule of routing, and each odd count."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

from backend.config import EngineConfig
from backend.errors import ConfigError, ModelError
from backend.model_checks import check_model, check_split
from backend.models.inspection import _weight_bytes
from backend.models.layers import Weights
from backend.models.loader import Checkpoint
from backend.models.moe import load_experts
from backend.models.moe_spec import MoeSpec
from backend.models.writing import write_quantized
from backend.parallel.ranks import Ranks, make_ranks
from backend.quantization_config import QuantizationConfig
from backend.step.worker import Worker
from kernels import ops
from tests.families import Case, assert_close, check_case, edited, load, make_model, put_tokenizer, random_tokens, refused
from tests.steps import Row, Steps, make_worker

CPU = torch.device("cpu")
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN2 = {**EXPERTS, "shared_expert_intermediate_size": 20}
ERNIE = {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2}
GLM = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "routed_scaling_factor": 1.7}
CASES = [
    Case("qwen2_moe", "a shared expert with a gate", QWEN2),
    Case("qwen2_moe", "every other layer, normalised, windows, no biases, tied", QWEN2 | {"decoder_sparse_step": 2, "norm_topk_prob": True}
         | {"num_hidden_layers": 4, "mlp_only_layers": [3], "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}
         | {"qkv_bias": False, "tie_word_embeddings": True}),
    Case("qwen3_moe", "three of seven experts, normalised, heads of 32", {"head_dim": 32, "num_experts": 7, "num_experts_per_tok": 3}
         | {"moe_intermediate_size": 20, "norm_topk_prob": True}),
    Case("qwen3_moe", "one expert, one layer, one KV head, tied", EXPERTS | {"num_experts": 1, "num_experts_per_tok": 1, "num_hidden_layers": 1}
         | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    Case("qwen3_moe", "all experts of each layer but the first, a window, biases", EXPERTS | {"num_experts_per_tok": 5, "mlp_only_layers": [0]}
         | {"use_sliding_window": True, "sliding_window": 9, "attention_bias": True, "hidden_act": "gelu"}),
    Case("mixtral", "two of three experts, a window", {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 11}),
    Case("mixtral", "one expert, heads of 24", {"num_local_experts": 1, "num_experts_per_tok": 1, "head_dim": 24}),
    Case("olmoe", "norms of all heads at once, clipped", {"num_experts": 5, "num_experts_per_tok": 3, "clip_qkv": 1.5}),
    Case("olmoe", "normalised, biases, tied", {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": True}
         | {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    Case("ernie4_5_moe", "the first layer dense, a correction", ERNIE),
    Case("ernie4_5_moe", "every other layer up to the third, none shared, biases, untied, a least sum", ERNIE | {"moe_num_shared_experts": 0}
         | {"num_hidden_layers": 4, "moe_layer_start_index": 0, "moe_layer_interval": 2, "moe_layer_end_index": 2, "use_bias": True}
         | {"tie_word_embeddings": False, "moe_norm_min": 0.5}),
    Case("glm4_moe", "the first layer dense, a correction, a factor", GLM),
    Case("glm4_moe", "three dense layers of four, groups, norms of heads, not normalised", GLM | {"n_group": 3, "topk_group": 2}
         | {"first_k_dense_replace": 3, "num_hidden_layers": 4, "use_qk_norm": True, "norm_topk_prob": False, "attention_bias": True}),
    Case("glm4_moe", "no dense layer, one group of three", GLM | {"first_k_dense_replace": 0, "n_group": 2, "topk_group": 1, "head_dim": 16}),
]  # fmt: skip


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Any, Path]:
    folder = tmp_path_factory.mktemp("model")
    return request.param, make_model(request.param, folder), folder


def test_as_transformers(case: tuple[Case, Any, Path]) -> None:
    check_case(*case, CASES)


def save_fused(model: Any, folder: Path) -> Path:
    """As transformers holds experts: all in one weight."""
    model.save_pretrained(folder, save_original_format=False)
    put_tokenizer(folder, model.config.vocab_size)
    return folder


def check_fused(model: Any, folder: Path, fused: Path) -> None:
    names = load_file(save_fused(model, fused) / "model.safetensors")
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in names) and not any(".experts.0." in name for name in names)
    assert torch.equal(logits_of(make_worker(fused)), logits_of(make_worker(folder)))
    for size in (1, 2):
        sizes = [_weight_bytes(check_model(path), torch.float32, size) for path in (fused, folder)]
        assert sizes[0] == sizes[1], "what inspect says"


def test_all_experts_in_one_weight(case: tuple[Case, Any, Path], tmp_path: Path) -> None:
    check_fused(*case[1:], tmp_path / "fused")


class Noting(Checkpoint):
    """Which fused experts were read."""

    asked: ClassVar[set[int]] = set()

    def get_one(self, name: str, shape: tuple[int, ...], number: int) -> torch.Tensor:
        self.asked.add(number)
        return super().get_one(name, shape, number)


@pytest.mark.parametrize("scheme", [None, "wint8"])
@pytest.mark.parametrize("is_spread", [False, True], ids=["split", "spread"])
def test_ranks_and_rounding_of_fused_experts(is_spread: bool, scheme: str | None, folders: Callable[..., Path], tmp_path: Path) -> None:
    """A rank reads no others than it holds."""
    folder = folders("mixtral", 4)
    fused = save_fused(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tmp_path / "fused")
    Noting.asked.clear()
    made, x = [], torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    for path in (folder, fused):
        with Noting(path) as checkpoint:
            rounding = QuantizationConfig(moe_quant_type=scheme)
            weights = Weights(checkpoint, torch.float32, CPU, Ranks(1, 2), rounding, is_expert_parallel=is_spread)
            experts = load_experts(check_model(path).layers[0].mlp, weights).experts
            made.append(torch.stack([expert(x) for expert in experts]))
    assert torch.equal(*made)
    assert Noting.asked == ({2, 3} if is_spread else {0, 1, 2, 3})


BROKEN: list[tuple[str, torch.Tensor | None, str]] = [
    ("1.mlp.experts.down_proj", None, "is missing"),
    ("1.mlp.experts.gate_up_proj", torch.zeros(5, 64, 48), "has shape (5, 64, 48); config.json makes it (5, 48, 64)"),
    ("0.mlp.experts.down_proj", torch.zeros(5, 64, 24, dtype=torch.int8), "is of dtype I8; known: F64, F32, F16, BF16"),
    ("1.mlp.experts.down_proj_scale_inv", torch.ones(5, 1, 1), ": experts in one weight for all are not supported in quantized form: save the model"),
]


@pytest.mark.parametrize(("name", "weight", "message"), BROKEN, ids=["missing", "shape", "dtype", "quantized"])
def test_fused_experts_that_are_none(name: str, weight: torch.Tensor | None, message: str, folders: Callable[..., Path], tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folders("qwen2_moe"), dtype=torch.float32)
    fused = save_fused(model, tmp_path / "fused")
    weights = {own: tensor for own, tensor in load_file(fused / "model.safetensors").items() if own != f"model.layers.{name}"}
    save_file(weights | ({} if weight is None else {f"model.layers.{name}": weight}), fused / "model.safetensors")
    refused(fused, f"weight model.layers.{name}{message}" if message.startswith(":") else f"weight model.layers.{name} {message}")


def test_fused_experts_are_not_rounded_in_a_folder(folders: Callable[..., Path], tmp_path: Path) -> None:
    fused = save_fused(transformers.AutoModelForCausalLM.from_pretrained(folders("olmoe"), dtype=torch.float32), tmp_path / "fused")
    with pytest.raises(ModelError, match=r"weight model\.layers\.0\.mlp\.experts\.gate_up_proj, of all experts, is not rounded: save the model with"):
        write_quantized(fused, tmp_path / "out", QuantizationConfig(dense_quant_type="wint8", moe_quant_type="wint8"))
    write_quantized(fused, tmp_path / "out", QuantizationConfig(dense_quant_type="wint8"))
    assert load(tmp_path / "out")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A family's first case, saved once."""
    made: dict[tuple[str, int | None], Path] = {}

    def folder_of(family: str, num_experts: int | None = None) -> Path:
        if (family, num_experts) not in made:
            made[family, num_experts] = tmp_path_factory.mktemp(family)
            values = next(case for case in CASES if case.family == family).config
            if num_experts is not None:
                values = values | {key: num_experts for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in values}
            make_model(Case(family, config=values), made[family, num_experts])
        return made[family, num_experts]

    return folder_of


# -- routing --------------------------------------------------------------------------------------------------------------------


def test_only_experts_that_are_hit_run() -> None:
    """Those of other ranks add nothing, and an expert sees all of its tokens at once."""
    x, calls = torch.randn(3, 4), []

    def expert(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(rows: torch.Tensor) -> torch.Tensor:
            calls.append((number, len(rows)))
            return rows * number

        return run

    experts, weights = torch.tensor([[2, 5], [5, 0], [7, 2]]), torch.tensor([[0.5, 1.0], [2.0, 9.0], [9.0, 1.5]])
    mixed = ops.mix_experts(x, experts, weights, [expert(n) for n in range(2, 6)], first=2)
    assert calls == [(2, 2), (5, 2)]
    torch.testing.assert_close(mixed, x * torch.tensor([[6.0], [10.0], [3.0]]))


def test_a_correction_chooses_and_does_not_weigh() -> None:
    scores = torch.tensor([[0.5, 0.4, 0.3, 0.1]])
    experts, weights = ops.route(scores, 2, correction=torch.tensor([0.0, 0.0, 0.0, 1.0]), min_sum=0.0, scale=3.0)
    assert experts.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, torch.tensor([[0.5, 2.5]]))


def test_a_group_is_as_good_as_its_best_scores() -> None:
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.6]])
    assert ops.route(scores, 1, num_groups=2)[0].tolist() == [[0]]
    assert ops.route(scores, 1, num_groups=2, num_group_scores=2)[0].tolist() == [[3]]


# -- what config.json may say ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("qwen2_moe", {"num_experts_per_tok": 6}, "num_experts_per_tok is 6; it must be no more than num_experts (5)"),
        ("qwen2_moe", {"num_experts": 0}, "num_experts is 0; it must be an integer from 1 to 4096"),
        ("qwen2_moe", {"mlp_only_layers": [2]}, "mlp_only_layers is [2]; it must be a list of integers from 0 to 1"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"moe_intermediate_size": -1}, "moe_intermediate_size is -1"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'; it must be true or false"),
        ("mixtral", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported; known: silu, swish"),
        ("olmoe", {"clip_qkv": 0}, "clip_qkv is 0; it must be a number above 0"),
        ("ernie4_5_moe", {"moe_gate": "hash"}, "moe_gate 'hash' is not supported; known: topk"),
        ("ernie4_5_moe", {"moe_gate_act": "sigmoid"}, "moe_gate_act 'sigmoid' is not supported; known: softmax"),
        ("ernie4_5_moe", {"mlp_layer_types": ["sparse"] * 2}, "mlp_layer_types is ['sparse', 'sparse']; it must be what a model of ['Ernie4_5_Moe"),
        ("ernie4_5_moe", {"moe_norm_min": -1.0}, "moe_norm_min is -1.0"),
        ("glm4_moe", {"scoring_func": "tanh"}, "scoring_func 'tanh' is not supported; known: sigmoid"),
        ("glm4_moe", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported; known: noaux_tc"),
        ("glm4_moe", {"n_group": 4}, "n_group is 4; it must be such that n_routed_experts (6) divides by it, 2 experts to a group at least"),
        ("glm4_moe", {"n_group": 6}, "n_group is 6"),
        ("glm4_moe", {"n_group": 2, "topk_group": 3}, "topk_group is 3; it must be no more than n_group (2)"),
        ("glm4_moe", {"n_group": 3}, "topk_group is 1; it must be no more than n_group (3), whose groups of 2 have num_experts_per_tok (3)"),
        ("mixtral", {"num_local_experts": 4}, "weight model.layers.0.block_sparse_moe.experts.3.w1.weight"),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else "",
)
def test_values_that_no_mixture_has(family: str, values: dict[str, Any], message: str, folders: Callable[..., Path], tmp_path: Path) -> None:
    refused(edited(folders(family), tmp_path / "model", **values), str(tmp_path / "model"), message)


def test_shared_experts_that_no_file_names(folders: Callable[..., Path], tmp_path: Path) -> None:
    """As transformers, which takes two, has them, but where the checkpoint has none: so does that of 300B."""
    folder = edited(folders("ernie4_5_moe"), tmp_path / "model", moe_num_shared_experts=...)
    assert check_model(folder).layers == check_model(folders("ernie4_5_moe")).layers
    weights = load_file(folder / "model.safetensors")
    save_file({name: own for name, own in weights.items() if "shared" not in name}, folder / "model.safetensors")
    assert [layer.mlp.shared for layer in check_model(folder).layers if isinstance(layer.mlp, MoeSpec)] == [None]
    refused(edited(folder, tmp_path / "named", moe_num_shared_experts=2), "weight model.layers.1.mlp.shared_experts")


# -- several ranks --------------------------------------------------------------------------------------------------------------


def on_ranks(size: int, action: Callable[[Ranks], Any]) -> list[Any]:
    """What each rank makes, as threads of this process."""
    store, results = dist.HashStore(), [None] * size

    def run(rank: int) -> None:
        results[rank] = action(make_ranks(rank, size, store, torch.device("cpu"), timedelta(seconds=20)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def logits_of(worker: Worker) -> torch.Tensor:
    steps, token_ids = Steps(worker), random_tokens(41)
    steps.admit(0, token_ids, range(6))
    steps.run([Row(0, 0, 41)])
    return steps.logits()


@pytest.mark.parametrize("is_spread", [False, True], ids=["split", "spread"])
@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "olmoe", "glm4_moe"])
def test_two_ranks_compute_what_one_does(family: str, is_spread: bool, folders: Callable[..., Path]) -> None:
    """Each with its part of every expert, or with half of the experts; norms over all heads are over those of all ranks."""
    folder = folders(family, 4) if is_spread else folders(family)
    values = {"model": str(folder), "device": "cpu", "dtype": "float32", "kv_cache_memory": "1MiB", "page_size": 8, "max_batch_size": 4}
    config = EngineConfig.from_dict(values | {"parallel_config": {"tensor_parallel_size": 2, "expert_parallel": is_spread}})
    own = on_ranks(2, lambda ranks: logits_of(Worker(config, ranks)))
    assert torch.equal(own[0], own[1])
    assert_close(own[0], logits_of(make_worker(folder)))


def test_ranks_hold_no_more_than_their_own(folders: Callable[..., Path]) -> None:
    layers = {}
    for is_spread in (False, True):
        model = load(folders("glm4_moe"), ranks=Ranks(1, 2), is_expert_parallel=is_spread)
        layers[is_spread] = [len(layer.mlp.experts.experts) for layer in model.layers[1:]]
    assert layers == {False: [6], True: [3]}


def test_counts_that_do_not_divide(folders: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 2: num_experts \(expert_parallel\) is 5, which does not divide by it"):
        load(folders("qwen2_moe"), ranks=Ranks(0, 2), is_expert_parallel=True)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 4: num_experts \(expert_parallel\) is 2, which does not divide by it"):
        load(folders("qwen2_moe", 2), ranks=Ranks(0, 4), is_expert_parallel=True)
    with pytest.raises(ConfigError, match="tensor_parallel_size 4: moe_intermediate_size is 6, which does not divide by it"):
        load_experts(dataclasses.replace(check_model(folders("qwen2_moe")).layers[0].mlp, inner=6), Weights(None, torch.float32, CPU, Ranks(0, 4)))


def test_what_ranks_cannot_hold_is_known_before(folders: Callable[..., Path]) -> None:
    """By the same rules, without loading."""
    spec = check_model(folders("qwen2_moe"))
    check_split(spec, 4)
    for size, is_spread, part in ((8, False, "num_attention_heads is 4"), (4, True, r"num_experts \(expert_parallel\) is 5")):
        with pytest.raises(ConfigError, match=f"tensor_parallel_size {size}: {part}, which does not divide by it"):
            check_split(spec, size, is_expert_parallel=is_spread)
    odd = dataclasses.replace(spec.layers[0], mlp=dataclasses.replace(spec.layers[0].mlp, inner=6))
    with pytest.raises(ConfigError, match="tensor_parallel_size 4: moe_intermediate_size is 6, which does not divide by it"):
        check_split(dataclasses.replace(spec, layers=(odd,)), 4)
