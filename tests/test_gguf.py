"""GGUF files as model folders: every family's file gives back the folder that it was made of; and every way in which a file can be wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file

from backend import LLM
from backend.errors import ConfigError, ModelError
from backend.model_checks import check_model
from backend.model_files import read_config
from backend.model_sources import Source, find_model
from backend.models.gguf_file import check_lengths
from backend.models.gguf_folder import read_file, write_folder
from backend.sampling_params import SamplingParams
from backend.text import Tokenizer
from backend.vocabularies import Vocabulary, byte_level_tokenizer
from deploy.cli import main
from tests.families import Case, make_model, rope
from tests.gguf_files import ARCHITECTURES, TOKENS, add_tokenizer, write_gguf
from tests.test_families import GEMMA, GLM, LONGROPE, YARN
from tests.test_latents import DEEPSEEK, EXPERTS, SIZES
from tests.test_mixtures import ERNIE, QWEN2
from tests.test_mixtures import GLM as GLM_EXPERTS
from tests.test_own_drafters import OWN, make_checkpoint

Kind = gguf.GGMLQuantizationType
LLAMA3 = rope("llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
CASES = [
    Case("llama", "biases, tied", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    Case("llama", "llama3 rope, heads of 32", LLAMA3 | {"head_dim": 32}),
    Case("llama", "linear rope, one KV head of 80, one layer", rope("linear", factor=4.0) | {"num_key_value_heads": 1, "head_dim": 80}
         | {"num_hidden_layers": 1}),
    Case("mixtral", config={"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}),
    Case("qwen2", config=YARN),
    Case("qwen3", config={"head_dim": 32}),
    Case("qwen2_moe", config=QWEN2),
    Case("qwen3_moe", config={"head_dim": 32, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True}),
    Case("olmoe", config={"num_experts": 5, "num_experts_per_tok": 3, "clip_qkv": 1.5}),
    Case("gemma2", config=GEMMA | {"query_pre_attn_scalar": 16}),
    Case("gemma3_text", config=GEMMA | {"query_pre_attn_scalar": 16, "num_hidden_layers": 7}),
    Case("phi3", "part of each head turns", rope("default", partial_rotary_factor=0.75) | {"sliding_window": 15}),
    Case("phi3", "longrope", {**LONGROPE, "original_max_position_embeddings": 32}),
    Case("ernie4_5", config={"head_dim": 16}),
    Case("ernie4_5_moe", config=ERNIE),
    Case("glm4", config=GLM),
    Case("glm4_moe", config=GLM_EXPERTS | {"use_qk_norm": True, "n_group": 3, "topk_group": 2, "head_dim": 16}),
    Case("deepseek_v2", "yarn", SIZES | EXPERTS
         | rope("yarn", factor=4.0, mscale=0.7, mscale_all_dim=0.7, original_max_position_embeddings=32)),
    Case("deepseek_v3", config=DEEPSEEK),
]  # fmt: skip


def expected_family(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text())["model_type"]


def same_model(converted: Path, folder: Path) -> None:
    """The same parts, and the same weights bit by bit."""
    # `num_local_experts` is what newer files call num_experts.
    own, expected = (repr(dataclasses.replace(check_model(path), where="", eos_token_ids=frozenset())) for path in (converted, folder))
    assert own.replace("num_local_experts", "num_experts") == expected.replace("num_local_experts", "num_experts")
    weights, before = load_file(converted / "model.safetensors"), load_file(folder / "model.safetensors")
    for name in weights:
        is_offset = "gemma" in expected_family(folder) and name.endswith("norm.weight")  # one is added, and taken away again
        torch.testing.assert_close(weights[name], before[name].reshape(weights[name].shape), rtol=0, atol=1e-7 if is_offset else 0)
    assert {name for name in before if name not in weights} <= {"lm_head.weight"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_family(case: Case, tmp_path: Path) -> None:
    make_model(case, tmp_path / "model")
    write_folder(write_gguf(tmp_path / "model", tmp_path / "model.gguf"), tmp_path / "out")
    same_model(tmp_path / "out", tmp_path / "model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of untied weights, of sizes that blocks of 32 fit in."""
    found = tmp_path_factory.mktemp("model")
    make_model(Case("llama", config={"intermediate_size": 64}), found)
    return found


