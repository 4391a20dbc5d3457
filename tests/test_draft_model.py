"""Independent models as drafters: of any family, over caches of their own, whose tokens are the target's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from backend import SamplingParams
from backend.config import EngineConfig
from backend.drafter_checks import check_drafter_folder
from backend.errors import ConfigError, ModelError
from backend.parallel.ranks import Ranks
from backend.step import attending
from backend.step.advancing import Advancing
from backend.step.captured_shapes import WIDTHS
from backend.step.worker import Worker
from kernels._load import Gpu
from tests.drafting import NUM_DRAFTS, check_drafts, check_tokens, check_tree_tokens, serve
from tests.families import VOCABULARY, Case, edited, expected_logits, make_model, random_tokens
from tests.test_families import LONGROPE
from tests.test_latents import DEEPSEEK
from tests.test_mixtures import GLM

TARGET = Case("llama")
HOPPER = Gpu(132, 228 * 1024, 9)
CASES = [
    Case("qwen3", config={"num_hidden_layers": 3}),
    Case("glm4_moe", "experts", GLM),
    Case("deepseek_v3", "latents", DEEPSEEK),
    Case("llama", "fewer tokens", {"vocab_size": 250}),
    Case("llama", "more tokens", {"vocab_size": 320}),
    Case("llama", "a short context", {"max_position_embeddings": 32}),
    Case("qwen3", "PARD", {"pard_token": 305, "vocab_size": 310}),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    make_model(TARGET, folder)
    return folder


def test_a_served_context_decides_for_drafters_too(tmp_path: Path) -> None:
    """LongRoPE's short factors, where no longer one than the original is served: else hardly a draft of the model's own would stand."""
    make_model(Case("phi3", config={**LONGROPE, "original_max_position_embeddings": 64}), tmp_path / "model")
    llm = serve(tmp_path / "model", {"max_model_len": 64}, method="draft_model", model=str(tmp_path / "model"))
    params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    (result,) = llm.generate([{"prompt_token_ids": random_tokens(20)}], params, use_tqdm=False)
    stats = result.outputs[0].stats
    assert stats.accepted == stats.drafted > 0


@pytest.mark.parametrize(("family", "is_captured"), [("gemma2", False), ("gemma3_text", True)])
def test_capped_scores_are_not_captured_with_prompts(family: str, is_captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Hopper GPU no kernel that finds prompts by itself caps scores: the drafter is launched kernel by kernel there, as its target would be."""
    sizes = {"head_dim": 64, "sliding_window": 9}
    make_model(Case(family, config=sizes), tmp_path / "drafter")
    make_model(Case("llama", config={"head_dim": 64, "vocab_size": VOCABULARY}), tmp_path / "target")
    llm = serve(tmp_path / "target", {"page_size": 16, "dtype": "bfloat16"}, method="draft_model", model=str(tmp_path / "drafter"))
    monkeypatch.setattr(attending, "gpu_of", lambda device: HOPPER)
    made: list[Advancing] = []
    monkeypatch.setattr(Advancing, "capture_all", lambda own: made.append(own))
    advancing = llm.engine.worker.program.capture_advancing([8, 16], (0, 0), 4, 17)
    assert (advancing is not None) == bool(made) == is_captured
    kinds = llm.engine.worker.drafter.attention_kinds  # type: ignore[union-attr]
    assert len(kinds) == 1 + (family == "gemma2") and llm.engine.worker.program.all_kinds == [frozenset(), kinds]


def test_masks_attend_by_kernels_that_are_compiled(target: Path, tmp_path: Path) -> None:
    """However many drafts a request chooses: a GPU has kernels for some numbers of queries."""
    make_model(CASES[6], tmp_path)
    llm = serve(target, method="draft_model", model=str(tmp_path))
    program, asked = llm.engine.worker.program, set()
    block = program.drafting._block
    assert block is not None
    plan = block._plan

    def watched_plan(*arguments: Any, **options: Any) -> Any:
        made = plan(*arguments, **options)
        asked.add((made.max_query_len, int(made.cu_query_lens[1])))
        return made

    block._plan = watched_plan  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    for count in (NUM_DRAFTS, 8, 16):
        llm.generate([{"prompt_token_ids": random_tokens(9)}], params, speculative={"num_speculative_tokens": count}, use_tqdm=False)
    assert {count for _, count in asked} >= {NUM_DRAFTS - 1, 7, 15}
    assert all(count <= width and width in WIDTHS for width, count in asked), asked
    assert program.drafting.block_attention([8, 16]) == [(llm.engine.worker.drafter.block_heads, width, 1, False) for width in (8, 17)]  # type: ignore[union-attr]


