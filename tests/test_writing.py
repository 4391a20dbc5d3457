"""`foretoken quantize`: what it writes is the model that the option `quantization` makes of the same folder."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from backend.config import BUNDLED_DRAFTER, BUNDLED_MODEL, DEFAULT_DRAFTER
from backend.drafter_checks import check_drafter_folder
from backend.errors import ModelError
from backend.model_checks import check_drafter, check_model
from backend.model_files import read_config
from backend.models import shards
from backend.models.eagle import Eagle
from backend.models.mtp import Mtp
from backend.models.quantized_config import read_checkpoint_quantization
from backend.models.shards import held, new_folder
from backend.models.writing import _describe, _shorten
from backend.quantization_config import QuantizationConfig, read_quantization
from deploy.cli import main
from tests.families import Case, edited, load, make_model, random_tokens
from tests.steps import Row, Steps, make_worker
from tests.test_latents import DEEPSEEK
from tests.test_mixtures import QWEN2


def own_logits(folder: Path, **options: Any) -> torch.Tensor:
    steps = Steps(make_worker(folder, **options))
    steps.admit(0, random_tokens(33), range(5))
    steps.run([Row(0, 0, 33)])
    return steps.logits()


CASES = [
    (Case("llama", config={"attention_bias": True}), "wint8"),
    (Case("llama"), "block_wise_fp8"),
    (Case("llama"), {"dense_quant_type": "wint4", "head_quant_type": "wint8"}),
    (Case("qwen2_moe", config=QWEN2), {"dense_quant_type": "fp8", "moe_quant_type": "wint4"}),
    (Case("qwen2_moe", config=QWEN2), {"moe_quant_type": "wint8"}),
    (Case("deepseek_v3", config=DEEPSEEK), "wint4"),
]


@pytest.mark.parametrize(("case", "types"), CASES, ids=lambda value: str(value).replace("_quant_type", ""))
def test_the_same_model_is_loaded_again(case: Case, types: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, from several files too."""
    monkeypatch.setattr(shards, "MAX_SHARD_BYTES", 60_000)
    make_model(case, tmp_path / "model")
    text = types if isinstance(types, str) else json.dumps(types)
    assert main(["quantize", str(tmp_path / "model"), str(tmp_path / "out"), "--quantization", text]) == 0
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    check_model(tmp_path / "out")
    assert torch.equal(own_logits(tmp_path / "out"), own_logits(tmp_path / "model", quantization=types))


def test_others_are_told_what_stays_as_it_is(tmp_path: Path) -> None:
    """They go by the list, and know types of parts by patterns: transformers looks for `experts` in one, for all its experts at once."""
    make_model(Case("deepseek_v3", config=DEEPSEEK | {"num_hidden_layers": 3}), tmp_path / "model")
    types = '{"dense_quant_type": "wint8", "moe_quant_type": "wint4"}'
    assert main(["quantize", str(tmp_path / "model"), str(tmp_path / "out"), "--quantization", types]) == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    plain = ["lm_head", "model.embed_tokens", r"re:model\.layers\.\d+\.mlp\.gate$", r"re:model\.layers\.\d+\.self_attn\.kv_b_proj$"]
    assert sorted(written["ignore"]) == plain
    dense, experts = written["config_groups"].values()
    assert (dense["targets"], dense["weights"]["num_bits"], dense["format"]) == (["Linear"], 8, "pack-quantized")
    named = [rf"re:model\.layers\.\d+\.mlp\.experts\.\d+\.{part}_proj$" for part in ("down", "gate", "up")]
    assert (sorted(experts["targets"]), experts["weights"]["num_bits"]) == (named, 4)


def test_what_stands_beside_a_text_model_is_left_as_it_is() -> None:
    """transformers has it below `model.`, where files do not."""
    plain = ["vision_tower.layers.0.fc1", "projector.linear", "model.layers.0.gate", "model.eh"]
    ignored = _describe({"model.layers.0.up": "fp8"}, plain)["ignore"]
    assert ignored == [
        "lm_head",
        r"re:(model\.)?vision_tower\.layers\.\d+\.fc1$",
        r"re:(model\.)?projector\.linear$",
        r"re:model\.layers\.\d+\.gate$",
        "model.eh",
    ]


def test_a_pattern_means_nothing_else() -> None:
    names = [f"layers.{layer}.mlp.{part}" for layer in (0, 10) for part in ("up", "down")]
    assert _shorten(names[1:], names[:1]) == [r"re:layers\.\d+\.mlp\.down$", "layers.10.mlp.up"]
    assert _shorten(["lm_head", "layers.1.w1"], ["layers.1.w2"]) == ["lm_head", r"re:layers\.\d+\.w1$"]


