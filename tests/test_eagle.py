"""EAGLE and EAGLE-3 drafters against a plain statement of their formulas, in each of the formats that they are published in."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from backend import SamplingParams
from backend.drafter_checks import check_drafter_folder, find_method, read_eagle_spec
from backend.errors import ModelError
from backend.model_checks import check_model
from deploy.served_model import check_model as check_launch
from tests.drafting import check_drafts, check_growth, check_static, check_tokens, check_tree_tokens, serve, watched
from tests.families import Case, edited, make_model, random_tokens
from tests.steps import make_sums_late

HIDDEN, HEADS, KV_HEADS, SIZE, INNER, VOCABULARY, DRAFT_VOCABULARY, NUM_LAYERS, EPS = 32, 4, 2, 64, 40, 302, 64, 8, 1e-5
TARGET = Case("llama", config={"num_hidden_layers": NUM_LAYERS, "head_dim": SIZE, "hidden_size": HIDDEN, "vocab_size": VOCABULARY})
LAYER = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "num_hidden_layers": 1,
    "rms_norm_eps": EPS,
    "rope_theta": 1000.0,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,  # of no consequence: yuhuili's say 2048 for any target
}


@dataclass(frozen=True)
class Kind:
    """A published way: what config.json says, and what it means."""

    name: str
    method: str = "eagle3"
    config: dict[str, Any] = field(default_factory=dict)
    is_speculators: bool = False
    type: str | None = None
    """speculators' name; None: that of the method."""
    layer: str = "midlayer"
    tapped: tuple[int, ...] = (2, 4, 5)
    """By what enters them."""
    num_layers: int = 1
    layer_config: dict[str, Any] = field(default_factory=dict)
    """What is said of layers beside their sizes."""
    windows: tuple[int | None, ...] = (None, None)
    """Of layers: tokens that each sees, itself with them."""
    is_norm_residual: bool = False
    has_map: bool = True
    has_head: bool = True
    has_embedding: bool = False
    has_head_norms: bool = False
    prefix: str = ""
    file: str = "model.safetensors"

    @property
    def mask_token_id(self) -> int | None:
        """Of parallel drafting."""
        return next((self.config[key] for key in ("mask_token_id", "ptd_token_id") if key in self.config), None)

    def __str__(self) -> str:
        return self.name