@pytest.fixture(scope="module", params=CASES, ids=str)
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("drafter")
    return make_model(request.param, folder), folder


@pytest.mark.parametrize("policy", ["reject_all", "accept_all"])
def test_drafts_are_those_of_the_model(policy: str, drafter: tuple[Any, Path], target: Path) -> None:
    model, folder = drafter
    most = model.config.vocab_size
    mask = getattr(model.config, "pard_token", None)

    def draft(token_ids: list[int], count: int) -> list[torch.Tensor]:
        tokens, found = [min(token_id, most - 1) for token_id in token_ids], []
        if mask is not None:  # one pass over masks in the place of the drafts
            return list(expected_logits(model, [*tokens, *[mask] * (count - 1)])[-count:, :VOCABULARY])
        for _ in range(count):
            scores = expected_logits(model, tokens)[-1]
            found.append(torch.cat([scores, torch.full((VOCABULARY,), float("-inf"))])[:VOCABULARY])
            tokens.append(int(found[-1].argmax()))
        return found

    check_drafter_folder("draft_model", folder, target)
    check_drafts(serve(target, method="draft_model", model=str(folder), accept_policy=policy), draft, policy)


@pytest.mark.parametrize("policy", ["reject_all", "accept_all"])
@pytest.mark.parametrize("drafter", [CASES[0], CASES[2]], ids=str, indirect=True)
def test_beside_a_cache_in_e4m3_it_keeps_its_own_in_its_own_type(policy: str, drafter: tuple[Any, Path], target: Path) -> None:
    """So that its drafts are those of the exact model: a target that drafts for itself disagrees where its rounded keys and values decide alone."""
    model, folder = drafter

    def draft(token_ids: list[int], count: int) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for _ in range(count):
            found.append(expected_logits(model, [*token_ids, *(int(scores.argmax()) for scores in found)])[-1])
        return found

    options = {"kv_cache_dtype": "fp8"}
    check_drafts(serve(target, options, method="draft_model", model=str(folder), accept_policy=policy), draft, policy)


@pytest.mark.parametrize("drafter", [*CASES[1:4], CASES[6]], ids=str, indirect=True)
def test_tokens_are_those_without_drafts(drafter: tuple[Any, Path], target: Path) -> None:
    check_tokens(target, "draft_model", model=str(drafter[1]))


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("strategy", ["target_match", "rejection"])
def test_a_model_that_drafts_for_itself_is_always_right(sampling: dict[str, Any], strategy: str, target: Path) -> None:
    """Prompts in chunks, with room for one of two requests at a time: the other gives its pages back, and begins anew."""
    options = {"max_batch_size": 8, "max_num_batched_tokens": 16, "kv_cache_memory": 10 * 8192, "max_model_len": 76}
    llm = serve(target, options, method="draft_model", model=str(target), verify_strategy=strategy)
    params = SamplingParams(max_tokens=30, ignore_eos=True, **sampling)
    results = llm.generate([{"prompt_token_ids": random_tokens(n, n)} for n in (40, 9)], params, use_tqdm=False)
    assert llm.engine.metrics.preemptions
    for result in results:
        stats = result.outputs[0].stats
        assert stats.accepted == stats.drafted >= 20 and stats.accepted_per_position[NUM_DRAFTS - 1] > 3
    llm.engine.scheduler.check()


def test_a_request_that_wants_more_drafts_than_the_server_has_pages_for_them(target: Path) -> None:
    """What a draft past its pages is made of would be lost, and the drafts after it wrong."""
    llm = serve(target, method="draft_model", model=str(target), num_speculative_tokens=1)
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=3, ignore_eos=True)
    (result,) = llm.generate([{"prompt_token_ids": random_tokens(9)}], params, speculative={"num_speculative_tokens": 12}, use_tqdm=False)
    stats = result.outputs[0].stats
    assert stats.accepted == stats.drafted > 30 and len(stats.accepted_per_position) == 12
    assert llm.engine.scheduler.pool.num_held == 0