def test_a_drafter(tmp_path: Path) -> None:
    assert main(["quantize", str(BUNDLED_DRAFTER), str(tmp_path / "out"), "--quantization", "wint4"]) == 0
    check_drafter(tmp_path / "out")
    target = load(BUNDLED_MODEL, only_head=True)
    cpu, x, norm = torch.device("cpu"), torch.randn(3, 192, generator=torch.Generator().manual_seed(0)), torch.ones(192)
    written = Mtp(tmp_path / "out", target, torch.float32, cpu)
    rounded = Mtp(BUNDLED_DRAFTER, target, torch.float32, cpu, read_quantization("wint4"))
    for own, other in zip(written.layers, rounded.layers, strict=True):
        assert torch.equal(own.decoder.attention.qkv.after_norm(x, norm, 1e-5), other.decoder.attention.qkv.after_norm(x, norm, 1e-5))
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert {"model.layers.0.mlp.up_proj.weight_packed", "model.layers.0.enorm.weight"} <= set(file.keys())


def test_a_drafter_of_the_eagle_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which target it is for is not asked. Its authors may have given it their target's architecture."""
    source = edited(DEFAULT_DRAFTER, tmp_path / "source", architectures=["LlamaForCausalLM"])
    for folder, out in ((DEFAULT_DRAFTER, tmp_path / "out"), (source, tmp_path / "other")):
        assert main(["quantize", str(folder), str(out), "--quantization", "wint4"]) == 0
    check_drafter_folder("eagle3", tmp_path / "out", BUNDLED_MODEL)
    target, cpu = load(BUNDLED_MODEL), torch.device("cpu")
    written = Eagle(tmp_path / "out", target, torch.float32, cpu, is_multi_layer=True)
    rounded = Eagle(DEFAULT_DRAFTER, target, torch.float32, cpu, read_quantization("wint4"), is_multi_layer=True)
    generator = torch.Generator().manual_seed(0)
    states = {layer: torch.randn(3, 192, generator=generator) for layer in written.tapped_layers}
    made = [model.tap(states[written.tapped_layers[0]], states) for model in (written, rounded)]
    assert torch.equal(*made)
    x = torch.randn(3, 384, generator=generator)
    assert torch.equal(*(model._layers[0].attention.qkv(x) for model in (written, rounded)))
    held = [load_file(tmp_path / name / "model.safetensors") for name in ("out", "other")]
    assert held[0].keys() == held[1].keys() and "fc.weight_packed" in held[0] and "lm_head.weight_packed" not in held[0]
    odd = edited(DEFAULT_DRAFTER, tmp_path / "odd", hidden_size=96)
    assert main(["quantize", str(odd), str(tmp_path / "none"), "--quantization", "wint4"]) == 2
    assert "eagle3: " in (said := capsys.readouterr().err) and "has shape" in said


def test_what_stands_beside_the_weights_is_taken_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Templates of a folder of their own too, or chats with tools would be written by another one; and none of it where no model is written."""
    folder = edited(BUNDLED_DRAFTER, tmp_path / "model")
    template = folder / "additional_chat_templates" / "tool_use.jinja"
    template.parent.mkdir()
    template.write_text("{{ tools }}")
    assert main(["quantize", str(folder), str(tmp_path / "out"), "--quantization", "wint8"]) == 0
    names = {path.relative_to(folder) for path in folder.rglob("*")} - {Path("model.py")}
    assert {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*")} == names
    weights = load_file(folder / "model.safetensors")
    save_file({name: own * float("nan") for name, own in weights.items()}, folder / "model.safetensors")
    assert main(["quantize", str(folder), str(tmp_path / "none"), "--quantization", "wint8"]) == 2
    assert not (tmp_path / "none").exists()


def test_what_is_not_the_checkpoints_stays_where_it_is(tmp_path: Path) -> None:
    """Triton's code, a trainer's state, weights in other forms and their indices; a model's own code goes along where a file names it."""
    folder = edited(BUNDLED_DRAFTER, tmp_path / "model")
    others = ["optimizer.pt", "pytorch_model.bin", "pytorch_model.bin.index.json", "config.pbtxt", "modeling_own.py", "LICENSE", "tokenizer.model.v3"]
    for name in others:
        (folder / name).write_text("{}")
    (folder / "1").mkdir()
    (folder / "1" / "model.py").touch()

    def written(out: Path) -> set[str]:
        assert main(["quantize", str(folder), str(out), "--quantization", "wint8"]) == 0
        return {path.name for path in out.rglob("*")}

    expected = {"config.json", "model.safetensors", "LICENSE", "tokenizer.model.v3"}
    assert written(tmp_path / "out") == expected
    edited(BUNDLED_DRAFTER, tmp_path / "named", auto_map={"AutoModel": "modeling_own.Own"})
    shutil.copy(tmp_path / "named" / "config.json", folder)
    assert written(tmp_path / "code") == expected | {"modeling_own.py"}


