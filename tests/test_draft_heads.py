"""Medusa, Hydra and MLP speculators against a plain statement of their formulas, in the formats that they are published in."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from backend import SamplingParams
from backend.drafter_checks import check_drafter_folder, find_method
from backend.errors import ConfigError, ModelError
from backend.model_checks import check_model
from backend.models.heads import load_heads
from backend.models.writing import _describe, _tensors_of
from backend.quantization import quantize
from backend.speculative_config import SpeculativeConfig
from deploy import served_model
from tests.drafting import NUM_DRAFTS, check_drafts, check_static, check_tokens, check_tree_tokens, serve
from tests.families import Case, assert_close, edited, load, make_model

HIDDEN, VOCABULARY, INNER, EPS = 64, 301, 24, 1e-6
TARGET = Case("llama", config={"rms_norm_eps": EPS, "num_hidden_layers": 3, "hidden_size": HIDDEN, "head_dim": 64})
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Kind:
    name: str
    method: str
    config: dict[str, Any]
    file: str = "model.safetensors"
    is_bare: bool = False
    """Names have no prefix."""

    def __str__(self) -> str:
        return self.name


MEDUSA = Kind("Medusa, an archive", "medusa", {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"}, "medusa_lm_head.pt")
SPECULATOR = {"n_predict": 4, "emb_dim": HIDDEN, "inner_dim": INNER, "vocab_size": VOCABULARY}
HYDRA = {"hydra_num_heads": 4, "hydra_num_layers": 1, "grounded_heads": True, "hydra_head_arch": "mlp"}
KINDS = [
    MEDUSA,
    Kind(
        "Medusa, two blocks, of vLLM",
        "medusa",
        {"hidden_size": HIDDEN, "vocab_size": VOCABULARY, "num_heads": 4, "num_hidden_layers": 2, "truncated_vocab_size": 0},
    ),
    Kind("Medusa, few tokens", "medusa", {"num_heads": 4, "truncated_vocab_size": 40, "original_lm_head": True, "vocab_size": VOCABULARY}),
    Kind("Hydra, an archive", "hydra", HYDRA, "hydra_lm_head.pt"),
    Kind("Hydra, two blocks, of an earlier state", "hydra", HYDRA | {"hydra_num_layers": 2, "hidden_state_offset": 1}),
    Kind("Hydra, not grounded", "hydra", HYDRA | {"grounded_heads": False}),
    Kind("Hydra++", "hydra", HYDRA | {"hydra_head_arch": "prefix-mlp"}, "hydra_lm_head.pt"),
    Kind("speculator", "mlp_speculator", SPECULATOR | {"scale_input": True}),
    Kind("speculator, tied", "mlp_speculator", SPECULATOR | {"n_predict": 3, "num_lookahead_tokens": 5, "tie_weights": True}, is_bare=True),
]
LSTM = {"method": "sum_lstm", "inner_dim": "24", "emb_dim": "24", "proj_dim": "24", "input_hidden_dim": HIDDEN, "vocab_size": VOCABULARY}
LSTM |= {"n_predict": 3, "num_lookahead_tokens": 4, "tie_weights": True, "tie_lstm_embs": True, "scale_input": True}
KINDS.append(Kind("LSTM", "mlp_speculator", LSTM, is_bare=True))


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * 0.2


def make_medusa(config: dict[str, Any]) -> tuple[Weights, Any]:
    is_vllm = "num_heads" in config
    count, blocks = 4, config.get("num_hidden_layers" if is_vllm else "medusa_num_layers", 1)
    few = config.get("truncated_vocab_size")
    names = [([f"blocks.{i}.layers.{j}" if is_vllm else f"{i}.{j}.linear" for j in range(blocks)]) for i in range(count)]
    heads = ["lm_heads.0" if few else f"lm_heads.{i}" if is_vllm else f"{i}.{blocks}" for i in range(count)]
    weights = {f"{name}.weight": tensor(HIDDEN, HIDDEN) for own in names for name in own}
    if not is_vllm:
        weights |= {f"{name}.bias": tensor(HIDDEN) for own in names for name in own}
    weights |= {f"{head}.weight": tensor(few or VOCABULARY, HIDDEN) for head in heads}
    if few:
        weights["token_map"] = torch.randperm(VOCABULARY)[:few].sort().values

    def following(state: torch.Tensor, embeddings: list[torch.Tensor], tokens: list[int]) -> torch.Tensor:
        number = len(tokens) - 1
        x = state
        for name in names[number]:
            x = x + F.silu(F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias")))
        scores = weights[f"{heads[number]}.weight"] @ x
        if not few:
            return scores
        whole = torch.full((VOCABULARY,), float("-inf"))
        whole[weights["token_map"]] = scores
        return whole

    return weights, following


def make_hydra(config: dict[str, Any]) -> tuple[Weights, Any]:
    is_prefixed, blocks, weights = config["hydra_head_arch"] == "prefix-mlp", config["hydra_num_layers"], {}
    for i in range(4):
        for j in range(blocks):
            width = HIDDEN * (i + 2 if config["grounded_heads"] and j == 0 else 1)
            name = f"hydra_mlp.{i}.{2 * j + 1 if is_prefixed else j}"
            weights |= {f"{name}.linear.weight": tensor(HIDDEN, width), f"{name}.linear.bias": tensor(HIDDEN)}
            if width > HIDDEN:
                weights |= {f"{name}.res_connection.weight": tensor(HIDDEN, width), f"{name}.res_connection.bias": tensor(HIDDEN)}
        head = f"hydra_lm_head.{i}.1" if is_prefixed else f"hydra_lm_head.{i}"
        weights |= {f"{head}.weight": tensor(VOCABULARY, HIDDEN), f"{head}.bias": tensor(VOCABULARY)}

    def following(state: torch.Tensor, embeddings: list[torch.Tensor], tokens: list[int]) -> torch.Tensor:
        i = len(tokens) - 1
        x = torch.cat([state, *embeddings]) if config["grounded_heads"] else state
        for j in range(blocks):
            name = f"hydra_mlp.{i}.{2 * j + 1 if is_prefixed else j}"
            shortcut = x if len(x) == HIDDEN else weights[f"{name}.res_connection.weight"] @ x + weights[f"{name}.res_connection.bias"]
            x = shortcut + F.silu(weights[f"{name}.linear.weight"] @ x + weights[f"{name}.linear.bias"])
        head = f"hydra_lm_head.{i}.1" if is_prefixed else f"hydra_lm_head.{i}"
        return weights[f"{head}.weight"] @ x + weights[f"{head}.bias"]

    return weights, following


def make_speculator(config: dict[str, Any], prefix: str) -> tuple[Weights, Any]:
    is_tied = config.get("tie_weights", False)
    count = config.get("num_lookahead_tokens", config["n_predict"])
    weights: Weights = {}
    for i in range(1 if is_tied else count):
        weights |= {f"{prefix}emb.{i}.weight": tensor(VOCABULARY, INNER), f"{prefix}head.{i}.weight": tensor(VOCABULARY, INNER) * 3}
        weights |= {f"{prefix}ln.{i}.weight": tensor(INNER) + 1, f"{prefix}ln.{i}.bias": tensor(INNER)}
    for i in range(2 if is_tied else count):
        weights[f"{prefix}proj.{i}.weight"] = tensor(INNER, INNER if i else HIDDEN)

    def following(state: torch.Tensor, embeddings: list[torch.Tensor], tokens: list[int]) -> torch.Tensor:
        state_weight = 0.5 ** (0.5 / config["n_predict"])
        token_weight = math.sqrt((1 - state_weight**2) * INNER / 2)
        if config.get("scale_input"):
            state = state * (state.pow(2).mean() + 1e-6).rsqrt() / math.sqrt(2)
        for i, token in enumerate(tokens):
            own = 0 if is_tied else i
            x = weights[f"{prefix}proj.{min(i, 1) if is_tied else i}.weight"] @ state
            x = x + token_weight / state_weight * weights[f"{prefix}emb.{own}.weight"][token]
            x = x * (x.pow(2).mean() + 1e-6).rsqrt() * weights[f"{prefix}ln.{own}.weight"] + weights[f"{prefix}ln.{own}.bias"]
            state = F.gelu(x)
        return weights[f"{prefix}head.{0 if is_tied else len(tokens) - 1}.weight"] @ state

    return weights, following


def make_lstm(config: dict[str, Any]) -> tuple[Weights, Any]:
    weights = {"forget_emb.0.weight": tensor(VOCABULARY, INNER), "head.0.weight": tensor(VOCABULARY, INNER) * 5}
    weights |= {"projs.0.weight": tensor(4 * INNER, HIDDEN), "projs.1.weight": tensor(4 * INNER, INNER)}
    for name in ("cell_ln", "state_ln"):
        weights |= {f"{name}.0.weight": tensor(INNER) + 1, f"{name}.0.bias": tensor(INNER)}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean() + 1e-6).rsqrt() * weights[f"{name}.0.weight"] + weights[f"{name}.0.bias"]

    def following(state: torch.Tensor, embeddings: list[torch.Tensor], tokens: list[int]) -> torch.Tensor:
        state_weight = 0.5 ** (0.5 / config["n_predict"])
        token_weight, cell = math.sqrt((1 - state_weight**2) * INNER / 2), torch.zeros(INNER)
        state = state * (state.pow(2).mean() + 1e-6).rsqrt() / math.sqrt(2)
        for i, token in enumerate(tokens):
            x = weights[f"projs.{min(i, 1)}.weight"] @ state
            x = x + token_weight / state_weight * weights["forget_emb.0.weight"][token].repeat(4)
            forget, take, give, candidate = x.split(INNER)
            cell = cell * torch.sigmoid(forget) + F.gelu(norm(candidate, "cell_ln")) * torch.sigmoid(take)
            state = F.gelu(norm(cell, "state_ln")) * torch.sigmoid(give)
        return weights["head.0.weight"] @ state

    return weights, following


@dataclass
class Drafter:
    kind: Kind
    following: Any
    model: Any
    prefix: Any = None

    @torch.inference_mode()
    def draft(self, token_ids: list[int], count: int) -> list[torch.Tensor]:
        found = self.model.model(torch.tensor([token_ids[:-1]]), use_cache=False, output_hidden_states=True)
        offset = self.kind.config.get("hidden_state_offset", 0)
        states = found.hidden_states[-1 - offset][0]
        if self.prefix is not None:
            states = self.after_prefix(states)
        embed, tokens, logits = self.model.model.embed_tokens.weight, token_ids[-1:], []
        for _ in range(count):
            logits.append(self.following(states[-1], list(embed[torch.tensor(tokens)]), tokens))
            tokens = [*tokens, int(logits[-1].argmax())]
        return logits

    @torch.inference_mode()
    def after(self, token_ids: list[int], drafts: list[int]) -> torch.Tensor:
        """The logits after drafts."""
        found = self.model.model(torch.tensor([token_ids[:-1]]), use_cache=False, output_hidden_states=True)
        states = found.hidden_states[-1 - self.kind.config.get("hidden_state_offset", 0)][0]
        states = states if self.prefix is None else self.after_prefix(states)
        tokens = [token_ids[-1], *drafts]
        logits: torch.Tensor = self.following(states[-1], list(self.model.model.embed_tokens.weight[torch.tensor(tokens)]), tokens)
        return logits

    def after_prefix(self, states: torch.Tensor) -> torch.Tensor:
        """transformers' layer, with a state of zeros before the first: the row of the first token, which has no state before it."""
        padded = torch.cat([torch.zeros(1, HIDDEN), states])[None]
        return self.prefix(inputs_embeds=padded, use_cache=False).last_hidden_state[0]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("target")
    return make_model(TARGET, folder), folder