@pytest.fixture(scope="module")
def foreign(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, dict[int, int]]:
    """A model whose tokenizer is of the SentencePiece kind; and the target's ids of its tokens, where it has those."""
    folder = tmp_path_factory.mktemp("foreign")
    model = make_model(Case("qwen3", config={"vocab_size": 260}), folder)
    values = json.loads((target / "tokenizer.json").read_text())
    tokens = {i: token for token, i in values["model"]["vocab"].items()}
    vocab = {"<unk>": 0, **{f"<own {i}>": i for i in range(1, 20)}}
    shared = {}
    for own, other in enumerate(sorted(range(2, VOCABULARY), key=lambda i: (i * 7) % VOCABULARY), 20):
        text = tokens[other].replace("\u0120", "\u2581").replace("\u010a", "<0x0A>")
        is_plain = text == "<0x0A>" or ("<0x0A>" not in text and text.replace("\u2581", "").isascii())
        if is_plain and own < 260:
            vocab[text] = own
            shared[own] = other
    values["model"] = {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>"}
    values |= {"decoder": {"type": "Metaspace"}, "pre_tokenizer": {"type": "Metaspace"}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    return model, folder, shared


@pytest.mark.parametrize("policy", ["reject_all", "accept_all"])
def test_a_model_of_another_vocabulary_drafts_what_both_have(policy: str, foreign: tuple[Any, Path, dict[int, int]], target: Path) -> None:
    model, folder, shared = foreign
    own_of = {other: own for own, other in shared.items()}
    assert len(own_of) > 100 and len(own_of) < VOCABULARY - 50

    def draft(token_ids: list[int], count: int) -> list[torch.Tensor]:
        tokens, found = [own_of.get(token_id, 0) for token_id in token_ids], []
        for _ in range(count):
            scores = expected_logits(model, tokens)[-1]
            whole = torch.full((VOCABULARY,), float("-inf"))
            for own, other in shared.items():
                whole[other] = scores[own]
            found.append(whole)
            tokens.append(own_of[int(whole.argmax())])
        return found

    check_drafter_folder("draft_model", folder, target, has_other_tokens=True)
    check_drafts(serve(target, method="draft_model", model=str(folder), draft_vocabulary="shared", accept_policy=policy), draft, policy)


@pytest.mark.parametrize("drafter", [CASES[1]], ids=str, indirect=True)
def test_trees_change_no_token(drafter: tuple[Any, Path], foreign: tuple[Any, Path, dict[int, int]], target: Path) -> None:
    check_tree_tokens(target, method="draft_model", model=str(drafter[1]), tree_nodes=16)
    other = {"model": str(foreign[1]), "draft_vocabulary": "shared", "tree_paths": [[0], [1], [0, 0]], "num_speculative_tokens": 2}
    check_tree_tokens(target, method="draft_model", **other)


def test_a_tree_cut_to_one_level_where_one_candidate_is_left(target: Path) -> None:
    """Beside a whole one: the level below takes the places of candidates that there are not."""
    params, prompts = SamplingParams(max_tokens=9, temperature=0.8, top_k=1, seed=3, ignore_eos=True), [{"prompt_token_ids": random_tokens(20)}] * 2
    llm = serve(target, method="draft_model", model=str(target), tree_paths=[[0], [1], [0, 0]], num_speculative_tokens=None)
    found = [r.outputs[0] for r in llm.generate(prompts, params, speculative=[{"num_speculative_tokens": count} for count in (1, 2)], use_tqdm=False)]
    plain = llm.generate(prompts[:1], params, speculative={"method": "none"}, use_tqdm=False)[0].outputs[0]
    assert [out.token_ids for out in found] == [plain.token_ids] * 2
    assert [sum(out.stats.accepted_per_position) for out in found] == [out.stats.accepted for out in found] and found[0].stats.accepted > 0


def test_tokens_are_those_without_drafts_of_another_vocabulary(foreign: tuple[Any, Path, dict[int, int]], target: Path) -> None:
    check_tokens(target, "draft_model", model=str(foreign[1]), draft_vocabulary="shared")


# -- what is refused ------------------------------------------------------------------------------------------------------------


def test_another_vocabulary(target: Path, tmp_path: Path) -> None:
    """At load and before the launch; a few tokens may differ."""
    path = edited(target, tmp_path / "drafter") / "tokenizer.json"
    values = json.loads(path.read_text())
    vocab: dict[str, int] = values["model"]["vocab"]
    values["model"]["vocab"] = {f"<{i}>" if i < 100 else token: i for token, i in vocab.items()}
    path.write_text(json.dumps(values))
    message = rf"tokenizer\.json: token \d+ is '<\d+>'; the target's is .*: \d+ of {len(vocab)} ids differ, 1% may"
    with pytest.raises(ModelError, match=message):
        check_drafter_folder("draft_model", path.parent, target)
    with pytest.raises(ModelError, match=message):
        serve(target, method="draft_model", model=str(path.parent))


def test_no_token_in_common(target: Path, tmp_path: Path) -> None:
    own = edited(target, tmp_path / "drafter")
    values = json.loads((own / "tokenizer.json").read_text())
    values["model"]["vocab"], values["added_tokens"] = {f"own {i}": i for i in range(9)}, []
    (own / "tokenizer.json").write_text(json.dumps(values))
    message = "has no token of .*: nothing could be drafted"
    with pytest.raises(ModelError, match=message):
        check_drafter_folder("draft_model", own, target, has_other_tokens=True)
    with pytest.raises(ModelError, match=message):
        serve(target, method="draft_model", model=str(own), draft_vocabulary="shared")


def test_parallel_drafting_of_models_that_were_not_made_for_it(target: Path, tmp_path: Path) -> None:
    message = r"config\.json names no mask token \(pard_token, ptd_token_id, mask_token_id\)"
    with pytest.raises(ModelError, match=message):
        check_drafter_folder("draft_model", target, target, is_parallel=True)
    with pytest.raises(ModelError, match=message):
        serve(target, method="pard", model=str(target))
    with pytest.raises(ModelError, match="pard_token is 301; it must be an integer from 0 to 300"):
        serve(target, method="draft_model", model=str(edited(target, tmp_path / "drafter", pard_token=301)))


def test_what_pard_2_has_more_is_not_read(target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    serve(target, method="draft_model", model=str(edited(target, tmp_path / "drafter", pard_token=5, spd_type="pard2")))
    assert "what PARD-2 makes of the target's states (warp_model.bin) is not read" in caplog.text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "PARD", "parallel_drafting": False, "model": "x"}, "method 'PARD' drafts in parallel, and parallel_drafting is false"),
        ({"method": "medusa", "parallel_drafting": True, "model": "x"}, "parallel_drafting has no effect with method medusa"),
        (
            {"method": "pard", "draft_vocabulary": "shared", "model": "x"},
            "parallel_drafting must be left out with draft_vocabulary shared: mask tokens are of the same vocabulary",
        ),
        ({"method": "eagle3", "draft_vocabulary": "shared", "model": "x"}, "draft_vocabulary has no effect with method eagle3"),
        ({"method": "draft_model"}, "model must be the folder of the drafter's weights with method draft_model, got None"),
        (
            {"method": "eagle3", "model": "x", "placement": "bls"},
            "placement must be auto or in_process with method eagle3: bls is for mtp",
        ),
        ({"method": "medusa", "model": "x", "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size must be 1 with method medusa"),
        (
            {"method": "eagle", "model": "x", "request_methods": ["mtp"]},
            "request_methods must be without a second model drafter: eagle and mtp",
        ),
    ],
)
def test_configurations_that_contradict_themselves(values: dict[str, Any], message: str, target: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        serve(target, **values)


def test_a_drafter_that_cannot_be_split(target: Path, tmp_path: Path) -> None:
    """It is told from the target, which can."""
    make_model(Case("qwen3", config={"num_attention_heads": 2}), tmp_path)
    speculative = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2, "draft_tensor_parallel_size": 4}
    config = EngineConfig.from_dict({"model": str(target), "parallel_config": {"tensor_parallel_size": 4}, "speculative_config": speculative})
    message = f"the drafter in {tmp_path}: tensor_parallel_size 4: num_attention_heads is 2, which does not divide by it; draft_tensor"
    with pytest.raises(ConfigError, match=re.escape(message)):
        Worker(config, Ranks(0, 4))