def convert(folder: Path, tmp_path: Path, **options: Any) -> Path:
    write_folder(write_gguf(folder, tmp_path / "model.gguf", **options), tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("kind", "stored", "dtype", "error"),
    [
        (Kind.F16, torch.float16, "float16", 1e-3),
        (Kind.BF16, torch.bfloat16, "bfloat16", 1e-2),
        (Kind.Q8_0, torch.float16, "bfloat16", 1e-2),
        (Kind.Q4_1, torch.float16, "bfloat16", 0.1),
    ],
    ids=lambda value: value.name if isinstance(value, Kind) else "",
)
def test_forms_of_weights(kind: Kind, stored: torch.dtype, dtype: str, error: float, folder: Path, tmp_path: Path) -> None:
    out = convert(folder, tmp_path, kind=kind)
    weights, before = load_file(out / "model.safetensors"), load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    assert weights[name].dtype == stored and weights["model.norm.weight"].dtype == torch.float32 and read_config(out)["dtype"] == dtype
    assert (weights[name].float() - before[name]).abs().max() < error * before[name].abs().max()


def test_a_dtype_of_ones_own(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(folder, tmp_path / "model.gguf", Kind.Q8_0)
    assert main(["convert", str(tmp_path / "model.gguf"), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert {own.dtype for own in load_file(tmp_path / "out/model.safetensors").values()} == {torch.bfloat16}
    assert "Converting" not in capsys.readouterr().err, "bars are for terminals"


def test_parts_of_a_split_file(folder: Path, tmp_path: Path) -> None:
    write_gguf(folder, tmp_path / "model.gguf", split_tensors=7)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert len(parts) > 2
    write_folder(parts[1], tmp_path / "out")
    same_model(tmp_path / "out", folder)
    parts[0].unlink()
    with pytest.raises(ModelError, match=f"one of {len(parts)} parts; missing beside it: {parts[0].name}"):
        write_folder(parts[1], tmp_path / "again")


@pytest.fixture(scope="module")
def split(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The parts of a file."""
    where = tmp_path_factory.mktemp("split")
    write_gguf(folder, where / "model.gguf", split_tensors=7)
    return sorted(where.glob("*.gguf"))


def copied(parts: list[Path], folder: Path) -> list[Path]:
    folder.mkdir()
    return [Path(shutil.copy(part, folder)) for part in parts]


def test_a_split_file_by_any_part_by_its_folder_and_by_links(
    split: list[Path], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Converted once. The hub's cache has links by the parts' names, to files that are named by what is in them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    parts, made = copied(split, tmp_path / "own"), []
    source = Source(convert=lambda path, out: (made.append(path), write_folder(path, out)))
    found = find_model(parts[0], source)
    same_model(found, folder)
    (snapshot := tmp_path / "snapshot").mkdir()
    for number, part in enumerate(copied(split, tmp_path / "blobs")):
        (snapshot / part.name).symlink_to(part.rename(part.with_name(f"blob{number}")))
    (link := tmp_path / "called-otherwise.gguf").symlink_to(parts[1])
    paths = (parts[0], parts[2], parts[0].parent, snapshot / parts[1].name, snapshot, link)
    assert {find_model(path, source) for path in paths} == {found} and made == [parts[0]]
    assert main(["inspect", str(snapshot)]) == 0 and "LlamaForCausalLM" in capsys.readouterr().out
    assert main(["convert", str(snapshot), str(tmp_path / "out")]) == 0
    same_model(tmp_path / "out", folder)


def test_a_part_that_changed_is_converted_anew(split: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    parts = copied(split, tmp_path / "own")
    source = Source(convert=lambda path, out: out.mkdir())
    before = find_model(parts[0], source)
    parts[-1].write_bytes(parts[-1].read_bytes()[:-400] + bytes(400))
    assert find_model(parts[0], source) != before


def test_parts_that_do_not_belong_together(folder: Path, split: list[Path], tmp_path: Path) -> None:
    make_model(Case("llama", config={"intermediate_size": 64, "num_hidden_layers": 3}), tmp_path / "longer")
    write_gguf(tmp_path / "longer", tmp_path / "longer.gguf", split_tensors=10)
    others, out = sorted(tmp_path.glob("longer-*.gguf")), tmp_path / "out"
    assert len(others) == len(split) == 3
    parts = copied(split, tmp_path / "mixed")
    shutil.copy(others[1], parts[1])
    refused(parts[1], out, f"{parts[1]}: split.tensors.count is 30, and in {parts[0].name} 21: it is a part of another model")
    shutil.copy(split[2], parts[1])
    refused(parts[1], out, f"{parts[1]}: split.no is 2; by its name it is 1: it is another part, or one of another model")
    write_gguf(folder, tmp_path / "halves.gguf", split_tensors=14)
    shutil.copy(tmp_path / "halves-00002-of-00002.gguf", parts[1])
    refused(parts[1], out, f"{parts[1]}: split.count is 2; by its name it is 3: it is another part, or one of another model")
    write_gguf(folder, parts[1])
    refused(parts[1], out, f"{parts[1]}: split.count is None; by its name it is 3")


def test_a_part_by_another_name(split: list[Path], tmp_path: Path) -> None:
    path = Path(shutil.copy(split[1], tmp_path / "part.gguf"))
    refused(path, tmp_path / "out", "is part 2 of 3 (split.count), by another name: each is named NAME-00001-of-00009.gguf")
    path = Path(shutil.copy(split[1], tmp_path / "model-00004-of-00003.gguf"))
    refused(path, tmp_path / "out", "a part of 3 is numbered from 1 to 3, not 4")


@pytest.mark.parametrize("count", [0, 1])
def test_parts_that_were_put_together_again(count: int, folder: Path, tmp_path: Path) -> None:
    """llama.cpp's tool leaves the keys, with a count of 0."""
    path = tmp_path / "model-00001-of-00001.gguf"
    write_gguf(folder, path, tokenizer=lambda writer: (add_tokenizer(writer), writer.add_uint16("split.count", count)))
    write_folder(path, tmp_path / "out")
    same_model(tmp_path / "out", folder)


def test_a_folder_of_several_files(folder: Path, split: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One has to be named; and of a folder that says what a model is, weights of another kind are not taken for its own."""
    copied(split, where := tmp_path / "own")
    shutil.copy(split[0], where / "other.gguf")
    with pytest.raises(ModelError, match=r"has several GGUF files \(model-00001-of-00003.gguf, other.gguf\): name one of them"):
        find_model(where)
    assert main(["convert", str(folder), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"foretoken convert: {folder} is no GGUF file, nor a folder with one alone\n"
    shutil.copy(folder / "config.json", where)
    with pytest.raises(ModelError, match=r"has neither model.safetensors .*; to serve model-00001-of-00003.gguf, which is a GGUF file, name that"):
        check_model(find_model(where))


def test_modules_that_predict_more_tokens_come_along(tmp_path: Path) -> None:
    make_checkpoint(next(own for own in OWN if own.case.family == "glm4_moe"), tmp_path / "model")
    write_folder(write_gguf(tmp_path / "model", tmp_path / "model.gguf"), tmp_path / "out")
    same_model(tmp_path / "out", tmp_path / "model")
    assert read_config(tmp_path / "out")["num_nextn_predict_layers"] == 1


def test_served_as_transformers_computes_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the file's name, converted once, also where it is its own drafter."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_gguf(folder, tmp_path / "model.gguf", Kind.Q4_1)
    prompt = [4, 7, 8, 9, 5, 6]
    speculative = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 3}
    llm = LLM(str(path), speculative_config=speculative, dtype="float32", kv_cache_memory="4MiB")
    (output,) = llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True), use_tqdm=False)
    converted = find_model(path, Source(convert=lambda *_: pytest.fail("converted twice")))
    model = transformers.AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32).eval()
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False, eos_token_id=None)
    assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist() and output.outputs[0].stats.accepted


# -- tokenizers -----------------------------------------------------------------------------------------------------------------


def test_a_byte_level_vocabulary(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(
        out := convert(folder, tmp_path, tokenizer=lambda writer: (add_tokenizer(writer), writer.add_chat_template("{{ messages }}")))
    )
    assert tokenizer.encode("abc ab<s>a") == [9, 8, 1, 4] and tokenizer.decode([9, 8]) == "abc ab"
    assert tokenizer.chat_template == "{{ messages }}" and tokenizer.special_ids == {"<unk>": 0, "<s>": 1, "</s>": 2}
    assert read_config(out)["eos_token_id"] == [2]
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert theirs("abc ab").input_ids == [9, 8] and theirs.eos_token == "</s>" and theirs.bos_token == "<s>"


PIECES = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *[(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]]
PIECES += [("▁a", -1.0, 1), ("ab", -2.0, 1), ("▁ab", -3.0, 1), ("▁", -4.0, 1), ("a", -5.0, 1), ("b", -6.0, 1), ("<|end|>", 0.0, 4)]


def add_pieces(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece for piece, _, _ in PIECES])
    writer.add_token_scores([score for _, score, _ in PIECES])
    writer.add_token_types([kind for _, _, kind in PIECES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("dbrx", "It'LL be 12345 é!\n\n x", ["It", "'LL", " be", " ", "123", "45", " é", "!\n\n", " x"]),  # Phi-4
        ("gpt-4o", "HTTPServer's 12345 //\n don't", ["HTTPServer's", " ", "123", "45", " //\n", " don't"]),  # Phi-4 mini
        (
            "deepseek-llm",
            "Hi 12, 中文。\n λόγος don't  ",
            ["Hi", " ", "1", "2", ",", " ", "中文", "。", "\n", " λόγος", " don", "'", "t", "  "],
        ),  # V2
    ],
)
def test_how_text_is_cut(pre: str, text: str, pieces: list[str]) -> None:
    made = byte_level_tokenizer(Vocabulary(TOKENS, [1] * len(TOKENS), "file"), [], pre, before=(), after=None)
    patterns = [tokenizers.Regex(own["pattern"]["Regex"]) for own in made["pre_tokenizer"]["pretokenizers"] if own["type"] == "Split"]
    cuts = tokenizers.pre_tokenizers.Sequence([tokenizers.pre_tokenizers.Split(pattern, "isolated") for pattern in patterns])
    assert [piece for piece, _ in cuts.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize("has_prefix", [True, False])
def test_a_vocabulary_with_scores(has_prefix: bool, folder: Path, tmp_path: Path) -> None:
    """Merges by score; bytes for what has no piece; the first token is put before."""
    tokenizer = Tokenizer(convert(folder, tmp_path, tokenizer=lambda writer: (add_pieces(writer), writer.add_add_space_prefix(has_prefix))))
    ids = {piece: number for number, (piece, _, _) in enumerate(PIECES)}
    first = ["▁ab"] if has_prefix else ["ab"]  # `▁a` comes before `ab`, and `▁ab` after both
    expected = [ids[piece] for piece in ["<s>", *first, "▁a", "<0xC3>", "<0xBC>", "<|end|>"]]
    assert tokenizer.encode("ab aü<|end|>") == expected
    assert tokenizer.decode(expected) == "ab aü<|end|>"


# -- files that are wrong -------------------------------------------------------------------------------------------------------


def refused(path: Path, out: Path, *parts: str) -> None:
    """By a conversion before it has written anything, and by `foretoken inspect`."""
    for read in (lambda: write_folder(path, out), lambda: read_file(path)):
        with pytest.raises(ModelError) as caught:
            read()
        assert all(part in str(caught.value) for part in (str(path), *parts)), str(caught.value)
    assert not out.exists()


def test_tensors_that_are_missing_or_left_over(folder: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "model.gguf", tmp_path / "out"
    refused(
        write_gguf(folder, path, leave_out="blk.1.ffn_up.weight"), out, "tensor blk.1.ffn_up.weight (model.layers.1.mlp.up_proj.weight) is missing"
    )
    refused(write_gguf(folder, path, leave_out="token_embd.weight"), out, "tensor token_embd.weight is missing")
    more = {"blk.1.ssm_a": np.zeros(4, np.float32)}
    refused(write_gguf(folder, path, edit=more), out, "tensor blk.1.ssm_a would not be used")


def test_shapes_that_are_others(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(folder, tmp_path / "model.gguf", edit={"blk.0.attn_v.weight": np.zeros((64, 8), np.float32)})
    refused(path, tmp_path / "out", "tensor blk.0.attn_v.weight has shape (64, 8); the metadata make it (32, 64)")


def test_a_form_that_is_not_known(folder: Path, tmp_path: Path) -> None:
    path, name = write_gguf(folder, tmp_path / "model.gguf"), b"blk.1.attn_v.weight"
    data = bytearray(path.read_bytes())
    place = data.index(name) + len(name) + 4 + 2 * 8  # past the number of dimensions, and two of them
    data[place : place + 4] = Kind.I32.to_bytes(4, "little")
    path.write_bytes(data)
    refused(path, tmp_path / "out", "tensor blk.1.attn_v.weight is stored as I32, which the package gguf does not expand")


@pytest.mark.parametrize("size", [0, 3, 24, 700, -1000])
def test_truncated_files(size: int, folder: Path, tmp_path: Path) -> None:
    path = write_gguf(folder, tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:size])
    refused(path, tmp_path / "out", "cannot be read as a GGUF file")


@pytest.mark.parametrize(
    ("key", "place", "value", "message"),
    [
        ("tokenizer.ggml.token_type", 8, 2**62, "'tokenizer.ggml.token_type' reaches past its end"),
        ("tokenizer.ggml.tokens", 8, 2**40, "'tokenizer.ggml.tokens' reaches past its end"),
        ("tokenizer.ggml.tokens", 16, 2**63, "'tokenizer.ggml.tokens' reaches past its end"),
        ("llama.block_count", 0, 77, "'llama.block_count' is of type 77"),
    ],
)
def test_lengths_that_are_damaged(key: str, place: int, value: int, message: str, folder: Path, tmp_path: Path) -> None:
    """The package would read an array of any length, for ever and into ever more memory. place: from the type of the value on."""
    path = write_gguf(folder, tmp_path / "model.gguf")
    data = bytearray(path.read_bytes())
    begin = data.index(key.encode()) + len(key) + place
    data[begin : begin + (8 if place else 4)] = value.to_bytes(8 if place else 4, "little")
    path.write_bytes(data)
    refused(path, tmp_path / "out", f"{path} cannot be read as a GGUF file (truncated download?): {message}")


@pytest.mark.parametrize("tokenizer", [None, lambda writer: writer.add_tokenizer_model("bert")])
def test_no_tokenizer(tokenizer: Any, folder: Path, tmp_path: Path) -> None:
    refused(write_gguf(folder, tmp_path / "model.gguf", tokenizer=tokenizer), tmp_path / "out", "has no tokenizer.ggml.tokens")


def with_tokens(**changed: Any) -> Callable[[gguf.GGUFWriter], None]:
    def add(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer)
        for key, value in changed.items():
            own = f"tokenizer.ggml.{key}"
            writer.kv_data[0].pop(own, None)
            if value is not None:
                writer.add_key_value(own, value, gguf.GGUFValueType.get_type(value))

    return add


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model 't5' is not supported; known: gpt2, llama"),
        ({"pre": "viking"}, "the pre-tokenizer 'viking' is not known; known: llama3"),
        ({"merges": None}, "has no tokenizer.ggml.merges"),
        ({"model": "llama", "scores": [float("nan")] * len(TOKENS)}, "tokenizer.ggml.scores is [nan, nan"),
        ({"merges": ["a z"]}, "merge 0 ('a z') is not of two tokens that make one"),
        ({"tokens": [*TOKENS[:-1], "a"]}, "token 9 is 'a', and so is token 4"),
        ({"tokens": ["a", "b"] * 200}, "tokenizer.ggml.tokens has 400 tokens; the embedding has 301"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 entries; there are 10 tokens"),
        ({"eos_token_id": 77}, "tokenizer.ggml.eos_token_id is 77; it must be from 0 to 9"),
        ({"eos_token_id": True}, "tokenizer.ggml.eos_token_id is True; it must be from 0 to 9"),
        ({"pre": None}, "tokenizer.ggml.pre is None; it must be one of: llama3"),
        ({"pre": ["qwen2"]}, "tokenizer.ggml.pre is ['qwen2']; it must be one of: llama3"),
    ],
    ids=str,
)
def test_tokenizers_that_are_wrong(changed: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    refused(write_gguf(folder, tmp_path / "model.gguf", tokenizer=with_tokens(**changed)), tmp_path / "out", message)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "mamba", "general.architecture 'mamba' is not supported; known: llama, qwen2"),
        ("general.architecture", ["llama"], "general.architecture ['llama'] is not supported; known: llama, qwen2"),
        ("general.sampling.temp", -1.0, "general.sampling.temp -1.0: temperature must be"),
        ("general.sampling.top_p", "x", "general.sampling.top_p 'x': top_p must be"),
        ("tokenizer.chat_template", 5, "tokenizer.chat_template is 5; it must be text"),
        ("tokenizer.chat_template.tool_use", "{% if %}", "tokenizer.chat_template.tool_use: the chat template is not valid"),
        ("llama.block_count", 0, "llama: block_count is 0; it must be an integer from 1"),
        ("llama.attention.head_count_kv", [2, 4], "attention.head_count_kv is [2, 4]; it must be the same for all layers"),
        ("llama.rope.scaling.type", "su", "rope.scaling.type is 'su'; it must be none, linear, yarn or longrope"),
        ("llama.rope.dimension_count", 8, "rope.dimension_count is 8; it must be the size of a head (16)"),
        ("llama.attention.layer_norm_rms_epsilon", None, "llama has no 'attention.layer_norm_rms_epsilon'"),
    ],
    ids=str,
)
def test_metadata_that_no_model_has(key: str, value: Any, message: str, folder: Path, tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer)
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))

    refused(write_gguf(folder, tmp_path / "model.gguf", tokenizer=edit), tmp_path / "out", message)


@pytest.mark.parametrize("case", [Case("glm4", config=GLM), Case("glm4_moe", config=GLM_EXPERTS | {"head_dim": 16}), Case("phi3")], ids=str)
def test_heads_of_nothing(case: Case, tmp_path: Path) -> None:
    """More of them than the states have numbers: of which no share can turn."""
    make_model(case, tmp_path / "model")
    arch = ARCHITECTURES[case.family]

    def edit(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer)
        for key in ("attention.key_length", "attention.value_length", "attention.head_count"):
            writer.kv_data[0].pop(f"{arch}.{key}", None)
        writer.add_uint32(f"{arch}.attention.head_count", 1000)

    path = write_gguf(tmp_path / "model", tmp_path / "model.gguf", tokenizer=edit)
    refused(path, tmp_path / "out", "attention.head_count is 1000; it must be no more than embedding_length (")


def test_what_is_asked_for_wrongly(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(folder, tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="is there already, and no empty folder"):
        write_folder(path, folder)
    assert main(["convert", str(tmp_path / "none.gguf"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"foretoken convert: {tmp_path / 'none.gguf'} is missing\n"
    with pytest.raises(ModelError, match="is a file, and a model is a folder; of a GGUF file `foretoken convert` makes one"):
        check_model(path)


def test_what_a_file_recommends(folder: Path, tmp_path: Path) -> None:
    out = convert(folder, tmp_path, tokenizer=lambda writer: (add_tokenizer(writer), writer.add_float32("general.sampling.temp", 0.5)))
    assert json.loads((out / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": [2], "do_sample": True, "temperature": 0.5}


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="not a regular file"):
        check_lengths(tmp_path / "model.gguf")
