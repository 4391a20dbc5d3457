"""`foretoken inspect`: what it says of a folder is what loading it finds."""

from __future__ import annotations

import gc
import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from backend.config import BUNDLED_DRAFTER, BUNDLED_MODEL, DEFAULT_DRAFTER
from backend.models.gguf_folder import write_folder
from backend.models.inspection import _weight_bytes
from backend.models.loading import check_model, open_checkpoint
from backend.models.spec import WeightList
from backend.quantization import Quantized, cut_columns, cut_rows, make_stored_experts
from deploy.cli import main
from kernels import ops
from kernels.panels import PanelWeight, is_usable
from tests.families import Case, edited, make_model
from tests.gguf_files import write_gguf
from tests.quantized import FORMATS, write_checkpoints
from tests.steps import make_worker
from tests.test_latents import DEEPSEEK
from tests.test_mixtures import EXPERTS, QWEN2
from tests.test_own_drafters import OWN, make_checkpoint


def inspect(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["inspect", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["inspect", *map(str, words)]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("case", [Case("llama"), Case("qwen2_moe", config=QWEN2), Case("deepseek_v3", config=DEEPSEEK)], ids=str)
def test_sizes_are_those_of_loading(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(case, folder := tmp_path / "model")
    count = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    found = inspect(capsys, folder, "--dtype", "float32", "--batch", 3)
    assert found["parameters"].startswith(f"{count / 1e6:.1f} million") and ("for a token" in found["parameters"]) == (case.family != "llama")
    worker = make_worker(folder, kv_cache_memory="1MiB")
    token = sum(spec.token_bytes * spec.num_planes for spec in worker.store.specs.values())
    assert f"a token {token / 1024:.1f} KiB, 3 x 128 tokens {3 * 128 * token / 1024:.1f} KiB" in found["memory"]
    spec = check_model(folder)
    assert _weight_bytes(spec, worker.dtype, 1) == 4 * count
    weights = load_file(folder / "model.safetensors")
    whole = [
        own for name, own in weights.items() if own.ndim == 1 or re.search(r"embed_tokens|[qk]v?_a_proj|mlp\.(shared_expert_)?gate\.weight", name)
    ]
    assert 2 * _weight_bytes(spec, worker.dtype, 2) == 4 * (count + sum(own.numel() for own in whole))  # which both have


def test_what_ranks_and_heads_have_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys and values of one head on both of two ranks; a head that is the embedding, whose products want it in another layout."""
    make_model(Case("llama", config={"num_key_value_heads": 1, "tie_word_embeddings": True}), tmp_path / "model")
    spec = check_model(tmp_path / "model")
    small = {name: own.numel() for name, own in load_file(tmp_path / "model" / "model.safetensors").items() if own.ndim == 1 or "embed" in name}
    keys = sum(2 * own.out_features * own.in_features for own in (layer.attention.qkv[1] for layer in spec.layers))
    total = 4 * sum(own.numel() for own in load_file(tmp_path / "model" / "model.safetensors").values())
    assert 2 * _weight_bytes(spec, torch.float32, 2) == total + 4 * (sum(small.values()) + keys)
    assert "; on CPU 75.2 KiB more for the head" in inspect(capsys, tmp_path / "model", "--dtype", "float32")["memory"]


@pytest.mark.parametrize("is_tied", [False, True])
def test_projections_that_stay_in_16_bits_on_cpu(is_tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In float32, which is the default there: as loading keeps them, which a look at the layers themselves says."""
    if not is_usable(torch.empty(1, 1)):
        pytest.skip("without compiled kernels all are kept in float32")
    sizes = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128, "vocab_size": 384, "tie_word_embeddings": is_tied}
    make_model(Case("llama", config=sizes), folder := tmp_path / "model")
    weights = {name: own.bfloat16() for name, own in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    edited(folder, tmp_path / "half", dtype="bfloat16")
    before = {id(own) for own in gc.get_objects() if isinstance(own, PanelWeight)}
    worker = make_worker(tmp_path / "half", kv_cache_memory="1MiB")
    panels = sum(own.panels.nbytes for own in gc.get_objects() if isinstance(own, PanelWeight) and id(own) not in before)
    others = 4 * sum(own.numel() for name, own in weights.items() if own.ndim == 1 or "embed_tokens" in name)
    token = sum(spec.token_bytes * spec.num_planes for spec in worker.store.specs.values())
    found = inspect(capsys, tmp_path / "half", "--batch", 2)["memory"]
    sizes = [f"{own / 1024:.1f} KiB" for own in (panels + others, token, panels + others + 2 * 128 * token)]
    assert found.startswith("in bfloat16: ")
    assert found.endswith("; on CPU, by default in float32: weights {}, a token {}, together {}".format(*sizes))
    asked = inspect(capsys, tmp_path / "half", "--dtype", "float32")["memory"]
    less = 2 * sum(own.numel() for name, own in weights.items() if own.ndim == 2 and "embed_tokens" not in name)
    assert asked.startswith("in float32: ") and f"; on CPU {less / 1024:.1f} KiB less, since projections of bfloat16 stay so" in asked


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_embedding_that_ranks_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_tied: bool) -> None:
    """Columns of it on each; where it is the head, too, rows beside."""
    make_model(Case("llama", config={"tie_word_embeddings": is_tied}), tmp_path / "model")
    spec = check_model(tmp_path / "model")
    whole = _weight_bytes(spec, torch.float32, 4)
    monkeypatch.setattr("backend.models.embedding.MIN_SAVED_BYTES", 0)
    saved = spec.vocab_size * spec.hidden_size * 4 * (2 if is_tied else 3) // 4
    assert _weight_bytes(spec, torch.float32, 4) == whole - saved


def test_one_line_for_each_heading(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(BUNDLED_MODEL), "-tp", "2"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if not line.startswith("runs on"))
    assert lines["architecture"].startswith("LlamaForCausalLM: 20 layers of 192, heads 4 / 2")
    assert lines["stored"] == "100% BF16 in 1 file" and "on each rank" in lines["memory"] and lines["served"].startswith("foretoken serve --model /")


def test_keys_and_values_in_8_bits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As asked for, or as the checkpoint asks."""
    words = [BUNDLED_MODEL, "--dtype", "float32"]
    assert "a token 20.0 KiB" in inspect(capsys, *words)["memory"]
    assert "a token in fp8 5.0 KiB" in inspect(capsys, *words, "--kv-cache-dtype", "fp8_e4m3")["memory"]
    make_model(Case("llama"), tmp_path / "model")
    scheme = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    folder = edited(tmp_path / "model", tmp_path / "asks", quantization_config=scheme)
    assert "a token in fp8 0.1 KiB" in inspect(capsys, folder)["memory"]
    assert "in fp8" not in inspect(capsys, folder, "--kv-cache-dtype", "model")["memory"]
    assert "kv_cache_dtype must be one of auto, model, fp8, got 'int8'" in refused(capsys, BUNDLED_MODEL, "--kv-cache-dtype", "int8")


def test_a_drafter(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert inspect(capsys, BUNDLED_DRAFTER)["fits"].startswith("targets of hidden_size 192 and vocab_size 4096")
    assert inspect(capsys, BUNDLED_DRAFTER, "--target", BUNDLED_MODEL)["drafter"].endswith("as mtp")
    assert inspect(capsys, BUNDLED_MODEL, "--target", BUNDLED_MODEL)["drafter"].endswith("as draft_model")
    assert inspect(capsys, DEFAULT_DRAFTER)["drafter"] == "of method eagle3"
    half = edited(DEFAULT_DRAFTER, tmp_path / "half")
    (half / "model.safetensors").unlink()
    assert f"{half} has neither model.safetensors" in refused(capsys, half)
    make_model(Case("llama"), tmp_path / "model")
    said = refused(capsys, BUNDLED_DRAFTER, "--target", tmp_path / "model")
    assert "is no drafter for" in said and "mtp: " in said and "hidden_size is 192; the target's is 64" in said


def test_a_drafter_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is converted first, as `serve` does it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_model(Case("llama"), tmp_path / "model")
    path = write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    assert inspect(capsys, path, "--target", path)["drafter"].endswith("as draft_model")
    assert "hidden_size is 64; the target's is 192" in refused(capsys, path, "--target", BUNDLED_MODEL)


def test_methods_that_need_no_other_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those without weights, and mtp where its modules come with the model: bundled, in the checkpoint, in a file."""
    every = "ngram, suffix, token_recycling"
    own = r"mtp \(bundled, [\d.]+ million\), eagle3 \(its folder drafter, the default\)"
    assert re.fullmatch(f"{every}, {own}", inspect(capsys, BUNDLED_MODEL)["drafters"])
    make_model(Case("llama"), tmp_path / "model")
    assert inspect(capsys, tmp_path / "model")["drafters"] == every
    make_checkpoint(next(own for own in OWN if own.case.family == "glm4_moe"), folder := tmp_path / "own")
    found = inspect(capsys, folder)["drafters"]
    assert re.fullmatch(rf"{every}, mtp \(1 own, [\d.]+ million, [\d.]+ million for a token\)", found)
    assert inspect(capsys, write_gguf(folder, tmp_path / "own.gguf"))["drafters"] == found
    lacking = edited(folder, tmp_path / "lacking", num_nextn_predict_layers=2)
    assert inspect(capsys, lacking)["drafters"].startswith(f"{every}; its own modules cannot be used: ")


KINDS = ("wint8", "awq", "compressed int4", "compressed fp8, blocks", "compressed int4 in bytes, older", "nvfp4")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_in_few_bits(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As they are kept, which is not as files have them: scales and zeros in float32, 4-bit floats and latents' up-projections as plain numbers."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 24}
    make_model(Case("deepseek_v3", config=DEEPSEEK | sizes), folder := tmp_path / "model")
    if kind == "wint8":
        assert main(["quantize", str(folder), str(tmp_path / "out"), "--quantization", kind]) == 0
        folder = tmp_path / "out"
    else:
        folder, _ = write_checkpoints(folder, next(form for form in FORMATS if form.name == kind), tmp_path)
    capsys.readouterr()
    weights = WeightList()
    check_model(folder).list_weights(weights)
    count = 0
    with open_checkpoint(folder, torch.float32, torch.device("cpu"), "safetensors") as checkpoint:
        for name, shape in weights.required.items():
            own = checkpoint.get_projection(name.removesuffix(".weight"), *shape) if len(shape) == 2 else torch.empty(shape)
            if isinstance(own, Quantized) and "kv_b_proj" not in name:
                packed = own.pack()
                count += sum(part.nbytes for part in (packed.codes, packed.scales, packed.zeros) if part is not None)
            else:
                count += 4 * math.prod(shape)
    found = inspect(capsys, folder, "--dtype", "float32")
    assert f"weights {count / 1024:.1f} KiB" in found["memory"] and "quantized (" in found["stored"]


@pytest.mark.parametrize("kind", ["awq", "compressed int4", "compressed int8"])
def test_what_a_gpu_pads_experts_with(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank's 96 inputs, up to 128."""
    make_model(Case("qwen3_moe", config=EXPERTS | {"moe_intermediate_size": 192, "num_hidden_layers": 1}), tmp_path / "model")
    folder, _ = write_checkpoints(tmp_path / "model", next(form for form in FORMATS if form.name == kind), tmp_path)
    mlp = check_model(folder).layers[0].mlp
    with open_checkpoint(folder, torch.float32, torch.device("cpu"), "safetensors") as checkpoint:
        stored = [[checkpoint.get_projection(own.name, own.out_features, own.in_features) for own in mlp.expert(i)] for i in range(5)]
    own = slice(0, 96)
    parts = [([cut_rows(gate, own), cut_rows(up, own)], cut_columns(down, own)) for gate, up, down in stored]
    made, bare = make_stored_experts(parts, torch.device("cuda"), F.silu), 0
    for gate_up, down in parts:
        bare += sum(part.nbytes for weight in (*gate_up, down) for part in vars_of(weight.pack()))
    count = sum(part.nbytes for weight in (made._gate_up, made._down) for part in vars_of(weight)) - bare
    assert f"; on a GPU {count / 1024:.1f} KiB more for experts" in inspect(capsys, folder, "-tp", 2)["memory"]
    assert ("on a GPU" in inspect(capsys, folder)["memory"]) == (kind != "compressed int8"), "192 are three steps of 8 bits"


def vars_of(weight: ops.QuantizedWeight) -> list[torch.Tensor]:
    return [part for part in (weight.codes, weight.scales, weight.zeros) if part is not None]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_memory_of_a_file_is_that_of_its_folder(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(Case("qwen2"), tmp_path / "model")
    path = write_gguf(tmp_path / "model", tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind])
    write_folder(path, tmp_path / "out")
    file, folder = (inspect(capsys, own)["memory"].partition("; on CPU")[0] for own in (path, tmp_path / "out"))
    assert file == folder and file.startswith({"F32": "in float32", "F16": "in float16", "BF16": "in bfloat16"}[kind])


def test_a_file_that_is_not_converted_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(Case("qwen2"), tmp_path / "model")
    path = write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    found, folder = inspect(capsys, path), inspect(capsys, tmp_path / "model")
    assert found["stored"] == "100% F32" and found["served"] == f"foretoken serve --model {path} (converted once)"
    assert [found[key] for key in ("architecture", "parameters", "context")] == [folder[key] for key in ("architecture", "parameters", "context")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-model-len", "129"], "max_model_len 129 is beyond the model's own limit 128"),
        (["-tp", "3"], "tensor_parallel_size 3: num_attention_heads is 4, which does not divide by it"),
        (["--batch", "0"], "batch must be from 1 to 1048576, got 0"),
        (["--batch", "1" + 400 * "0"], "batch must be from 1 to 1048576, got 1000000000"),
        (["-tp", str(10**30)], "tensor_parallel_size must be from 1 to 64, got 1000000000"),
    ],
    ids=str,
)
def test_loads_that_cannot_be(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(Case("llama"), tmp_path / "model")
    assert f"foretoken inspect: {message}" in refused(capsys, tmp_path / "model", *words)


def test_what_cannot_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(Case("llama"), tmp_path / "model")
    other = edited(tmp_path / "model", tmp_path / "other", architectures=["MambaForCausalLM"])
    assert "architectures ['MambaForCausalLM'] are not supported; known: " in refused(capsys, other)
    assert "does not exist, nor is it a name on the hub" in refused(capsys, tmp_path / "none")
    odd = edited(tmp_path / "model", tmp_path / "odd", head_dim=24)
    (odd / "model.safetensors").unlink()
    assert "has neither model.safetensors nor" in refused(capsys, odd)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("generation_config.json", {"eos_token_id": [0, 301]}, "generation_config.json: eos_token_id is [0, 301]; it must be token ids"),
        ("generation_config.json", {"temperature": float("nan")}, "generation_config.json: temperature nan: "),
        ("tokenizer_config.json", {"chat_template": "{% if %}"}, "the chat template is not valid"),
        ("tokenizer_config.json", {"chat_template": {"default": "x"}}, "the chat template must be text, got {'default': 'x'}"),
        ("tokenizer.json", {"model": {"type": "BPE"}}, "tokenizer.json cannot be read: "),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_files_beside_the_weights(name: str, values: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server of them would not start."""
    make_model(Case("llama"), tmp_path)
    (tmp_path / name).write_text(json.dumps(json.loads((tmp_path / name).read_text()) | values))
    assert message in refused(capsys, tmp_path)


def test_names_that_no_file_can_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(Case("llama"), tmp_path / "model")
    with safe_open(tmp_path / "model" / "model.safetensors", "np") as file:
        names = list(file.keys())
    for name in ("a\0b.safetensors", "\ud800.safetensors"):
        (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, name)}))
        assert "cannot be read: " in refused(capsys, tmp_path / "model")
    assert f"model {'a' * 300} cannot be read: " in refused(capsys, "a" * 300)


def test_homes_of_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name of no user behind `~`, wherever a path may be: pathlib raises a RuntimeError of it."""
    make_model(Case("llama"), tmp_path / "model")
    path = write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    for words in (
        ["inspect", "~nobody-here/x"],
        ["inspect", str(tmp_path / "model"), "--target", "~nobody-here/x"],
        ["convert", "~nobody-here/x", str(tmp_path / "out")],
        ["convert", str(path), "~nobody-here/x"],
        ["serve", "~nobody-here/x", "--dry-run"],
    ):
        assert main(words) == 2
        assert f"foretoken {words[0]}: ~nobody-here/x: there is no home folder ~nobody-here" in capsys.readouterr().err


def test_folders_and_files_that_may_not_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may be allowed to read anything."""
    folder, denied = tmp_path / "model", PermissionError(13, "Permission denied")
    make_model(Case("llama"), folder)

    def deny(method: str, name: str) -> None:
        own = getattr(Path, method)

        def call(path: Path, *args: Any, **options: Any) -> Any:
            if path.name == name:
                raise denied
            return own(path, *args, **options)

        monkeypatch.setattr(Path, method, call)

    deny("open", "model.safetensors")
    assert f"{folder}/model.safetensors cannot be read: [Errno 13] Permission denied" in refused(capsys, folder)
    deny("exists", "config.json")
    assert f"model {folder} cannot be read: [Errno 13] Permission denied" in refused(capsys, folder)


def test_templates_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(Case("llama"), tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for templates, said in (([{"name": "default", "template": "x"}], "yes, by its template"), ([{"name": ["rag"]}, 3], "no template")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": templates}))
        assert main(["inspect", str(tmp_path)]) == 0
        assert f"chat          {said}" in capsys.readouterr().out