PARALLEL = {"draft_vocab_size": DRAFT_VOCABULARY, "mask_token_id": 300}
EAGLE3 = Kind("SpecForge", config={"draft_vocab_size": DRAFT_VOCABULARY})
IDS = "eagle_aux_hidden_state_layer_ids"
KINDS = [
    EAGLE3,
    Kind("the authors', an archive", config=EAGLE3.config, file="pytorch_model.bin"),
    Kind("speculators", config=EAGLE3.config, is_speculators=True, layer="layers.0", is_norm_residual=True, has_embedding=True),
    Kind("speculators, own layers", config={IDS: [1, 3, 8], "norm_before_residual": False}, is_speculators=True, tapped=(1, 3, 8), has_map=False),
    Kind("outputs of layers", config={"eagle_config": {IDS: [0, 6]}}, tapped=(1, 7), has_map=False, prefix="model."),
    Kind("the usual ones as outputs", config={IDS: [1, 3, 4]}, has_map=False),
    Kind("3.1", config={"fc_norm": True, "norm_output": True}, has_map=False),
    Kind("norm before fc, two layers", config={"eagle_config": {"norm_before_fc": True}, "logit_scale": 0.5}, num_layers=2, has_map=False),
    Kind("P-EAGLE of speculators", config=PARALLEL, is_speculators=True, type="peagle", num_layers=2, layer="layers.0", has_embedding=True),
    # As of a target of six layers, whose usual choice has one of them twice.
    Kind(
        "P-EAGLE, norms, one layer twice",
        config={"ptd_token_id": 7, "fc_norm": True, "norm_output": True, IDS: [1, 4, 4]},
        has_map=False,
        tapped=(2, 5, 5),
    ),
    Kind("EAGLE", method="eagle", layer="layers.0", tapped=(), has_map=False),
    Kind("EAGLE, two layers, HASS", method="eagle", config={"add_para_norm": True}, layer="layers.0", tapped=(), num_layers=2, has_map=False),
    Kind("EAGLE of speculators", method="eagle", layer="transformer", tapped=(), is_speculators=True, has_map=False),
    Kind("of ModelOpt", config={"eagle_config": {IDS: [], "use_aux_hidden_state": True}}, has_map=False),
    Kind("the target's head", config={"logit_scale": 0.5}, has_map=False, has_head=False),
    Kind("3.1 in SGLang's older names", config={"use_aux_norm": True, "norm_output": True}, has_map=False),
    Kind("DeepSeek's", config={"target_layer_ids": [1, 3, 4, 7]}, layer="layers.0", tapped=(2, 4, 5, 8), has_map=False, has_head_norms=True),
]
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWED = [
    Kind("a window", config=EAGLE3.config, layer_config={"layer_types": [SLIDING], "sliding_window": 7}, windows=(7,)),
    Kind(
        "windows of speculators",
        config=EAGLE3.config,
        is_speculators=True,
        layer="layers.0",
        is_norm_residual=True,
        has_embedding=True,
        num_layers=2,
        layer_config={"layer_types": [FULL, SLIDING], "sliding_window": 38},
        windows=(None, 38),
    ),
    Kind(
        "a window of Qwen's",
        has_map=False,
        layer_config={"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 2, "max_window_layers": 0},
        windows=(2,),
    ),
    Kind("a window larger than the context", has_map=False, layer_config={"layer_types": [SLIDING], "sliding_window": 9999}, windows=(9999,)),
    Kind(
        "P-EAGLE, a window smaller than its masks",
        config=PARALLEL,
        is_speculators=True,
        type="peagle",
        num_layers=2,
        layer="layers.0",
        has_embedding=True,
        layer_config={"layer_types": [SLIDING, FULL], "sliding_window": 2},
        windows=(2, None),
    ),
    Kind(
        "EAGLE, a window",
        method="eagle",
        layer="layers.0",
        tapped=(),
        num_layers=2,
        has_map=False,
        layer_config={"layer_types": [SLIDING, FULL], "sliding_window": 5},
        windows=(5, None),
    ),
]


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def turn(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [T, heads, SIZE] at positions 0 to T - 1."""
    frequencies = 1000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
    angles = torch.arange(len(x))[:, None, None] * torch.cat([frequencies, frequencies])
    half = torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], dim=-1)
    return x * angles.cos() + half * angles.sin()


@dataclass
class Drafter:
    kind: Kind
    weights: dict[str, torch.Tensor]
    """By name without the prefix; the first layer under `midlayer`."""
    model: Any

    def layer(self, name: str, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The published layer over pairs of a token and the state before it; `attended` [T, in] is zero for the first token, which is in no pair."""
        own = {key.removeprefix(f"{name}."): weight for key, weight in self.weights.items() if key.startswith(f"{name}.")}
        count = len(x)
        q, k, v = (F.linear(attended, own[f"self_attn.{part}_proj.weight"]).view(count, -1, SIZE) for part in "qkv")
        if self.kind.has_head_norms:
            q, k = norm(q, own["self_attn.q_norm.weight"]), norm(k, own["self_attn.k_norm.weight"])
        q, k = turn(q), turn(k)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(SIZE)
        window = self.kind.windows[0 if name == "midlayer" else int(name.removeprefix("layers."))] or count
        seen = torch.tensor([[own - window < place <= own for place in range(count)] for own in range(count)])
        scores = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        x = x + F.linear(torch.einsum("hqk,khd->qhd", scores, v).reshape(count, -1), own["self_attn.o_proj.weight"])
        y = norm(x, own["post_attention_layernorm.weight"])
        y = F.silu(F.linear(y, own["mlp.gate_proj.weight"])) * F.linear(y, own["mlp.up_proj.weight"])
        return x + F.linear(y, own["mlp.down_proj.weight"])

    def states(self, token_ids: list[int], previous: torch.Tensor) -> torch.Tensor:
        own, kind = self.weights, self.kind
        embeddings = own["embed_tokens.weight"] if kind.has_embedding else self.model.model.embed_tokens.weight
        embedded = embeddings[torch.tensor(token_ids)]
        is_first = (torch.arange(len(token_ids)) == 0)[:, None]
        if kind.method == "eagle3":
            state = norm(previous, own["midlayer.hidden_norm.weight"])
            pair = torch.cat([norm(embedded, own["midlayer.input_layernorm.weight"]), state], dim=-1)
            x = self.layer("midlayer", state if kind.is_norm_residual else previous, pair.masked_fill(is_first, 0))
        else:
            if "add_para_norm" in kind.config:
                embedded = norm(embedded, own["embedding_layernorm.weight"])
                previous = norm(previous, own["hidden_states_layernorm.weight"])
            x = F.linear(torch.cat([embedded, previous], dim=-1), own["fc.weight"], own.get("fc.bias"))
            x = self.layer("midlayer", x, x.masked_fill(is_first, 0))
        for number in range(1, kind.num_layers):
            x = self.layer(f"layers.{number}", x, norm(x, own[f"layers.{number}.input_layernorm.weight"]))
        return norm(x, own["norm.weight"]) if kind.config.get("norm_output") else x

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        kind, own = self.kind, self.weights
        if kind.method == "eagle":
            return self.model.lm_head(states)
        x = states if kind.config.get("norm_output") else norm(states, own["norm.weight"])
        found = F.linear(x, own["lm_head.weight"] if kind.has_head else self.model.lm_head.weight) * kind.config.get("logit_scale", 1.0)
        if not kind.has_map:
            return found
        whole = torch.full((VOCABULARY,), float("-inf"))
        for i, score in enumerate(found):
            whole[i + int(own["d2t"][i])] = score
        return whole

    def condense(self, token_ids: list[int]) -> torch.Tensor:
        """What the drafter takes of the target's states."""
        found = self.model.model(torch.tensor([token_ids]), use_cache=False, output_hidden_states=True)
        if self.kind.method == "eagle":
            return found.last_hidden_state[0]
        # transformers' last entry is the state after the final norm.
        outputs: list[torch.Tensor] = []
        handle = self.model.model.layers[-1].register_forward_hook(lambda _, __, output: outputs.append(output))
        self.model.model(torch.tensor([token_ids]), use_cache=False)
        handle.remove()
        last = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
        entering = [*(state[0] for state in found.hidden_states[:-1]), last[0] if last.ndim == 3 else last]
        return self.join([entering[number] for number in self.kind.tapped])

    def join(self, states: list[torch.Tensor]) -> torch.Tensor:
        """fc of the tapped states [T, hidden] each."""
        own, config = self.weights, self.kind.config
        if config.get("fc_norm") or config.get("use_aux_norm"):
            states = [norm(state, own[f"fc_norm.{i}.weight"]) for i, state in enumerate(states)]
        joined = torch.cat(states, dim=-1)
        if config.get("eagle_config", {}).get("norm_before_fc"):
            joined = norm(joined, own["input_norm.weight"])
        return F.linear(joined, own["fc.weight"])

    @torch.inference_mode()
    def draft(self, token_ids: list[int], count: int) -> list[torch.Tensor]:
        previous = torch.cat([torch.zeros(1, HIDDEN), self.condense(token_ids[:-1])])
        tokens, logits = list(token_ids), []
        if (mask := self.kind.mask_token_id) is not None:  # one pass over masks in the place of the drafts
            state = self.join(list(self.weights["mask_hidden"].view(len(self.kind.tapped), 1, HIDDEN)))
            states = self.states([*tokens, *[mask] * (count - 1)], torch.cat([previous, *[state] * (count - 1)]))
            return [self.logits(state) for state in states[-count:]]
        for _ in range(count):
            newest = self.states(tokens, previous)[-1:]
            logits.append(self.logits(newest[0]))
            tokens.append(int(logits[-1].argmax()))
            previous = torch.cat([previous, newest])
        return logits

    @torch.inference_mode()
    def after(self, token_ids: list[int], drafts: list[int]) -> torch.Tensor:
        """The logits after drafts."""
        previous, tokens = torch.cat([torch.zeros(1, HIDDEN), self.condense(token_ids[:-1])]), list(token_ids)
        for draft in drafts:
            previous = torch.cat([previous, self.states(tokens, previous)[-1:]])
            tokens.append(draft)
        return self.logits(self.states(tokens, previous)[-1])


def make_weights(kind: Kind) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.2

    def scale(size: int) -> torch.Tensor:
        return torch.rand(size, generator=generator) + 0.5

    is_third, made = kind.method == "eagle3", {}
    for number in range(kind.num_layers):
        name, width = f"layers.{number}" if number else "midlayer", 2 * HIDDEN if is_third and not number else HIDDEN
        sizes = {"q": HEADS * SIZE, "k": KV_HEADS * SIZE, "v": KV_HEADS * SIZE}
        made |= {f"{name}.self_attn.{part}_proj.weight": matrix(rows, width) for part, rows in sizes.items()}
        made[f"{name}.self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * SIZE) * 0.3
        made |= {f"{name}.mlp.{part}_proj.weight": matrix(INNER, HIDDEN) for part in ("gate", "up")}
        made[f"{name}.mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        made[f"{name}.post_attention_layernorm.weight"] = scale(HIDDEN)
        if kind.has_head_norms:
            made |= {f"{name}.self_attn.{part}_norm.weight": scale(SIZE) for part in "qk"}
        if is_third or number:
            made[f"{name}.input_layernorm.weight"] = scale(HIDDEN)
    made["fc.weight"] = matrix(HIDDEN, len(kind.tapped) * HIDDEN if is_third else 2 * HIDDEN)
    if not is_third:
        made["fc.bias"] = matrix(1, HIDDEN)[0]
        if "add_para_norm" in kind.config:
            made |= {f"{name}_layernorm.weight": scale(HIDDEN) for name in ("embedding", "hidden_states")}
        return made
    made |= {"midlayer.hidden_norm.weight": scale(HIDDEN), "norm.weight": scale(HIDDEN)}
    if kind.has_head:
        made["lm_head.weight"] = matrix(DRAFT_VOCABULARY if kind.has_map else VOCABULARY, HIDDEN)
    if kind.mask_token_id is not None:
        shape = (1, 1) if kind.type else (1,)
        made["mask_hidden"] = torch.randn(*shape, len(kind.tapped) * HIDDEN, generator=generator)
    if kind.config.get("fc_norm") or kind.config.get("use_aux_norm"):
        made |= {f"fc_norm.{i}.weight": scale(HIDDEN) for i in range(len(kind.tapped))}
    if kind.config.get("eagle_config", {}).get("norm_before_fc"):
        made["input_norm.weight"] = scale(len(kind.tapped) * HIDDEN)
    if kind.has_embedding:
        made["embed_tokens.weight"] = matrix(VOCABULARY, HIDDEN) * 2
    if kind.has_map:
        ids = torch.randperm(VOCABULARY, generator=generator)[:DRAFT_VOCABULARY].sort().values
        made["d2t"] = ids - torch.arange(DRAFT_VOCABULARY)
        made["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, ids, True)
    return made


def save_drafter(kind: Kind, weights: dict[str, torch.Tensor], folder: Path) -> None:
    folder.mkdir()
    if kind.is_speculators:
        layer = {**LAYER, **kind.layer_config}
        config = {"speculators_model_type": kind.type or kind.method, "transformer_layer_config": layer, **kind.config}
    else:
        config = {"architectures": ["LlamaForCausalLMEagle3"], **LAYER, **kind.layer_config, **kind.config}
    (config["transformer_layer_config"] if kind.is_speculators else config)["num_hidden_layers"] = kind.num_layers
    (folder / "config.json").write_text(json.dumps(config))
    whole = ("d2t", "t2d", "lm_head.weight")
    stored = {name if name in whole else kind.prefix + name.replace("midlayer", kind.layer): weight for name, weight in weights.items()}
    if "use_aux_norm" in kind.config:
        older = {f"fc_norm.{i}.weight": f"aux_norm_{name}.weight" for i, name in enumerate(("low", "mid", "high"))}
        stored = {older.get(name, name): weight for name, weight in stored.items()}
    if kind.layer == "transformer":
        stored = {name.replace("fc.", "fusion_fc."): weight for name, weight in stored.items()}
    if kind.file.endswith(".bin"):
        torch.save(stored, folder / kind.file)
    else:
        save_file(stored, folder / kind.file)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("target")
    return make_model(TARGET, folder), folder


@pytest.fixture(scope="module", params=[*KINDS, *WINDOWED], ids=str)
def drafter(request: pytest.FixtureRequest, target: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Drafter, Path]:
    kind, folder = request.param, tmp_path_factory.mktemp("drafter") / "drafter"
    weights = make_weights(kind)
    save_drafter(kind, weights, folder)
    return Drafter(kind, weights, target[0]), folder


def test_a_folder_says_its_method(drafter: tuple[Drafter, Path]) -> None:
    own, folder = drafter
    assert find_method(folder) == own.kind.method


@pytest.mark.parametrize("number", [1, 10, 11], ids=lambda number: str(KINDS[number]))
def test_an_archive_says_its_method(number: int, tmp_path: Path) -> None:
    """By its names alone, where it has its target's class, as the authors' has: nothing of it is run."""
    kind = replace(KINDS[number], file="pytorch_model.bin")
    save_drafter(kind, make_weights(kind), tmp_path / "made")
    own = edited(tmp_path / "made", tmp_path / "drafter", architectures=["LlamaForCausalLM"], draft_vocab_size=..., add_para_norm=...)
    assert find_method(own) == kind.method
    (own / "pytorch_model.bin").write_bytes((own / "pytorch_model.bin").read_bytes()[:-40])
    with pytest.raises(ModelError, match=r"no names of weights in pytorch_model\.bin"):
        find_method(own)


@pytest.mark.parametrize("policy", ["reject_all", "accept_all"])
def test_drafts_are_those_of_the_formulas(policy: str, drafter: tuple[Drafter, Path], target: tuple[Any, Path]) -> None:
    own, folder = drafter
    check_drafter_folder(own.kind.method, folder, target[1])
    check_drafts(serve(target[1], method=own.kind.method, model=str(folder), accept_policy=policy), own.draft, policy)


@pytest.mark.parametrize("drafter", [KINDS[2], KINDS[7], KINDS[8], KINDS[11], WINDOWED[0], WINDOWED[4]], ids=str, indirect=True)
def test_tokens_are_those_without_drafts(drafter: tuple[Drafter, Path], target: tuple[Any, Path]) -> None:
    check_tokens(target[1], drafter[0].kind.method, model=str(drafter[1]))


@pytest.mark.parametrize("drafter", [EAGLE3], ids=str, indirect=True)
def test_states_are_tapped_when_their_sums_are_there(
    drafter: tuple[Drafter, Path], target: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = make_sums_late(monkeypatch)
    check_drafts(serve(target[1], method="eagle3", model=str(drafter[1]), accept_policy="accept_all"), drafter[0].draft, "accept_all")
    assert counts


@pytest.mark.parametrize("policy", [{}, {"mtp_strategy": "with_ngram"}], ids=str)
def test_scores_that_are_no_numbers(policy: dict[str, Any], folder: Path, target: tuple[Any, Path], tmp_path: Path) -> None:
    """As of a drafter that overflows: they cost it its drafts, and nobody the answer."""
    own = edited(folder, tmp_path / "drafter")
    weights = load_file(own / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["lm_head.weight"] * float("nan")}, own / "model.safetensors")
    check_tokens(target[1], "eagle3", model=str(own), **policy)


@pytest.mark.parametrize("tree", [{"tree_nodes": 16}, {"tree_paths": [[0], [1], [0, 0], [0, 0, 0]], "num_speculative_tokens": None}], ids=str)
@pytest.mark.parametrize("depth", [1, 2])
def test_scores_in_a_tree_that_are_no_numbers(depth: int, tree: dict[str, Any], folder: Path, target: tuple[Any, Path]) -> None:
    """From a level on: sorted, they would come before the drafts that they follow, and one drafter's overflow would end everybody's step."""
    prompts, params = [{"prompt_token_ids": random_tokens(20)}], SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    llm = serve(target[1], method="eagle3", model=str(folder), **tree)
    drafter = llm.engine.worker.drafter
    assert drafter is not None
    own = drafter.logits
    drafter.logits = lambda states, step: own(states, step) * (float("nan") if step >= depth else 1.0)  # type: ignore[method-assign]
    answers = [llm.generate(prompts, params, speculative=choice, use_tqdm=False)[0].outputs[0] for choice in (None, {"method": "none"})]
    assert answers[0].token_ids == answers[1].token_ids and answers[0].stats.drafted > 0


PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 1, 0], [0, 1, 2], [1, 0, 0]]


@pytest.mark.parametrize("drafter", [KINDS[2], KINDS[7], KINDS[10], WINDOWED[0], WINDOWED[5]], ids=str, indirect=True)
def test_trees_are_those_of_the_formulas(drafter: tuple[Drafter, Path], target: tuple[Any, Path]) -> None:
    """Of given paths, and grown by EAGLE-2's rule; and that they change no token."""
    own, folder = drafter
    method = {"method": own.kind.method, "model": str(folder)}
    check_static(serve(target[1], **method, tree_paths=PATHS, accept_policy="reject_all", num_speculative_tokens=None), own.after, PATHS)
    llm = serve(target[1], **method, tree_nodes=11, tree_top_k=3, accept_policy="reject_all")
    check_growth(llm, own.after, 4, 3, 11)
    check_tree_tokens(target[1], **method, tree_nodes=16)


# -- what is no drafter of this target --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("drafter") / "drafter"
    save_drafter(EAGLE3, make_weights(EAGLE3), made)
    return made


REFUSED = [
    ({"hidden_size": 48}, r"hidden_size is 48; the target's is 32"),
    ({"target_hidden_size": 64}, r"target_hidden_size is 64; the target's is 32"),
    ({"vocab_size": 300}, r"vocab_size is 300; the target's is 302"),
    ({"draft_vocab_size": 303}, r"draft_vocab_size is 303; it must be an integer from 1 to 302"),
    ({"fc_norm": True, "norm_before_fc": True}, r"fc_norm is True; it must be false where norm_before_fc is true"),
    ({IDS: [1, 2, 9]}, rf"{IDS} is \[1, 2, 9\]; it must be a list of layers of the target, which has 8"),
    ({"target_layer_ids": [1, 2, 8]}, r"target_layer_ids is \[1, 2, 8\]; it must be a list of layers of the target, which has 8"),
    ({"aux_hidden_states_layer_ids": [8]}, r"aux_hidden_states_layer_ids is \[8\]; it must be a list of layers of the target, which has 8"),
    ({"num_target_layers": 9}, "num_target_layers is 9; it must be 8, as many as the target has"),
    ({"eagle_config": {"num_target_layers": 6}}, "num_target_layers is 6; it must be 8, as many as the target has"),
    ({"layer_types": [SLIDING]}, "sliding_window is None; it must be an integer where layer_types has sliding_attention"),
    ({"layer_types": [SLIDING], "sliding_window": 2.5}, "sliding_window is 2.5; it must be an integer from 1 to 16777216"),
    ({"layer_types": ["chunked_attention"]}, r"layer_types\[0\] is 'chunked_attention'; it must be one of full_attention, sliding_attention"),
    (
        {"model_type": "qwen3", "layer_types": [SLIDING], "sliding_window": 8},
        "use_sliding_window is None; it must be true where layer_types has sliding_attention",
    ),
    ({IDS: [1, 2, 3], "num_aux_hidden_states": 4}, "num_aux_hidden_states is 4; it must be 3"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False; it must be true"),
    ({"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash'; it must be 'eagle3' or 'peagle' with this method"),
    (
        {"transformer_layer_config": LAYER},
        "speculators_model_type is None; it must be 'eagle3' or 'peagle', where there is a transformer_layer_config",
    ),
    ({"intermediate_size": 41}, r"midlayer\.mlp\.gate_proj\.weight has shape \(40, 32\); config.json makes it \(41, 32\)"),
    ({"norm_before_fc": True}, r"weight input_norm\.weight is missing"),
    ({"quantization_config": {"quant_method": "hqq"}}, "hqq"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[" ".join(values) for values, _ in REFUSED])
def test_what_is_refused_before_the_launch_and_at_load(
    values: dict[str, Any], message: str, folder: Path, target: tuple[Any, Path], tmp_path: Path
) -> None:
    own = edited(folder, tmp_path / "drafter", **values)
    with pytest.raises(ModelError, match=message):
        check_drafter_folder("eagle3", own, target[1])
    with pytest.raises(ModelError, match=message):
        serve(target[1], method="eagle3", model=str(own))


def test_ids_of_special_tokens_and_layers_that_are_the_targets(folder: Path, target: tuple[Any, Path], tmp_path: Path) -> None:
    """What drafters' authors leave in config.json from other models says nothing about the drafter, and vicuna-33b's EAGLE has no length."""
    kept = {"bos_token_id": VOCABULARY + 9, "eos_token_id": [-1], "layer_types": ["sliding_attention"] * NUM_LAYERS, "max_position_embeddings": ...}
    check_drafter_folder("eagle3", edited(folder, tmp_path / "drafter", **kept), target[1])


def test_a_drafter_for_the_model(target: tuple[Any, Path], tmp_path: Path) -> None:
    """As `vllm serve` takes it."""
    save_drafter(KINDS[2], make_weights(KINDS[2]), tmp_path / "drafter")
    message = r"drafter is a drafter \(speculators_model_type 'eagle3'\), not a model: serve the model that it was made for, and name this folder"
    with pytest.raises(ModelError, match=message):
        check_model(tmp_path / "drafter")
    with pytest.raises(ModelError, match=message):  # and not that it has no tokenizer
        check_launch(str(tmp_path / "drafter"))


def test_a_state_for_mask_tokens_and_no_such_token(target: tuple[Any, Path], tmp_path: Path) -> None:
    """SpecForge's P-EAGLE: config.json does not name the token, and drafts made one after the other would be worse without a word."""
    kind = Kind("P-EAGLE", config={"mask_token_id": 7}, has_map=False)
    save_drafter(kind, make_weights(kind), tmp_path / "made")
    own = edited(tmp_path / "made", tmp_path / "drafter", mask_token_id=...)
    message = r"config\.json names no mask token \(.*\), and weight mask_hidden says that drafts are made in parallel: add the one"
    with pytest.raises(ModelError, match=message):
        check_drafter_folder("eagle3", own, target[1])
    with pytest.raises(ModelError, match=message):
        serve(target[1], method="eagle3", model=str(own))
    check_drafter_folder("eagle3", own, target[1], is_parallel=False)


def test_parallel_drafting_of_a_drafter_that_was_not_made_for_it(folder: Path, target: tuple[Any, Path], tmp_path: Path) -> None:
    """With a mask token, but no state for it, drafts are made one after the other, unless the configuration says otherwise."""
    with pytest.raises(ModelError, match=r"config\.json names no mask token"):
        check_drafter_folder("eagle3", folder, target[1], is_parallel=True)
    own = edited(folder, tmp_path / "drafter", mask_token_id=5)
    with pytest.raises(ModelError, match="weight mask_hidden is missing: drafts are made in parallel by drafters that were trained for it"):
        serve(target[1], method="p-eagle", model=str(own))
    assert serve(target[1], method="eagle3", model=str(own)).engine.worker.drafter.block is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda mask: mask, ""),
        (lambda mask: mask.roll(1), rf"weight t2d has \d+ of {VOCABULARY} tokens otherwise than the drafter's ids"),
        (lambda mask: mask[:-2], rf"weight t2d has shape \({VOCABULARY - 2},\); the target has {VOCABULARY} tokens"),
    ],
    ids=["right", "other tokens", "another vocabulary"],
)
def test_a_mask_that_contradicts_the_map(
    change: Callable[[torch.Tensor], torch.Tensor],
    message: str,
    folder: Path,
    target: tuple[Any, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The map alone is used: it is said that one of the two is another drafter's."""
    own = edited(folder, tmp_path / "drafter")
    weights = load_file(own / "model.safetensors")
    save_file(weights | {"t2d": change(weights["t2d"]).contiguous()}, own / "model.safetensors")
    serve(target[1], method="eagle3", model=str(own))
    assert re.search(rf"{own}/model.safetensors: {message}", caplog.text) if message else "t2d" not in caplog.text


@pytest.mark.parametrize(
    ("offsets", "message"),
    [(torch.arange(64) * 5, "token ids from 0 to 378, 0 of them twice; the target has ids 0 to 301"), (-torch.arange(64), "63 of them twice")],
)
def test_a_map_of_another_vocabulary(offsets: torch.Tensor, message: str, folder: Path, target: tuple[Any, Path], tmp_path: Path) -> None:
    own = edited(folder, tmp_path / "drafter")
    save_file(load_file(own / "model.safetensors") | {"d2t": offsets.contiguous()}, own / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        serve(target[1], method="eagle3", model=str(own))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("d2t", None, "weight d2t is missing"),
        ("lm_head.weight", None, "weight lm_head.weight is missing"),
        ("d2t", torch.zeros(63, dtype=torch.int64), r"weight d2t has shape \(63,\); config.json makes it \(64,\)"),
        ("d2t", torch.zeros(64), "weight d2t is of dtype (F32; known: I64, I32|float32; known: int64, int32)"),
        ("norm.weight", torch.ones(HIDDEN, dtype=torch.int32), "weight norm.weight is of dtype (I32|int32); known: "),
        ("lm_head.weight", torch.ones(64, HIDDEN).to(torch.float8_e4m3fn), "weight lm_head.weight is of dtype (F8_E4M3|float8_e4m3fn); known: "),
    ],
    ids=["no map", "no head", "a shorter map", "a map of floats", "integers", "codes"],
)
def test_tensors_of_another_type(
    name: str, tensor: torch.Tensor | None, message: str, folder: Path, target: tuple[Any, Path], tmp_path: Path
) -> None:
    """Named before the launch, where the folder is one of safetensors, and at load."""
    own = edited(folder, tmp_path / "drafter")
    weights = load_file(own / "model.safetensors")
    weights = {**weights, name: tensor} if tensor is not None else {key: weight for key, weight in weights.items() if key != name}
    save_file(weights, own / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        check_drafter_folder("eagle3", own, target[1])
    with pytest.raises(ModelError, match=message):
        serve(target[1], method="eagle3", model=str(own))
    (own / "model.safetensors").unlink()
    torch.save(weights, own / "pytorch_model.bin")
    with pytest.raises(ModelError, match=message):
        serve(target[1], method="eagle3", model=str(own))


def test_weights_of_more_layers_than_it_says(target: tuple[Any, Path], tmp_path: Path) -> None:
    kind = KINDS[7]
    save_drafter(kind, make_weights(kind), tmp_path / "made")
    own = edited(tmp_path / "made", tmp_path / "drafter", num_hidden_layers=1)
    message = r"config\.json: weight layers\.1\..* would not be used: num_hidden_layers is 1"
    with pytest.raises(ModelError, match=message):
        check_drafter_folder("eagle3", own, target[1])
    with pytest.raises(ModelError, match=message):
        serve(target[1], method="eagle3", model=str(own))


@pytest.mark.parametrize(
    ("number", "config", "name"),
    [
        (6, {"fc_norm": False}, "fc_norm.0.weight"),
        (15, {"use_aux_norm": False}, "aux_norm_high.weight"),
        (7, {"eagle_config": {}}, "input_norm.weight"),
        (11, {"add_para_norm": False}, "embedding_layernorm.weight"),
        (0, {}, "midlayer.self_attn.sinks"),
        (9, {}, "layers.0.post_feedforward_layernorm.weight"),
    ],
    ids=str,
)
def test_weights_that_config_json_does_not_speak_of(number: int, config: dict[str, Any], name: str, target: tuple[Any, Path], tmp_path: Path) -> None:
    """Also of an archive, which is not looked into before the load."""
    kind = KINDS[number]
    save_drafter(kind, make_weights(kind) | {name: torch.ones(HIDDEN)}, tmp_path / "made")
    own = edited(tmp_path / "made", tmp_path / "drafter", **config)
    message = rf"weight {name.replace('.', r'[.]')} would not be used: config.json does not say what it is for"
    with pytest.raises(ModelError, match=message):
        check_drafter_folder(kind.method, own, target[1])
    torch.save(load_file(own / "model.safetensors"), own / "pytorch_model.bin")
    (own / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=message):
        serve(target[1], method=kind.method, model=str(own))


def test_a_map_of_all_tokens(target: tuple[Any, Path], tmp_path: Path) -> None:
    """Of a drafter that has as many as the target, in another order: backwards."""
    kind, seen = KINDS[6], []
    for number, offsets in enumerate((torch.zeros(VOCABULARY), VOCABULARY - 1 - 2 * torch.arange(VOCABULARY))):
        save_drafter(kind, make_weights(kind) | {"d2t": offsets.long()}, tmp_path / str(number))
        llm = serve(target[1], method="eagle3", model=str(tmp_path / str(number)))
        seen.append(watched(llm))
        llm.generate([{"prompt_token_ids": random_tokens(9)}], SamplingParams(max_tokens=3, temperature=0.0), use_tqdm=False)
    assert torch.equal(seen[0][0], seen[1][0].flip(-1))


def test_an_archive_that_is_none(folder: Path, target: tuple[Any, Path], tmp_path: Path) -> None:
    own = edited(folder, tmp_path / "drafter")
    (own / "model.safetensors").rename(own / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin cannot be read as an archive of tensors"):
        serve(target[1], method="eagle3", model=str(own))


@pytest.mark.parametrize("kind", [KINDS[2], KINDS[4], KINDS[12]], ids=str)
def test_names_are_found_however_weights_are_stored(kind: Kind, tmp_path: Path) -> None:
    save_drafter(kind, make_weights(kind), tmp_path / "drafter")
    sizes = {"is_multi_layer": kind.method == "eagle3", "hidden_size": HIDDEN, "vocab_size": VOCABULARY, "num_layers": NUM_LAYERS}
    names = list(load_file(tmp_path / "drafter" / "model.safetensors"))
    packed = [f"{name}_packed" if name.endswith(("_proj.weight", "fc.weight")) else name for name in names]
    assert read_eagle_spec(tmp_path / "drafter", packed, **sizes) == read_eagle_spec(tmp_path / "drafter", names, **sizes)