@pytest.mark.parametrize("is_modelopt", [False, True])
def test_what_it_says_of_keys_and_values_is_kept(is_modelopt: bool, tmp_path: Path) -> None:
    """Of plain weights: ModelOpt's own file would say nothing beside the new config.json."""
    scheme = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    folder = edited(BUNDLED_MODEL, tmp_path / "model", **({} if is_modelopt else {"quantization_config": scheme}))
    if is_modelopt:
        (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}')
    assert main(["quantize", str(folder), str(tmp_path / "out"), "--quantization", "wint8"]) == 0
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    found = read_checkpoint_quantization(read_config(tmp_path / "out"), tmp_path / "out")
    assert found is not None and found.has_weights and found.cache == "fp8"


def test_what_a_process_that_was_killed_has_left(tmp_path: Path) -> None:
    """The next one called it no empty folder."""
    if (child := os.fork()) == 0:
        with new_folder(tmp_path / "out") as part:
            (part / "model.safetensors").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert not (tmp_path / "out" / "model.safetensors").exists()
    with new_folder(tmp_path / "out") as part:
        assert not any(part.iterdir())
        (part / "config.json").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


def test_who_else_may_read_it_and_write_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """safetensors' own files are for their user alone; a server has another one in a container. Of two at once each would have written a part."""
    words = ["quantize", str(BUNDLED_DRAFTER), str(tmp_path / "out"), "--quantization", "wint8"]
    (tmp_path / "out").mkdir()
    with held(tmp_path / "out"):
        assert main(words) == 2 and f"{tmp_path / 'out'} is in use by another process" in capsys.readouterr().err
    assert main(words) == 0
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1


def test_what_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: str) -> str:
        assert main(["quantize", *words]) == 2
        return capsys.readouterr().err

    out = str(tmp_path / "out")
    assert "foretoken quantize: quantization must be one of wint8, wint4" in refused(str(BUNDLED_MODEL), out, "--quantization", "int3")
    assert "quantization is not valid JSON" in refused(str(BUNDLED_MODEL), out, "--quantization", "{")
    assert "the head of" in refused(str(BUNDLED_MODEL), out, "--quantization", '{"head_quant_type": "wint8"}')
    assert "quantization -/wint8/- rounds no weight of" in refused(str(BUNDLED_MODEL), out, "--quantization", '{"moe_quant_type": "wint8"}')
    assert "is a drafter, whose head is its target's" in refused(str(BUNDLED_DRAFTER), out, "--quantization", '{"head_quant_type": "wint8"}')
    assert "model folder /no/such/model does not exist" in refused("/no/such/model", out, "--quantization", "wint8")
    assert not Path(out).exists()
    assert "No such file or directory: '/proc/none'" in refused(str(BUNDLED_MODEL), "/proc/none", "--quantization", "wint8")
    odd = edited(BUNDLED_DRAFTER, tmp_path / "odd", architectures=5)
    assert "architectures 5 is no drafter" in refused(str(odd), out, "--quantization", "wint8")
    assert main(["quantize", str(BUNDLED_DRAFTER), out, "--quantization", "wint8"]) == 0
    assert "is there already, and no empty folder" in refused(str(BUNDLED_DRAFTER), out, "--quantization", "wint8")
    assert "the weights are quantized already (compressed-tensors" in refused(out, f"{out}-again", "--quantization", "wint8")


@pytest.mark.parametrize("number", [float("nan"), float("-inf")], ids=str)
def test_weights_that_are_not_finite(number: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They have no digits: neither is such a folder written, nor are they rounded when they are loaded."""
    make_model(Case("llama"), tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = number
    save_file(weights, path)
    for scheme in ("wint8", "wint4", "fp8", "block_wise_fp8"):
        said = f"model.layers.1.mlp.up_proj cannot be rounded to {scheme}: the weight has "
        assert main(["quantize", str(tmp_path / "model"), str(tmp_path / "out"), "--quantization", scheme]) == 2
        assert f"{path}: {said}" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
        with pytest.raises(ModelError, match=said):
            load(tmp_path / "model", quantization=QuantizationConfig(quantization=scheme))


def test_an_index_that_names_more_than_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of weights that nobody reads, and which are copied."""
    shutil.copytree(BUNDLED_DRAFTER, tmp_path / "model")
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        files = dict.fromkeys([*file.keys(), "model.other"], "model.safetensors")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert main(["quantize", str(tmp_path / "model"), str(tmp_path / "out"), "--quantization", "wint8"]) == 2
    assert "model.safetensors: weight model.other cannot be read: File does not contain tensor" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
