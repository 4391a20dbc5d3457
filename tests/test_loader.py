"""Checkpoints of every kind that the Llama family comes in, against transformers; and every way in which a folder can be wrong."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from backend import LLM
from backend.config import BUNDLED_MODEL
from backend.errors import ConfigError, ModelError
from backend.model_files import read_config
from backend.models import load_model
from backend.models.loader import Checkpoint
from backend.models.rope import rope_frequencies
from backend.parallel.ranks import Ranks
from backend.sampling_params import SamplingParams
from backend.step.worker import Worker
from tests.steps import Row, Steps, make_worker

TOLERANCE = 1e-4
LENGTH = 70
"""Past several pages, and long enough that rope scaling matters."""


@dataclass(frozen=True)
class Kind:
    """One kind of checkpoint: what its config says, how it is saved."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    shard_size: str = "1GB"


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ODD = {"hidden_size": 60, "intermediate_size": 97, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 10}
KINDS = [
    Kind("plain, untied, grouped queries"),
    Kind("tied", {"tie_word_embeddings": True}),
    Kind("sharded", shard_size="200KB"),
    Kind("sharded and tied", {"tie_word_embeddings": True}, shard_size="200KB"),
    Kind("every head its own keys", {"num_key_value_heads": 4}),
    Kind("one head's keys for all", {"num_key_value_heads": 1}),
    Kind("heads wider than hidden / heads", {"head_dim": 32}),
    Kind("heads narrower than hidden / heads", {"head_dim": 8}),
    Kind("attention bias", {"attention_bias": True}),
    Kind("mlp bias", {"mlp_bias": True}),
    Kind("linear rope scaling", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    Kind("llama3 rope scaling", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}}),
    Kind("another theta and eps", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, "rms_norm_eps": 1e-2}),
    Kind("stored in bfloat16", dtype=torch.bfloat16),
    Kind("stored in bfloat16, sharded, biased", {"attention_bias": True}, torch.bfloat16, "200KB"),
    Kind("one layer, odd sizes", {**ODD, "num_hidden_layers": 1}),
]


def make_model(kind: Kind) -> transformers.LlamaForCausalLM:
    """A tiny model in which every weight matters: transformers starts biases at zero and norms at one."""
    values: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **kind.config,
    }
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(".bias"):
                weight.normal_(0, 0.5)
            elif "norm" in name:
                weight.uniform_(0.5, 1.5)
    return model.to(kind.dtype)


def save(model: transformers.LlamaForCausalLM, folder: Path, shard_size: str = "1GB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard_size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, folder)
    return folder


def random_tokens(count: int, seed: int = 0) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(2, 4096) for _ in range(count)]


@torch.inference_mode()
def expected_logits(model: transformers.LlamaForCausalLM, token_ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([token_ids])).logits[0].float()


