"""Damaged model folders: refused by name in the launcher, in a moment and before a server starts, and by whoever loads them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend import model_checks
from backend.config import BUNDLED_DRAFTER, BUNDLED_MODEL, DEFAULT_DRAFTER
from backend.drafter_checks import settle_method
from backend.errors import ConfigError, ModelError
from backend.model_files import fingerprint
from backend.model_sources import find_model
from backend.models import load_model
from backend.models.mtp import Mtp
from backend.parallel.ranks import Ranks
from deploy.cli import main
from tests.small import SMALL_MODEL

NAN, INF = float("nan"), float("inf")
CPU = torch.device("cpu")
Damage = Callable[[Path], Any]


def edited(**values: Any) -> Damage:
    """Python's json writes and reads NaN and Infinity, as other tools do."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def reweighted(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def write(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        (folder / "model.safetensors").unlink()
        save_file(weights, folder / "model.safetensors")

    return write


def replaced(name: str, content: bytes | None) -> Damage:
    """None: by a pipe that nobody writes to."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        if content is None:
            os.mkfifo(folder / name)
        else:
            (folder / name).write_bytes(content)

    return change


def renamed(name: str, other: str) -> Damage:
    return lambda folder: (folder / name).rename(folder / other)


def wrapped(change: Callable[[str], str]) -> Damage:
    """Weights by other names. The bundled model is tied."""

    def rename(weights: dict[str, torch.Tensor]) -> None:
        found = {change(name): weight for name, weight in weights.items()}
        weights.clear()
        weights |= found

    return reweighted(rename)


def adapted(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "ORG/NAME"}')
    (folder / "config.json").unlink()


def linked(name: str) -> Damage:
    """A file of the hub's cache whose contents are gone."""

    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("../blobs/gone")

    return damage


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
CONFIGS: list[tuple[Damage, str]] = [
    (edited(num_hidden_layers=3), "weight model.layers.10.input_layernorm.weight, "),
    (edited(num_hidden_layers=3), "and 148 more would not be used: num_hidden_layers is 3, and the weights are those of another model"),
    (edited(num_hidden_layers=21), "weight model.layers.20.input_layernorm.weight, model.layers.20.post_attention_layernorm.weight, "),
    (edited(num_hidden_layers=0), "num_hidden_layers is 0; it must be an integer from 1 to 1024"),
    (edited(num_hidden_layers=True), "num_hidden_layers is True"),
    (edited(num_hidden_layers="20"), "num_hidden_layers is '20'"),
    (edited(num_hidden_layers=10**12), "num_hidden_layers is 1000000000000"),
    (edited(vocab_size=-4096), "vocab_size is -4096; it must be an integer from 1 to 4194304"),
    (edited(vocab_size=4000), "weight model.embed_tokens.weight has shape (4096, 192); config.json makes it (4000, 192)"),
    (edited(rope_theta=NAN), "rope_theta is nan; it must be a number above 0"),
    (edited(rope_theta=-1.0), "rope_theta is -1.0"),
    (edited(rope_theta=0), "rope_theta is 0"),
    (edited(rope_parameters={"rope_theta": INF}), "rope_parameters: rope_theta is inf"),
    (edited(rope_parameters=[1]), "rope_parameters is [1]; it must be an object"),
    (edited(rope_scaling={"type": "linear", "factor": -2.0}), "rope_scaling: factor is -2.0"),
    (edited(rope_scaling={"type": "ntk", "factor": 2.0}), "rope scaling 'ntk' is not supported; known: default, linear, llama3"),
    (edited(rope_scaling={**LLAMA3, "low_freq_factor": 4.0}), "low_freq_factor is 4.0; it must be below high_freq_factor (4)"),
    (edited(rope_scaling={**LLAMA3, "original_max_position_embeddings": NAN}), "original_max_position_embeddings is nan"),
    (edited(rope_scaling={"type": None, "factor": 2.0}), "rope_scaling: rope_type is None; it must be one of default, linear"),
    (edited(rms_norm_eps=NAN), "rms_norm_eps is nan; it must be a number above 0, and 1 at most"),
    (edited(rms_norm_eps=-1e-5), "rms_norm_eps is -1e-05"),
    (edited(rms_norm_eps=0), "rms_norm_eps is 0"),
    (edited(rms_norm_eps=10**400), "rms_norm_eps is 1000000"),
    (edited(rope_scaling={"type": "linear", "factor": 10**400}), "rope_scaling: factor is 1000000"),
    (edited(rms_norm_eps="1e-5"), "rms_norm_eps is '1e-5'"),
    (edited(bos_token_id=-1), "bos_token_id is -1; it must be token ids from 0 to 4095 (vocab_size 4096), or null"),
    (edited(bos_token_id="<s>"), "bos_token_id is '<s>'"),
    (replaced("generation_config.json", b'{"eos_token_id": 10000000000}'), "eos_token_id is 10000000000"),
    (replaced("generation_config.json", b'{"eos_token_id": [0, -7]}'), "eos_token_id is [0, -7]"),
    (replaced("generation_config.json", b'{"eos_token_id": 0.5}'), "eos_token_id is 0.5"),
    (edited(num_key_value_heads=3), "num_key_value_heads is 3; it must be a divisor of num_attention_heads (4)"),
    (edited(head_dim=63), "head_dim is 63; it must be even"),
    (edited(head_dim=-64), "head_dim is -64"),
    (edited(max_position_embeddings=10**9), "max_position_embeddings is 1000000000"),
    (edited(tie_word_embeddings="no"), "tie_word_embeddings is 'no'; it must be true or false"),
    (edited(hidden_act=["silu"]), "hidden_act ['silu'] is not supported; known: silu"),
    (edited(architectures="LlamaForCausalLM"), "architectures 'LlamaForCausalLM' are not supported"),
    (edited(architectures=[["x"], 3]), "architectures [['x'], 3] are not supported"),
    (edited(quantization_config={"quant_method": "awq", "bits": 4}), "quantization_config has no 'q_group_size'"),
    (edited(quantization_config={"quant_method": "fp8"}), "no weight is quantized as config.json says (fp8); model.layers.19.mlp.down_proj is among"),
    (edited(quantization_config={"bits": 8}), "quantization_config of quant_method None is not supported"),
    (edited(quantization_config="fp8"), "quantization_config is 'fp8'; it must be an object"),
    (edited(compression_config={"quant_method": "compressed-tensors"}), "compression_config has no 'config_groups'"),
    (replaced("hf_quant_config.json", b"{}"), "hf_quant_config.json: quantization has no 'quant_algo'"),
    (replaced("config.json", None), "config.json cannot be read: it is not a regular file"),
    (replaced("config.json", POINTER), "config.json is Git LFS's pointer to a file, not the file itself: fetch that with `git lfs pull`"),
    (adapted, "is an adapter (LoRA) for 'ORG/NAME', and no model: adapters are not served: merge it into the model"),
    (replaced("config.json", b'{"a":' * 100_000), "config.json cannot be read"),
    (replaced("config.json", b"[" * 100_000 + b"]" * 100_000), "config.json cannot be read: it is nested too deeply"),
    (replaced("config.json", b'{"vocab_size": ' + b"9" * 10_000 + b"}"), "config.json cannot be read"),
]
WEIGHTS: list[tuple[Damage, str]] = [
    (replaced("model.safetensors", None), "model.safetensors cannot be read: it is not a regular file"),
    (replaced("model.safetensors", b"\xff" * 64), "model.safetensors cannot be read"),
    (replaced("model.safetensors", POINTER), "model.safetensors is Git LFS's pointer to a file, not the file itself"),
    (wrapped(lambda name: f"_orig_mod.{name}"), "more is missing; all are there with '_orig_mod.' before their names, by what it was wrapped in"),
    (wrapped(lambda name: f"base_model.model.{name}"), "all are there with 'base_model.model.' before their names"),
    (wrapped(lambda name: name.removeprefix("model.")), "all are there without 'model.' before their names: save the whole model"),
    (
        wrapped(lambda name: name.replace("q_proj.weight", "q_proj.base_layer.weight")),
        "and 15 more is missing; the weights are those of an adapter (LoRA): adapters are not served: merge it into the model",
    ),
    (
        reweighted(lambda w: w.update({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 192)})),
        "weight base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight would not be used: adapters are not served",
    ),
    (reweighted(lambda w: w.pop("model.layers.7.mlp.up_proj.weight")), "weight model.layers.7.mlp.up_proj.weight is missing"),
    (
        reweighted(lambda w: w.update({"model.layers.20.mlp.up_proj.weight": torch.zeros(2)})),
        "weight model.layers.20.mlp.up_proj.weight would not be used",
    ),
    (
        reweighted(lambda w: w.update({"model.layers.0.self_attn.q_proj.scales": torch.zeros(2)})),
        "model.layers.0.self_attn.q_proj.scales would not be used",
    ),
    (
        reweighted(lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(256)})),
        "weight model.layers.0.self_attn.k_proj.bias, model.layers.0.self_attn.v_proj.bias is missing, though the projections beside it have theirs",
    ),
    (
        reweighted(lambda w: w.update({"model.norm.weight": torch.ones(192, dtype=torch.int8)})),
        "weight model.norm.weight is of dtype I8; known: F64, F32",
    ),
]
FILES: list[tuple[Damage, str]] = [
    (linked("model.safetensors"), "model.safetensors is missing: the link to ../blobs/gone leads nowhere"),
    (linked("generation_config.json"), "generation_config.json is missing: the link to ../blobs/gone leads nowhere"),
    (linked("tokenizer_config.json"), "tokenizer_config.json is missing: the link to ../blobs/gone leads nowhere"),
    (linked("hf_quant_config.json"), "hf_quant_config.json is missing: the link to ../blobs/gone leads nowhere"),
    (linked("model.safetensors.index.json"), "model.safetensors.index.json is missing: the link to ../blobs/gone leads nowhere"),
    (replaced("tokenizer.json", None), "tokenizer.json is missing"),
    (renamed("tokenizer.json", "tekken.json"), "tokenizer.json is missing; tekken.json is not read: take the tokenizer.json of a model of the same"),
    (replaced("tokenizer.json", b"{}"), "tokenizer.json has no object 'model'"),
    (replaced("tokenizer.json", b"\xff"), "tokenizer.json cannot be read"),
    (replaced("tokenizer_config.json", None), "tokenizer_config.json cannot be read: it is not a regular file"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The bundled model's folder, to be damaged; its weights by link."""
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.py", "__pycache__"))
    (folder / "model.safetensors").symlink_to(BUNDLED_MODEL / "model.safetensors")
    return folder


def launch(folder: Path, tmp_path: Path, *options: str) -> int:
    return main(["serve", "--dry-run", f"--model={folder}", f"--repository={tmp_path / 'repository'}", *options])


@pytest.mark.parametrize(("damage", "message"), [*CONFIGS, *WEIGHTS, *FILES], ids=lambda v: v[:60] if isinstance(v, str) else "")
def test_the_launcher_refuses_what_is_damaged(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Damage, message: str) -> None:
    damage(folder)
    assert launch(folder, tmp_path) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("foretoken serve: ") and message in captured.err and str(folder) in captured.err
    assert "Traceback" not in captured.err and not (tmp_path / "repository").exists()


@pytest.mark.parametrize(("damage", "message"), [*CONFIGS, *WEIGHTS], ids=lambda v: v[:60] if isinstance(v, str) else "")
def test_so_does_the_engine(folder: Path, damage: Damage, message: str) -> None:
    damage(folder)
    with pytest.raises(ModelError) as caught:
        load_model(folder, torch.float32, CPU, Ranks())
    assert message in str(caught.value)


def test_tables_beside_the_weights_pass(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of older files; and a head that is written though it is tied. What else nobody reads is named, and no more."""
    tables = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(32) for i in range(20)}

    def add(weights: dict[str, torch.Tensor]) -> None:
        weights |= {**tables, "model.rotary_emb.inv_freq": torch.zeros(32), "lm_head.weight": weights["model.embed_tokens.weight"].clone()}

    reweighted(add)(folder)
    assert launch(folder, tmp_path) == 0 and not caplog.records
    load_model(folder, torch.float32, CPU, Ranks())
    reweighted(lambda w: w.update({"score.weight": torch.zeros(2)}))(folder)
    assert launch(folder, tmp_path) == 0
    assert "1 weights are not used: score.weight" in caplog.text
    (folder / "adapter_config.json").write_text("{}")
    assert launch(folder, tmp_path) == 0
    assert f"{folder / 'adapter_config.json'} is not read: the model is served without its adapter" in caplog.text


def test_biases_that_config_does_not_speak_of_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are used, where transformers leaves them out."""

    def add(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(len(weights["model.layers.0.self_attn.o_proj.weight"]))

    reweighted(add)(folder)
    load_model(folder, torch.float32, CPU, Ranks())
    assert f"{folder}: 1 biases are used of which config.json does not speak: model.layers.0.self_attn.o_proj.bias" in caplog.text


@pytest.mark.parametrize("values", [{"quantization_config": None}, {"quantization_config": {}}, {"eos_token_id": None, "bos_token_id": None}])
def test_what_says_nothing_passes(folder: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    edited(**values)(folder)
    assert launch(folder, tmp_path) == 0


def test_made_up_weights_need_no_file(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert launch(folder, tmp_path) == 2
    path = tmp_path / "server.yaml"
    path.write_text("load_format: dummy\n")
    assert launch(folder, tmp_path, f"--config={path}") == 0


def test_ranks_that_cannot_hold_it_are_refused_in_the_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(BUNDLED_MODEL, tmp_path, "-tp", "3", "--device", "cpu") == 2
    assert "foretoken serve: tensor_parallel_size 3: num_attention_heads is 4, which does not divide by it" in capsys.readouterr().err


def test_a_context_beyond_the_models_is_refused_in_the_dry_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(folder, tmp_path, "--max-model-len=32768") == 2
    assert "foretoken serve: max_model_len 32768 is beyond the model's own limit 2048" in capsys.readouterr().err
    assert launch(folder, tmp_path, "--max-model-len=2048") == 0


DRAFTERS: list[tuple[Damage, str]] = [
    (edited(quantization_config={"quant_method": "gptq"}), "quantization_config has no 'bits'"),
    (edited(num_nextn_predict_layers=1), "would not be used: num_nextn_predict_layers is 1"),
    (edited(num_nextn_predict_layers=3), "weight model.layers.2.enorm.weight, "),
    (edited(rope_theta=NAN), "rope_theta is nan"),
    (edited(hidden_size=96), "hidden_size is 96; the target's is 192"),
    (edited(max_position_embeddings=100), "max_position_embeddings is 100; the target's is 2048"),
    (edited(architectures=["LlamaForCausalLM"]), "architectures ['LlamaForCausalLM'] is no drafter of method mtp; known: LlamaMTP"),
    (replaced("config.json", None), "config.json cannot be read: it is not a regular file"),
]


@pytest.fixture(scope="module")
def target() -> Any:
    return load_model(BUNDLED_MODEL, torch.float32, CPU, Ranks(), only_head=True)


@pytest.mark.parametrize(("damage", "message"), DRAFTERS, ids=lambda v: v[:60] if isinstance(v, str) else "")
def test_drafters(tmp_path: Path, target: Any, capsys: pytest.CaptureFixture[str], damage: Damage, message: str) -> None:
    drafter = Path(shutil.copytree(BUNDLED_DRAFTER, tmp_path / "drafter"))
    options = f"--speculative-config={json.dumps({'method': 'mtp', 'model': str(drafter)})}"
    assert launch(BUNDLED_MODEL, tmp_path, options) == 0
    damage(drafter)
    capsys.readouterr()
    assert launch(BUNDLED_MODEL, tmp_path, options) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(ModelError) as caught:
        Mtp(drafter, target, torch.float32, CPU)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("drafter", "values", "method"),
    [
        (BUNDLED_DRAFTER, {}, "mtp"),
        (DEFAULT_DRAFTER, {}, "eagle3"),
        (DEFAULT_DRAFTER, {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, "eagle3"),
        (BUNDLED_MODEL, {}, "draft_model"),
        (BUNDLED_MODEL, {"architectures": ["Qwen2ForCausalLM"], "num_nextn_predict_layers": 1}, "mtp"),
    ],
    ids=str,
)
def test_a_method_follows_from_the_drafters_folder(drafter: Path, values: dict[str, Any], method: str, tmp_path: Path) -> None:
    """As vLLM's users leave it out. What says a method, by any name, is left as it is."""
    folder = Path(shutil.copytree(drafter, tmp_path / "drafter"))
    edited(**values)(folder)
    found = {"model": str(folder), "method": method, "num_speculative_tokens": 2}
    for key, none in (("model", {}), ("speculative_model", {"method": None})):
        given = {key: str(folder), "num_speculative_tokens": 2, **none}
        settled, line = settle_method(given, find_model)
        assert settled == {key if own == "model" else own: value for own, value in found.items()}
        assert line == f"speculative_config.method is {method}, which the drafter in {folder} is made for"
    named = ({"method": "ngram"}, {"speculate_method": "ngram"}, {"speculative_algorithm": "NGRAM"}, {"decoding_type": "NGram"}, {"model": "[ngram]"})
    for other in ({}, None, 5, {"num_speculative_tokens": 2}, {"model": 5}, *({"model": str(folder)} | own for own in named)):
        assert settle_method(other, find_model) == (other, "")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            edited(architectures=["MambaForCausalLM"]),
            "architectures ['MambaForCausalLM'] is no drafter or model known here (model_type 'llama', and weights",
        ),
        (
            edited(speculators_model_type="mtp"),
            "speculators_model_type is 'mtp', which names no method; known: eagle, eagle3, peagle, dflash, dspark",
        ),
        (edited(speculators_model_type=[]), "speculators_model_type is [], which names no method"),
    ],
)
def test_a_folder_that_says_no_method(damage: Damage, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(BUNDLED_MODEL, tmp_path / "model"))
    damage(folder)
    assert launch(BUNDLED_MODEL, tmp_path, f"--speculative-config={json.dumps({'model': str(folder)})}") == 2
    said = capsys.readouterr().err
    assert f"speculative_config.method must be given: {folder} does not say it: {folder}/config.json: {message}" in said
    assert said.strip().endswith("; one of mtp, draft_model, eagle, eagle3, dflash, dspark, medusa, hydra, mlp_speculator")


def test_no_folder_says_a_method(tmp_path: Path) -> None:
    """Of a damaged archive no names are known; names on the hub, and files, are found as models are."""
    for name in ("config.json", "pytorch_model.bin"):
        (tmp_path / name).write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (file := tmp_path / "model.txt").touch()
    with pytest.raises(ConfigError, match=r"\(model_type None, and no names of weights in pytorch_model\.bin\); one of mtp, "):
        settle_method({"model": str(tmp_path)}, find_model)
    for asked, message in (
        (tmp_path / "none", "does not exist, nor is it a name on the hub"),
        (file, "is no model folder: name a folder"),
        ("none", "model folder none does not exist"),
    ):
        with pytest.raises(ModelError, match=message):
            settle_method({"model": str(asked)}, find_model)
    with pytest.raises(ModelError, match=r"model folder .*/none does not exist"):
        settle_method({"model": "none"}, lambda name: tmp_path / name)


def test_a_drafter_that_repeats_its_targets_weights(tmp_path: Path) -> None:
    drafter = Path(shutil.copytree(BUNDLED_DRAFTER, tmp_path / "drafter"))
    copies = {f"model.layers.0.{name}.weight": torch.zeros(4096, 192) for name in ("embed_tokens", "shared_head.head")}
    reweighted(lambda w: w.update(copies))(drafter)
    model_checks.check_drafter(drafter)


def test_an_index_names_files_of_its_folder_only(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = load_file(BUNDLED_MODEL / "model.safetensors")
    for file in ("../elsewhere/model.safetensors", "/etc/passwd", 7):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))
        assert launch(folder, tmp_path) == 2
        assert "which is no file of this folder" in capsys.readouterr().err


def test_the_fingerprint_is_of_each_weight(tmp_path: Path) -> None:
    """Of nodes and ranks whose checkpoints differ in one of them each would compute a part of another model's answer."""
    (tmp_path / "config.json").write_text("{}")
    weights = load_file(SMALL_MODEL / "model.safetensors")
    found = set()
    for name in (None, *weights):
        own = weights if name is None else {**weights, name: weights[name] * 1.25}
        save_file(own, tmp_path / "model.safetensors")
        found.add(fingerprint(tmp_path))
    assert len(found) == 1 + len(weights)


def test_the_fingerprint_is_of_what_says_how_weights_are_quantized(tmp_path: Path) -> None:
    """Equal bytes stand for other numbers by it; where config.json says it, the files beside it count for nothing."""
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    found = [fingerprint(tmp_path)]
    modelopt = "hf_quant_config.json"
    for name, content in (("quant_config.json", {"bits": 4}), ("quantize_config.json", {"bits": 4}), (modelopt, {}), (modelopt, {"bits": 8})):
        (tmp_path / name).write_text(json.dumps(content))
        found.append(fingerprint(tmp_path))
    assert len(set(found)) == len(found)
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "quantization_config": {"quant_method": "fp8"}}')
    own = fingerprint(tmp_path)
    (tmp_path / modelopt).unlink()
    assert fingerprint(tmp_path) == own