def make(kind: Kind, folder: Path, model: Any) -> Drafter:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(kind.config))
    prefix = None
    if kind.method == "medusa":
        weights, following = make_medusa(kind.config)
    elif kind.method == "hydra":
        weights, following = make_hydra(kind.config)
    elif "method" in kind.config:
        weights, following = make_lstm(kind.config)
    else:
        weights, following = make_speculator(kind.config, "" if kind.is_bare else "speculator.")
    if kind.config.get("hydra_head_arch") == "prefix-mlp":
        prefix = transformers.LlamaModel(transformers.LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": 1})).eval()
        with torch.no_grad():
            for name, weight in prefix.named_parameters():
                weight.copy_(torch.rand(weight.shape) + 0.5 if "norm" in name else tensor(*weight.shape))
        weights |= {f"prefix_embeding_layer.{name}": weight for name, weight in prefix.state_dict().items()}
    if kind.file.endswith(".pt"):
        torch.save(weights, folder / kind.file)
    else:
        save_file(weights, folder / kind.file)
    return Drafter(kind, following, model, prefix)


@pytest.fixture(scope="module", params=KINDS, ids=str)
def drafter(request: pytest.FixtureRequest, target: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Drafter, Path]:
    folder = tmp_path_factory.mktemp("drafter") / "drafter"
    return make(request.param, folder, target[0]), folder


def test_a_folder_says_its_method(drafter: tuple[Drafter, Path]) -> None:
    own, folder = drafter
    assert find_method(folder) == own.kind.method


@pytest.mark.parametrize("policy", ["reject_all", "accept_all"])
def test_drafts_are_those_of_the_formulas(
    policy: str, drafter: tuple[Drafter, Path], target: tuple[Any, Path], caplog: pytest.LogCaptureFixture
) -> None:
    own, folder = drafter
    check_drafter_folder(own.kind.method, folder, target[1])
    assert "of which config.json does not speak" not in caplog.text, "no config.json of heads speaks of biases"
    check_drafts(serve(target[1], method=own.kind.method, model=str(folder), accept_policy=policy), own.draft, policy)


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_as_many_drafts_are_known_before_loading_as_are_loaded(load_format: str, drafter: tuple[Drafter, Path], target: tuple[Any, Path]) -> None:
    """But of Medusa's archives, whose heads are counted: those of config.json are made up where weights are."""
    own, folder = drafter
    if load_format == "dummy" and own.kind.config.get("truncated_vocab_size"):
        pytest.skip("a list of tokens that is made up names one token many times, and is refused")
    most = check_drafter_folder(own.kind.method, folder, target[1], has_weights=load_format != "dummy")
    llm = serve(target[1], {"load_format": load_format}, method=own.kind.method, model=str(folder), num_speculative_tokens=2)
    loaded = llm.engine.worker.drafter
    assert loaded is not None
    is_counted = own.kind is MEDUSA and load_format != "dummy"
    assert most == (None if is_counted else loaded.max_drafts)


@pytest.mark.parametrize("drafter", [KINDS[2], KINDS[6], KINDS[8]], ids=str, indirect=True)
def test_tokens_are_those_without_drafts(drafter: tuple[Drafter, Path], target: tuple[Any, Path]) -> None:
    check_tokens(target[1], drafter[0].kind.method, model=str(drafter[1]))


PATHS = [[0], [1], [3], [0, 0], [0, 2], [1, 0], [0, 2, 0], [0, 2, 1], [0, 2, 1, 0]]


@pytest.mark.parametrize("drafter", [KINDS[0], KINDS[3], KINDS[6], KINDS[9]], ids=str, indirect=True)
def test_trees_are_those_of_the_formulas(drafter: tuple[Drafter, Path], target: tuple[Any, Path]) -> None:
    """Medusa's, whose heads look at no drafts, and those of heads that do; and that they change no token."""
    own, folder = drafter
    method = {"method": own.kind.method, "model": str(folder)}
    llm = serve(target[1], **method, tree_paths=PATHS, accept_policy="reject_all", num_speculative_tokens=None)
    check_static(llm, own.after, PATHS)
    check_tree_tokens(target[1], **method, tree_nodes=20)


def test_more_drafts_than_heads(target: tuple[Any, Path], tmp_path: Path) -> None:
    """The server's own number is an error; a request's is a limit."""
    make(MEDUSA, tmp_path / "drafter", target[0])
    with pytest.raises(ConfigError, match=r"num_model_steps is 5; the drafter in .* makes 4 drafts a step at most: .* it is num_speculative_tokens$"):
        serve(target[1], method="medusa", model=str(tmp_path / "drafter"), num_speculative_tokens=5)
    with pytest.raises(ConfigError, match=r"num_model_steps is 5; the drafter in .* makes 4 drafts a step at most$"):
        serve(target[1], method="medusa", model=str(tmp_path / "drafter"), num_speculative_tokens=8, num_model_steps=5)
    read = next(kind for kind in KINDS if kind.method == "medusa" and not kind.file.endswith(".pt"))
    make(read, tmp_path / "read", target[0])
    with pytest.raises(ConfigError, match="makes 4 drafts a step at most"):  # before a server is started
        served_model.check_drafter(SpeculativeConfig(method="medusa", model=str(tmp_path / "read"), num_speculative_tokens=5), target[1])
    for other in ("auto", "suffix"):  # of which nobody said how many are the heads'
        llm = serve(target[1], method=other, request_methods=["medusa"], model=str(tmp_path / "drafter"), num_speculative_tokens=None)
        assert llm.generate("a", SamplingParams(max_tokens=12, temperature=0.0), speculative={"method": "medusa"})[0].outputs[0].stats.drafted
        llm.close()
    with pytest.raises(ConfigError, match=r"num_model_steps is 6; the drafter in .* makes 4 drafts a step at most$"):
        serve(target[1], method="auto", request_methods=["medusa"], model=str(tmp_path / "drafter"), num_speculative_tokens=8, num_model_steps=6)
    asked = SpeculativeConfig(method="medusa", model=str(tmp_path / "drafter"), num_speculative_tokens=4)
    assert served_model.check_drafter(asked, target[1]) == tmp_path / "drafter", "two heads by its config.json, four in the archive"
    llm = serve(target[1], method="medusa", model=str(tmp_path / "drafter"))
    (result,) = llm.generate(["x"], speculative={"num_speculative_tokens": 9}, use_tqdm=False)
    assert len(result.outputs[0].stats.accepted_per_position) == NUM_DRAFTS


def test_whether_heads_look_at_tokens_is_known_from_their_weights(target: tuple[Any, Path], tmp_path: Path) -> None:
    made = make(KINDS[5], tmp_path / "made", target[0])
    assert made.kind.config["grounded_heads"] is False
    check_drafter_folder("hydra", edited(tmp_path / "made", tmp_path / "drafter", grounded_heads=...), target[1])


def test_weights_that_all_drafts_share(target: tuple[Any, Path], tmp_path: Path) -> None:
    """A file may repeat them, which is no reason to take others for the same."""
    kind = KINDS[8]
    make(kind, tmp_path / "made", target[0])
    weights = load_file(tmp_path / "made" / "model.safetensors")
    for number, factor in enumerate((1.0, 2.0)):
        own = edited(tmp_path / "made", tmp_path / str(number))
        save_file(
            weights | {"emb.1.weight": weights["emb.0.weight"].clone(), "proj.2.weight": weights["proj.1.weight"] * factor}, own / "model.safetensors"
        )
        check_drafter_folder(kind.method, own, target[1])
    assert serve(target[1], method=kind.method, model=str(tmp_path / "0"))
    with pytest.raises(
        ModelError, match=r"tie_weights is true, and weight proj\.2\.weight is not proj\.1\.weight: say false, or take the weight out"
    ):
        serve(target[1], method=kind.method, model=str(tmp_path / "1"))


@pytest.mark.parametrize(
    ("number", "lacking"),
    [
        (0, ["1.0.linear.bias"]),
        (0, ["0.0.linear.bias", "3.0.linear.bias"]),
        (0, ["2.0.linear.weight", "3.1.weight"]),
        (3, ["hydra_mlp.2.0.res_connection.bias"]),
        (4, ["hydra_lm_head.1.bias"]),
    ],
    ids=str,
)
def test_weights_that_are_missing_are_all_named(number: int, lacking: list[str], target: tuple[Any, Path], tmp_path: Path) -> None:
    """Biases go together: a head without its own, beside others that have theirs, drafted without a word."""
    kind = KINDS[number]
    made = make(kind, folder := tmp_path / "drafter", target[0])
    is_archive = kind.file.endswith(".pt")
    weights = torch.load(folder / kind.file) if is_archive else load_file(folder / kind.file)
    left = {name: own for name, own in weights.items() if name not in lacking}
    torch.save(left, folder / kind.file) if is_archive else save_file(left, folder / kind.file)
    message = re.escape(f"{folder}: weight {', '.join(lacking)} is missing")
    with pytest.raises(ModelError, match=message):
        serve(target[1], method=made.kind.method, model=str(folder))
    if not is_archive:
        with pytest.raises(ModelError, match=message):
            check_drafter_folder(kind.method, folder, target[1])
    without = {name: own for name, own in weights.items() if not name.endswith(".bias")}
    torch.save(without, folder / kind.file) if is_archive else save_file(without, folder / kind.file)
    assert serve(target[1], method=made.kind.method, model=str(folder)), "none at all, as vLLM's have it"


def logits_of_chain(kind: Kind, folder: Path, target: Path) -> list[torch.Tensor]:
    """Of drafts 0 and 1 after two states, the drafts being any."""
    heads = load_heads(kind.method, folder, target, load(target), torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    states, tokens = torch.randn(2, HIDDEN, generator=generator), torch.tensor([3, 8])
    with torch.inference_mode():
        first = heads.begin(states, tokens)
        return [heads.logits(first, 0), heads.logits(heads.go_on(first, tokens + 1, 1), 1)]


@pytest.mark.parametrize("number", [1, 4, 7, 9], ids=lambda number: str(KINDS[number]))
def test_heads_in_few_bits(number: int, target: tuple[Any, Path], tmp_path: Path) -> None:
    """In a checkpoint that is quantized, as those of Model-Optimizer are, whole or but for some: as what the numbers stand for."""
    kind = KINDS[number]
    make(kind, folder := tmp_path / "drafter", target[0])
    weights = load_file(folder / "model.safetensors")
    last = max(name for name, own in weights.items() if own.dim() == 2)
    rounded = {name.removesuffix(".weight"): quantize(own, "wint8") for name, own in weights.items() if own.dim() == 2 and name != last}
    others = {name: own for name, own in weights.items() if name.removesuffix(".weight") not in rounded}
    (plain := tmp_path / "plain").mkdir()
    (plain / "config.json").write_text(json.dumps(kind.config))
    save_file(others | {f"{name}.weight": own.expand() for name, own in rounded.items()}, plain / "model.safetensors")
    parts = {f"{name}.{part}": own for name, stored in rounded.items() for part, own in _tensors_of(stored, "wint8").items()}
    save_file(others | parts, folder / "model.safetensors")
    said = _describe(dict.fromkeys(rounded, "wint8"), [last])
    (folder / "config.json").write_text(json.dumps(kind.config | {"quantization_config": said}))
    check_drafter_folder(kind.method, folder, target[1])
    assert find_method(folder) == kind.method
    for own, other in zip(logits_of_chain(kind, folder, target[1]), logits_of_chain(kind, plain, target[1]), strict=True):
        assert_close(own, other)
    lacking = next(name for name in parts if name.endswith("weight_scale"))
    save_file(others | {name: own for name, own in parts.items() if name != lacking}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"weight {re.escape(lacking)} is missing"):
        check_drafter_folder(kind.method, folder, target[1])


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("names", ["the authors'", "TensorRT-LLM's"])
def test_heads_beside_their_model(blocks: int, names: str, target: tuple[Any, Path], tmp_path: Path) -> None:
    """Model-Optimizer saves them with it, and its config.json is the model's."""
    kind = Kind("Medusa", "medusa", {"medusa_num_layers": blocks})
    weights, _ = make_medusa(kind.config)
    (alone := tmp_path / "alone").mkdir()
    (alone / "config.json").write_text(json.dumps(kind.config))
    save_file(weights, alone / "model.safetensors")
    if names != "the authors'":
        weights = {re.sub(r"^(\d+)\.(\d+)\.linear", r"\1.medusa_layers.\2.linear", name): own for name, own in weights.items()}
        weights = {re.sub(rf"^(\d+)\.{blocks}\.weight", r"\1.lm_head.weight", name): own for name, own in weights.items()}
    folder = edited(target[1], tmp_path / "both")
    save_file(
        load_file(target[1] / "model.safetensors") | {f"medusa_heads.{name}": own for name, own in weights.items()}, folder / "model.safetensors"
    )
    assert find_method(folder) == "medusa" and check_drafter_folder("medusa", folder, target[1]) == 4
    for own, other in zip(logits_of_chain(kind, folder, target[1]), logits_of_chain(kind, alone, target[1]), strict=True):
        assert torch.equal(own, other)
    assert check_model(folder).layers == check_model(target[1]).layers, "it is served with its heads beside"


REFUSED = [
    (1, {"num_hidden_layers": 1}, r"weight blocks\.0\.layers\.1\.weight would not be used: config.json does not say what it is for"),
    (4, {"hydra_num_layers": 1}, r"weight hydra_mlp\.0\.1\..* would not be used: config.json does not say what it is for"),
    (1, {"hidden_size": 48}, "hidden_size is 48; the target's is 64"),
    (1, {"vocab_size": 300}, "vocab_size is 300; the target's is 301"),
    (1, {"num_heads": 5}, r"weight blocks\.4\.layers\.0\.weight, .* is missing"),
    (2, {"truncated_vocab_size": 41}, r"lm_heads\.0\.weight has shape \(40, 64\); config.json makes it \(41, 64\)"),
    (4, {"hydra_head_arch": "eagle-attn"}, "hydra_head_arch 'eagle-attn' is not supported; known: mlp, prefix-mlp"),
    (4, {"grounded_heads": False}, r"hydra_mlp\.0\.0\.linear\.weight has shape \(64, 128\); config.json makes it \(64, 64\)"),
    (7, {"n_predict": 3}, "n_predict is 3; it must be 4, as many embeddings as the file has"),
    (1, {"original_lm_head": True}, r"weight lm_heads\.1\.weight would not be used"),
    (7, {"emb_dim": 32}, "emb_dim is 32; the target's is 64"),
    (7, {"num_lookahead_tokens": 5}, r"num_lookahead_tokens is 5; it must be n_predict \(4\) at most, since tie_weights is false"),
    (9, {"tie_lstm_embs": False}, "tie_lstm_embs is False; it must be true where method is sum_lstm"),
    (9, {"inner_dim": "24.24"}, r"inner_dim is '24\.24'; it must be one integer from 1 to 131072"),
    (9, {"proj_dim": 25}, r"proj_dim is 25; it must be inner_dim \(24\) where method is sum_lstm"),
    (9, {"input_hidden_dim": 32}, "input_hidden_dim is 32; the target's is 64"),
    (7, {"inner_dim": 25}, r"speculator\.emb\.0\.weight has shape \(301, 24\); config.json makes it \(301, 25\)"),
]


@pytest.mark.parametrize(("number", "values", "message"), REFUSED, ids=[f"{KINDS[i]}: {' '.join(values)}" for i, values, _ in REFUSED])
def test_what_is_refused_before_the_launch_and_at_load(
    number: int, values: dict[str, Any], message: str, target: tuple[Any, Path], tmp_path: Path
) -> None:
    kind = KINDS[number]
    make(kind, tmp_path / "made", target[0])
    own = edited(tmp_path / "made", tmp_path / "drafter", **values)
    with pytest.raises(ModelError, match=message):
        check_drafter_folder(kind.method, own, target[1])
    with pytest.raises(ModelError, match=message):
        serve(target[1], method=kind.method, model=str(own))