def own_logits(worker: Worker, token_ids: list[int], chunks: tuple[int, ...] = ()) -> torch.Tensor:
    """Logits after every token but those of the chunks that come first: of one chunk more, or after chunks of the newest token and drafts."""
    size = worker.store.page_size
    pages = random.Random(1).sample(range(worker.store.num_pages), -(-len(token_ids) // size))
    steps, begin = Steps(worker), 0
    known = token_ids[: sum(chunks) + 1] if chunks else token_ids
    steps.admit(0, known, pages)
    for count in chunks:
        steps.run([Row(0, begin, count, is_end=False)])
        assert len(steps.hidden) == count
        begin += count
    steps.run([Row(0, drafts=token_ids[len(known) :]) if chunks else Row(0, 0, len(known))])
    assert len(steps.hidden) == len(token_ids) - begin
    logits = steps.logits()
    assert logits.dtype == worker.dtype
    return logits


# -- the same logits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_logits_are_those_of_transformers(kind: Kind, tmp_path: Path) -> None:
    """In float32, at every position; the chunked way too, whose attention takes other paths."""
    folder = save(make_model(kind), tmp_path / "model", kind.shard_size)
    assert (folder / "model.safetensors.index.json").is_file() == (kind.shard_size == "200KB")
    worker = make_worker(folder)
    token_ids = random_tokens(LENGTH)
    expected = expected_logits(transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), token_ids)
    assert expected.std() > 0.5, "logits this flat would agree with anything"
    torch.testing.assert_close(own_logits(worker, token_ids), expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(own_logits(worker, token_ids, chunks=(13, 40)), expected[53:], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(own_logits(worker, token_ids[:20]), expected[:20], rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[transformers.LlamaForCausalLM, Path]:
    """One plain checkpoint, for the tests that only read it."""
    model = make_model(KINDS[0])
    return model, save(model, tmp_path_factory.mktemp("tiny"))


def test_requests_of_one_batch_do_not_mix(tiny: tuple[transformers.LlamaForCausalLM, Path]) -> None:
    model, folder = tiny
    steps = Steps(make_worker(folder))
    prompts = [random_tokens(length, seed) for seed, length in enumerate([5, 33, 8, 64, 17])]
    pages = iter(random.Random(2).sample(range(steps.worker.store.num_pages), steps.worker.store.num_pages))
    for index, ids in enumerate(prompts):
        steps.admit(index, ids, [next(pages) for _ in range(-(-len(ids) // 8))])
    results = steps.run([Row(index, 0, len(ids)) for index, ids in enumerate(prompts)])
    expected = torch.cat([expected_logits(model, ids) for ids in prompts])
    torch.testing.assert_close(steps.logits(), expected, rtol=0, atol=TOLERANCE)
    assert [o.token_ids for o in results.outcomes] == [[int(expected_logits(model, ids)[-1].argmax())] for ids in prompts]


@pytest.mark.parametrize("is_whole", [True, False])
def test_prompts_and_drafts_share_a_forward(tiny: tuple[transformers.LlamaForCausalLM, Path], is_whole: bool) -> None:
    """A chunk that emits nothing, a prompt's end, a plain row and one with drafts, each as it would be alone; also where the last layer computes
    but what logits are made of."""
    model, folder = tiny
    steps = Steps(make_worker(folder))
    chunk, prompt, plain, drafting = (random_tokens(length, seed) for seed, length in enumerate([20, 11, 9, 25]))
    for index, ids in enumerate((chunk, prompt, plain, drafting[:18])):
        steps.admit(index, ids, range(4 * index, 4 * index + 4))
    steps.run([Row(2, 0, 8, is_end=False), Row(3, 0, 17, is_end=False)])
    rows = [Row(0, 0, 13, is_end=False), Row(1, 0, 11), Row(2), Row(3, drafts=drafting[18:])]
    outcomes = steps.run(rows, is_whole=is_whole).outcomes
    wanted = [
        expected_logits(model, chunk)[:13],
        expected_logits(model, prompt),
        expected_logits(model, plain)[8:],
        expected_logits(model, drafting)[17:],
    ]
    parts = wanted if is_whole else [wanted[0][:0], wanted[1][-1:], *wanted[2:]]
    torch.testing.assert_close(steps.logits(), torch.cat(parts), rtol=0, atol=TOLERANCE)
    assert [o.num_drafts for o in outcomes] == [0, 0, 0, 7] and outcomes[0].token_ids == []
    assert [o.token_ids[0] for o in outcomes[1:]] == [int(wanted[1][-1].argmax()), int(wanted[2][0].argmax()), int(wanted[3][0].argmax())]


@torch.inference_mode()
def expected_hidden(model: transformers.LlamaForCausalLM, token_ids: list[int]) -> torch.Tensor:
    """States after the final norm."""
    return model.model(torch.tensor([token_ids])).last_hidden_state[0]


def tapped(worker: Worker, page_ids: list[int], count: int) -> torch.Tensor:
    """What the tap holds of a request's first tokens [count, hidden]."""
    (plane,) = worker.store.planes("hidden")
    return plane[page_ids].flatten(0, 1)[:count]


def test_the_tap_holds_every_tokens_hidden_state(tiny: tuple[transformers.LlamaForCausalLM, Path]) -> None:
    """Of chunks that emit nothing, of several requests in one step, of drafts; and of nobody else's slots."""
    model, folder = tiny
    steps = Steps(make_worker(folder, has_tap=True))
    worker = steps.worker
    first, second = random_tokens(37, 1), random_tokens(21, 2)
    pages = random.Random(3).sample(range(worker.store.num_pages), 8)
    own, others = pages[:5], pages[5:]
    steps.admit(4, first[:30], own)
    steps.run([Row(4, 0, 11, is_end=False)])
    torch.testing.assert_close(tapped(worker, own, 11), expected_hidden(model, first[:11]), rtol=0, atol=TOLERANCE)
    assert tapped(worker, own, 30)[11:].abs().max() == 0
    steps.admit(1, second, others)
    steps.run([Row(1, 0, 20, is_end=False), Row(4, 11, 18, is_end=False)])
    steps.run([Row(1, 20, 1), Row(4, drafts=first[30:])])
    for page_ids, token_ids in ((own, first), (others, second)):
        wanted = expected_hidden(model, token_ids)
        assert wanted.std() > 0.5
        torch.testing.assert_close(tapped(worker, page_ids, len(token_ids)), wanted, rtol=0, atol=TOLERANCE)
    (plane,) = worker.store.planes("hidden")
    assert {page for page in range(worker.store.num_pages) if plane[page].any()} == set(pages)


def test_the_tap_does_not_change_the_logits(tiny: tuple[transformers.LlamaForCausalLM, Path]) -> None:
    token_ids = random_tokens(30)
    plain, tapping = make_worker(tiny[1]), make_worker(tiny[1], has_tap=True)
    assert "hidden" not in plain.store.specs and "hidden" in tapping.store.specs
    assert torch.equal(own_logits(plain, token_ids, (13,)), own_logits(tapping, token_ids, (13,)))


def test_copies_carry_the_tap(tiny: tuple[transformers.LlamaForCausalLM, Path]) -> None:
    """A request that shares a prefix finds its hidden states in its own pages, and computes only what is left."""
    model, folder = tiny
    steps = Steps(make_worker(folder, has_tap=True))
    worker = steps.worker
    shared = random_tokens(13)
    steps.admit(0, shared, [3, 9])
    steps.run([Row(0, 0, 13)])
    token_ids = [*shared[:11], *random_tokens(6, 5)]
    steps.admit(1, token_ids, [3, 4, 5])
    steps.run([Row(1, 11, 6)], copies=[(9, 4, 3)], cleared=[4, 5])
    torch.testing.assert_close(steps.logits(), expected_logits(model, token_ids)[11:], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(tapped(worker, [3, 4, 5], 17), expected_hidden(model, token_ids), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(tapped(worker, [3, 9], 13), expected_hidden(model, shared), rtol=0, atol=TOLERANCE)


def test_generation_from_a_tiny_model(tiny: tuple[transformers.LlamaForCausalLM, Path]) -> None:
    """Through the whole engine: greedy tokens and their log-probabilities."""
    model, folder = tiny
    llm = LLM(str(folder), dtype="float32", device="cpu", kv_cache_memory="2MiB", speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    prompt = random_tokens(40, 3)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2)
    (completion,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs
    scores = expected_logits(model, [*prompt, *completion.token_ids]).log_softmax(dim=-1)[len(prompt) - 1 :]
    assert completion.token_ids == scores[:-1].argmax(dim=-1).tolist()
    assert completion.logprobs is not None and len(completion.logprobs) == 24
    for place, found in enumerate(completion.logprobs):
        values, ids = scores[place].topk(2)
        assert (found.token_id, [i for i, _ in found.top]) == (completion.token_ids[place], ids.tolist())
        assert [found.logprob, *[v for _, v in found.top]] == pytest.approx([values[0].item(), *values.tolist()], abs=TOLERANCE)


def test_bfloat16_computes_about_the_same(tiny: tuple[transformers.LlamaForCausalLM, Path]) -> None:
    """Not the float32 bound: eight bits of mantissa. It must agree with transformers' own bfloat16 as well as that does with float32."""
    model, folder = tiny
    worker = make_worker(folder, dtype="bfloat16")
    assert {spec.dtype for spec in worker.store.specs.values()} == {torch.bfloat16}
    token_ids = random_tokens(48)
    exact = expected_logits(model, token_ids)
    other = make_model(KINDS[0]).to(torch.bfloat16)
    error = (own_logits(worker, token_ids) - exact).abs().mean()
    assert error < 1.5 * (expected_logits(other, token_ids) - exact).abs().mean()


# -- files as they are found in the world ---------------------------------------------------------------------------------------


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_rope_scaling_as_older_files_write_it(tmp_path: Path, type_key: str) -> None:
    """rope_theta and rope_scaling side by side, as Llama 3.1's own files have them."""
    kind = Kind("", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}})
    model = make_model(kind)
    folder = save(model, tmp_path / "model")

    def as_before(values: dict[str, Any]) -> None:
        scaling = values.pop("rope_parameters")
        values["rope_theta"] = scaling.pop("rope_theta")
        scaling[type_key] = scaling.pop("rope_type")
        values["rope_scaling"] = scaling

    edit_config(folder, as_before)
    token_ids = random_tokens(LENGTH)
    torch.testing.assert_close(own_logits(make_worker(folder), token_ids), expected_logits(model, token_ids), rtol=0, atol=TOLERANCE)


def test_what_old_files_leave_out(tmp_path: Path) -> None:
    """No head_dim, no num_key_value_heads, no rope at all, no tie_word_embeddings: each has its default."""
    model = make_model(Kind("", {"num_key_value_heads": 4}))
    folder = save(model, tmp_path / "model")
    left_out = ("head_dim", "num_key_value_heads", "rope_parameters", "tie_word_embeddings", "hidden_act", "attention_bias", "mlp_bias")
    edit_config(folder, lambda values: [values.pop(key) for key in left_out])
    token_ids = random_tokens(LENGTH)
    torch.testing.assert_close(own_logits(make_worker(folder), token_ids), expected_logits(model, token_ids), rtol=0, atol=TOLERANCE)


def test_rope_scaling_changes_what_it_should() -> None:
    """Llama 3.1's rule: short waves stay, long ones are divided by the factor, and between them it rises steadily."""
    plain = rope_frequencies({"rope_theta": 500000.0}, 128)
    assert plain[0] == 1 and plain[1].item() == pytest.approx(500000.0 ** (-2 / 128))
    linear = rope_frequencies({"rope_theta": 500000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 128)
    torch.testing.assert_close(linear * 4, plain)
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    ratio = plain / rope_frequencies({"rope_theta": 500000.0, "rope_scaling": scaling}, 128)
    waves = 2 * torch.pi / plain
    torch.testing.assert_close(ratio[waves < 8192 / 4], torch.ones(int((waves < 8192 / 4).sum())))
    torch.testing.assert_close(ratio[waves > 8192], torch.full((int((waves > 8192).sum()),), 8.0))
    assert (ratio.diff() >= -1e-4).all()


@pytest.mark.parametrize(
    ("config_ids", "generation_ids", "expected"), [(2, None, {2}), ([2, 3], None, {2, 3}), (2, [4, 5], {4, 5}), (None, None, set()), (2, 7, {7})]
)
def test_end_of_text_ids(
    tiny: tuple[transformers.LlamaForCausalLM, Path], tmp_path: Path, config_ids: Any, generation_ids: Any, expected: set[int]
) -> None:
    """generation_config.json is the one that chat models keep right."""
    folder = copy_of(tiny[1], tmp_path)
    edit_config(folder, lambda values: values.update(eos_token_id=config_ids))
    (folder / "generation_config.json").write_text(json.dumps({} if generation_ids is None else {"eos_token_id": generation_ids}))
    assert load_model(folder, torch.float32, torch.device("cpu"), Ranks()).eos_token_ids == expected


# -- what is wrong is named -----------------------------------------------------------------------------------------------------


def copy_of(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def load(folder: Path) -> None:
    load_model(folder, torch.float32, torch.device("cpu"), Ranks())


def refused(folder: Path, *parts: str) -> str:
    """Loading must fail with a ModelError that has all these parts in it."""
    with pytest.raises(ModelError) as caught:
        load(folder)
    message = str(caught.value)
    assert all(part in message for part in parts), message
    return message


WEIGHTS = (
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
)


@pytest.mark.parametrize("name", [*WEIGHTS, "model.layers.1.input_layernorm.weight"])
def test_missing_weight(tiny: tuple[transformers.LlamaForCausalLM, Path], tmp_path: Path, name: str) -> None:
    folder = copy_of(tiny[1], tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors")
    refused(folder, str(folder), f"weight {name} is missing")


@pytest.mark.parametrize("name", WEIGHTS)
def test_weight_of_another_shape(tiny: tuple[transformers.LlamaForCausalLM, Path], tmp_path: Path, name: str) -> None:
    folder = copy_of(tiny[1], tmp_path)
    weights = load_file(folder / "model.safetensors")
    shape = tuple(weights[name].shape)
    weights[name] = weights[name][: shape[0] // 2].contiguous()
    save_file(weights, folder / "model.safetensors")
    refused(folder, str(folder / "model.safetensors"), name, f"has shape {tuple(weights[name].shape)}", f"config.json makes it {shape}")


@pytest.mark.parametrize(
    ("key", "value", "weight"),
    [
        ("intermediate_size", 128, "model.layers.0.mlp.gate_proj.weight"),
        ("num_key_value_heads", 4, "model.layers.0.self_attn.k_proj.weight"),
        ("head_dim", 8, "model.layers.0.self_attn.q_proj.weight"),
        ("vocab_size", 5000, "model.embed_tokens.weight"),
        ("hidden_size", 32, "model.embed_tokens.weight"),
        ("num_hidden_layers", 3, "model.layers.2.input_layernorm.weight"),
    ],
)
def test_config_of_another_model(tiny: tuple[transformers.LlamaForCausalLM, Path], tmp_path: Path, key: str, value: int, weight: str) -> None:
    folder = copy_of(tiny[1], tmp_path)
    edit_config(folder, lambda values: values.update({key: value}))
    refused(folder, weight)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_truncated_file(tiny: tuple[transformers.LlamaForCausalLM, Path], tmp_path: Path, keep: float) -> None:
    """Nothing at all, half a header, half the weights, all but the last byte."""
    folder = copy_of(tiny[1], tmp_path)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    refused(folder, str(path), "cannot be read")


def test_damaged_header(tiny: tuple[transformers.LlamaForCausalLM, Path], tmp_path: Path) -> None:
    folder = copy_of(tiny[1], tmp_path)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:40] = b"x" * 32
    path.write_bytes(content)
    refused(folder, str(path), "cannot be read")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save(make_model(KINDS[2]), tmp_path / "sharded", "200KB")


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]


def test_missing_and_truncated_shards(sharded: Path) -> None:
    shard = shard_of(sharded, "model.layers.1.mlp.up_proj.weight")
    content = shard.read_bytes()
    shard.write_bytes(content[:-7])
    refused(sharded, str(shard), "cannot be read")
    shard.unlink()
    refused(sharded, f"{shard} is missing")


def test_an_index_that_is_wrong(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    name = "model.norm.weight"
    elsewhere = next(file for file in values["weight_map"].values() if file != values["weight_map"][name])
    index.write_text(json.dumps({"weight_map": {**values["weight_map"], name: elsewhere}}))
    refused(sharded, name, elsewhere)
    del values["weight_map"][name]
    index.write_text(json.dumps(values))
    refused(sharded, f"weight {name} is missing")
    index.write_text(json.dumps({"weight_map": {name: ""}}))
    refused(sharded, f"{index}: weight {name} is in '', which is no file of this folder")
    index.write_text("{}")
    refused(sharded, f"{index} has no weight_map")
    index.write_text("{")
    refused(sharded, f"{index} cannot be read")


def test_one_file_beside_an_index(sharded: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Which transformers leaves there when it writes the one in the place of shards; and the one, when it writes shards."""
    save(make_model(KINDS[2]), tmp_path / "whole")
    shutil.copy(tmp_path / "whole" / "model.safetensors", sharded)
    load(sharded)
    assert f"{sharded / 'model.safetensors'} is not read: model.safetensors.index.json names other files" in caplog.text
    save(make_model(KINDS[2]), sharded)
    assert [path.name for path in sorted(sharded.glob("*.safetensors*"))] == ["model.safetensors", "model.safetensors.index.json"]
    load(sharded)


def test_no_weights_at_all(tiny: tuple[transformers.LlamaForCausalLM, Path], tmp_path: Path) -> None:
    folder = copy_of(tiny[1], tmp_path)
    whole = (folder / "model.safetensors").rename(folder / "gptq_model-4bit-128g.safetensors")  # one file of any name is the one
    load(folder)
    shutil.copy(whole, folder / "model-00002-of-00002.safetensors")
    refused(folder, "; of 2 files such as gptq_model-4bit-128g.safetensors the index is missing")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    refused(folder, str(folder), "neither model.safetensors nor model.safetensors.index.json")
    (folder / "pytorch_model.bin").touch()
    refused(folder, "pytorch_model.bin is a pickle, which is not read as a model: save it anew as safetensors")


def test_no_config(tiny: tuple[transformers.LlamaForCausalLM, Path], tmp_path: Path) -> None:
    folder = copy_of(tiny[1], tmp_path)
    (folder / "config.json").unlink()
    refused(folder, f"{folder / 'config.json'} is missing")
    refused(tmp_path / "nowhere", f"model folder {tmp_path / 'nowhere'} does not exist")
    for content, message in ((b"{", "cannot be read"), (b"\xff", "cannot be read"), (b"[1]", "must hold a JSON object, got list")):
        (folder / "config.json").write_bytes(content)
        refused(folder, str(folder / "config.json"), message)


@pytest.mark.parametrize("names", [["GPT2LMHeadModel"], [], None])
def test_unknown_architecture(tiny: tuple[transformers.LlamaForCausalLM, Path], tmp_path: Path, names: list[str] | None) -> None:
    folder = copy_of(tiny[1], tmp_path)
    edit_config(folder, lambda values: values.update(architectures=names))
    refused(folder, str(folder), "not supported; known: LlamaForCausalLM", *(names or []))


def test_unknown_activation(tiny: tuple[transformers.LlamaForCausalLM, Path], tmp_path: Path) -> None:
    folder = copy_of(tiny[1], tmp_path)
    edit_config(folder, lambda values: values.update(hidden_act="relu"))
    refused(folder, str(folder / "config.json"), "hidden_act 'relu' is not supported; known: silu")


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_unknown_rope_type(tiny: tuple[transformers.LlamaForCausalLM, Path], tmp_path: Path, place: str) -> None:
    """A scaling that is ignored gives fluent nonsense past the original context."""
    folder = copy_of(tiny[1], tmp_path)
    edit_config(folder, lambda values: values.update({place: {"rope_type": "ntk", "rope_theta": 10000.0, "factor": 4.0}}))
    refused(folder, "rope scaling 'ntk' is not supported; known: default, linear, llama3")


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "num_attention_heads", "vocab_size", "num_hidden_layers", "max_position_embeddings", "intermediate_size", "rms_norm_eps"],
)
def test_config_without_a_key(tiny: tuple[transformers.LlamaForCausalLM, Path], tmp_path: Path, key: str) -> None:
    folder = copy_of(tiny[1], tmp_path)
    edit_config(folder, lambda values: values.pop(key))
    refused(folder, str(folder / "config.json"), key)


@pytest.mark.parametrize(
    ("kind", "key"), [("linear", "factor"), ("llama3", "factor"), ("llama3", "low_freq_factor"), ("llama3", "original_max_position_embeddings")]
)
def test_rope_scaling_without_a_key(tiny: tuple[transformers.LlamaForCausalLM, Path], tmp_path: Path, kind: str, key: str) -> None:
    folder = copy_of(tiny[1], tmp_path)
    scaling = {**LLAMA3, "rope_type": kind, "original_max_position_embeddings": 32}
    del scaling[key]
    edit_config(folder, lambda values: values.update(rope_parameters=scaling))
    refused(folder, key)


def test_a_context_beyond_the_models(tiny: tuple[transformers.LlamaForCausalLM, Path]) -> None:
    with pytest.raises(ConfigError, match="max_model_len 129 is beyond the model's own limit 128"):
        make_worker(tiny[1], max_model_len=129)
    assert make_worker(tiny[1], max_model_len=100).max_model_len == 100


def test_memory_for_no_page(tiny: tuple[transformers.LlamaForCausalLM, Path]) -> None:
    """2 layers, keys and values, 2 heads of 16 in float32, 8 tokens: 4096 bytes."""
    assert make_worker(tiny[1], kv_cache_memory=4096).store.num_pages == 1
    with pytest.raises(ConfigError, match=r"kv_cache_memory: 4095 bytes hold no page; one takes 4096 bytes"):
        make_worker(tiny[1], kv_cache_memory=4095)


def test_pages_leave_room_for_taps(tiny: tuple[transformers.LlamaForCausalLM, Path]) -> None:
    """Beside the 4096 bytes: 64 hidden values of 8 tokens. A drafter's part is in test_kv_store."""
    plain, tapping = (make_worker(tiny[1], has_tap=has_tap, kv_cache_memory=60_000).store for has_tap in (False, True))
    assert (plain.page_bytes, plain.num_pages) == (4096, 14)
    assert (tapping.page_bytes, tapping.num_pages) == (4096 + 64 * 8 * 4, 9)


def test_a_checkpoint_is_read_when_asked(tiny: tuple[transformers.LlamaForCausalLM, Path]) -> None:
    with Checkpoint(tiny[1]) as checkpoint:
        assert "model.norm.weight" in checkpoint and "model.norm.bias" not in checkpoint
        assert torch.equal(checkpoint.get("model.norm.weight", (64,)), tiny[0].model.norm.weight)


def test_the_bundled_config_is_read() -> None:
    config = read_config(BUNDLED_MODEL)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["eos_token_id"] == 0
