"""Drafters in their models' own checkpoints, against a statement of the formulas of their own: norms, order, which state goes on.

A module's decoder layer is transformers' layer past those that the model has.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from backend import LLM, SamplingParams
from backend.drafter_checks import find_method
from backend.errors import ConfigError, ModelError
from backend.model_checks import check_drafter, check_model, find_drafter_folder
from deploy.served_model import check_drafter as check_before_launch
from tests.drafting import check_drafts, check_tokens, watched
from tests.drafting import serve as serve_drafter
from tests.families import Case, edited, expected_logits, make_model, random_tokens
from tests.test_latents import DEEPSEEK
from tests.test_mixtures import ERNIE, EXPERTS, GLM

NUM_LAYERS = 2
DEEPSEEK_NAMES = ("model.layers.{layer}.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
MIMO_NAMES = ("model.mtp_layers.{module}.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
NEXT_NAMES = ("mtp.layers.{module}.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
ERNIE_NAMES = ("model.mtp_block.{module}.", "model.mtp_emb_norm.{module}", "model.mtp_hidden_norm.{module}", "model.mtp_linear_proj.{module}", "")


@dataclass(frozen=True)
class Own:
    """A family's way: where its modules are, in which order the projection takes what, whether the norm's result goes on."""

    case: Case
    names: tuple[str, ...]
    """Of a module's layer; of embedding's norm, state's norm, projection and last norm, within it or whole; "": the model's own last norm."""
    num_modules: int = 1
    is_hidden_first: bool = False
    is_norm_recycled: bool = False
    architecture: str | None = None
    """In place of transformers'."""
    is_first_masked: bool = True
    key: str = "num_nextn_predict_layers"

    def __str__(self) -> str:
        return f"{self.architecture or self.case.family}, {self.num_modules}"


OWN = [
    Own(Case("glm4_moe", config=GLM), DEEPSEEK_NAMES),
    Own(Case("glm4_moe", config=GLM | {"num_key_value_heads": 4}), DEEPSEEK_NAMES, num_modules=3),
    Own(Case("ernie4_5_moe", config=ERNIE | {"moe_layer_end_index": 1}), ERNIE_NAMES),
    Own(Case("ernie4_5_moe", config=ERNIE | {"moe_layer_end_index": 1, "use_bias": True}), ERNIE_NAMES, num_modules=2),
    Own(Case("deepseek_v3", config=DEEPSEEK), DEEPSEEK_NAMES, is_norm_recycled=True),
    Own(Case("deepseek_v3", config=DEEPSEEK | {"q_lora_rank": None}), DEEPSEEK_NAMES, num_modules=2, is_norm_recycled=True),
    Own(Case("qwen2"), MIMO_NAMES, is_hidden_first=True, is_norm_recycled=True, architecture="MiMoForCausalLM"),
    Own(Case("qwen2"), MIMO_NAMES, num_modules=2, is_hidden_first=True, is_norm_recycled=True, architecture="MiMoForCausalLM"),
    Own(Case("qwen3", config={"head_dim": 16}), NEXT_NAMES, is_norm_recycled=True, is_first_masked=False, key="mtp_num_hidden_layers"),
    Own(Case("qwen3_moe", config=EXPERTS), NEXT_NAMES, is_norm_recycled=True, is_first_masked=False, key="num_mtp_layers"),
]


@dataclass
class Modules:
    """A model of transformers, whose layers past NUM_LAYERS are the modules', and the other weights of those."""

    own: Own
    model: Any
    layers: list[Any]
    weights: list[dict[str, torch.Tensor]]

    def logits(self, module: int, states: torch.Tensor) -> torch.Tensor:
        own = self.weights[module]
        return self.model.lm_head(states if self.own.is_norm_recycled else self._norm(states, own["norm"]))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.model.config.rms_norm_eps)

    def states(self, module: int, token_ids: list[int], previous: torch.Tensor) -> torch.Tensor:
        """At every token, from the states before them."""
        own, length = self.weights[module], len(token_ids)
        embedded = self.model.model.embed_tokens(torch.tensor(token_ids)).clone()
        if self.own.is_first_masked:
            embedded[module + 1 : module + 2] = 0  # vLLM's mask
        embedded = self._norm(embedded, own["embedding"])
        state = self._norm(previous, own["hidden"])
        parts = (state, embedded) if self.own.is_hidden_first else (embedded, state)
        x = F.linear(torch.cat(parts, dim=-1), own["projection"], own.get("bias"))[None]
        places = torch.arange(length)[None]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        x = self.layers[module](x, attention_mask=mask, position_ids=places, position_embeddings=self.model.model.rotary_emb(x, places))
        x = (x[0] if isinstance(x, tuple) else x)[0]
        return self._norm(x, own["norm"]) if self.own.is_norm_recycled else x

    @torch.inference_mode()
    def draft(self, token_ids: list[int], count: int) -> list[torch.Tensor]:
        """Logits [V] of each draft after the tokens, the last of which the model has not computed."""
        hidden = self.model.model(torch.tensor([token_ids[:-1]]), use_cache=False).last_hidden_state[0]
        first = torch.zeros(1, hidden.shape[1])
        previous = [torch.cat([first, hidden])]  # of each module that is in use
        tokens, logits = list(token_ids), []
        for number in range(count):
            module = min(number, len(self.layers) - 1)
            made = [self.states(m, tokens, previous[m]) for m in range(module + 1)]
            logits.append(self.logits(module, made[module][-1]))
            tokens.append(int(logits[-1].argmax()))
            # The first module goes on with its own state; the next one takes what the one before it has made.
            for m in range(module + 1):
                newest = made[m] if m == module or m == 0 else made[m - 1]
                previous[m] = torch.cat([previous[m], newest[-1:]])
            if module + 1 < len(self.layers):
                previous.append(torch.cat([first, made[module]]))
        return logits


def make_checkpoint(own: Own, folder: Path) -> Modules:
    total = NUM_LAYERS + own.num_modules
    case = Case(own.case.family, config=own.case.config | {"num_hidden_layers": total})
    model = make_model(case, folder)
    layers = list(model.model.layers[NUM_LAYERS:])
    model.model.layers = model.model.layers[:NUM_LAYERS]
    model.config.num_hidden_layers = NUM_LAYERS
    hidden, generator, stored = model.config.hidden_size, torch.Generator().manual_seed(5), load_file(folder / "model.safetensors")
    weights = []
    for module in range(own.num_modules):
        where, *names = (name.format(layer=NUM_LAYERS + module, module=module) for name in own.names)
        before = f"model.layers.{NUM_LAYERS + module}."
        stored = {name.replace(before, where): tensor for name, tensor in stored.items()}
        made = {key: torch.rand(hidden, generator=generator) + 0.5 for key in ("embedding", "hidden", "norm")}
        made["projection"] = torch.randn(hidden, 2 * hidden, generator=generator) * 0.2
        if own.case.config.get("use_bias"):
            made["bias"] = torch.randn(hidden, generator=generator)
        for key, name in zip(("embedding", "hidden", "projection", "norm"), names):
            name = name if name.startswith(("model.", "mtp.")) else f"{where}{name}"
            if name == where:
                made["norm"] = model.model.norm.weight.detach()
                continue
            stored[f"{name}.weight"] = made[key]
            if key == "projection" and "bias" in made:
                stored[f"{name}.bias"] = made["bias"]
        weights.append(made)
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": NUM_LAYERS, own.key: own.num_modules}
    config.pop("layer_types", None)
    if own.architecture is not None:
        config["architectures"] = [own.architecture]
    (folder / "config.json").write_text(json.dumps(config))
    return Modules(own, model, layers, weights)


@pytest.fixture(scope="module", params=OWN, ids=str)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Modules, Path]:
    folder = tmp_path_factory.mktemp("model")
    return make_checkpoint(request.param, folder), folder


def test_a_folder_says_its_method(checkpoint: tuple[Modules, Path]) -> None:
    assert find_method(checkpoint[1]) == "mtp"


def serve(folder: Path, **speculative: Any) -> LLM:
    return serve_drafter(folder, method="mtp", **speculative)


@pytest.mark.parametrize("policy", ["reject_all", "accept_all"])
def test_drafts_are_those_of_the_formulas(policy: str, checkpoint: tuple[Modules, Path]) -> None:
    """After a prompt, and after more tokens: where the drafts before them fell, and where they stand."""
    modules, folder = checkpoint
    llm = serve(folder, accept_policy=policy)
    answer = check_drafts(llm, modules.draft, policy)
    if policy == "reject_all":
        prompt = random_tokens(37)
        scores = expected_logits(modules.model, [*prompt, *answer])[len(prompt) - 1 : -1]
        assert answer == scores.argmax(dim=-1).tolist()


def test_tokens_are_those_without_drafts(checkpoint: tuple[Modules, Path]) -> None:
    check_tokens(checkpoint[1], "mtp")


# -- what is found where --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    make_checkpoint(OWN[0], made)
    return made


def test_a_checkpoint_without_modules_is_a_model(folder: Path, tmp_path: Path) -> None:
    """Though config.json speaks of them; who wants to draft with them is told which weight is missing."""
    target = edited(folder, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor for name, tensor in weights.items() if ".layers.2." not in name}, target / "model.safetensors")
    check_model(target)
    with pytest.raises(ModelError, match=r"weight model\.layers\.2\.enorm\.weight, .* is missing"):
        check_drafter(target)
    with pytest.raises(ModelError, match=r"weight model\.layers\.2\.enorm\.weight, .* is missing"):
        serve(target)


def test_modules_of_a_model_that_has_none(folder: Path, tmp_path: Path) -> None:
    target = edited(folder, tmp_path / "model", num_nextn_predict_layers=0)
    with pytest.raises(ModelError, match=r"weight model\.layers\.2\..* would not be used: num_hidden_layers is 2"):
        check_model(target)
    assert find_drafter_folder(None, target) is None


def test_where_a_drafter_is_looked_for(folder: Path, tmp_path: Path) -> None:
    """A folder that is named comes first; before the launch it is found as it is at load."""
    config = {"method": "mtp"}
    llm = serve(folder)
    speculative = llm.engine.config.speculative_config
    assert find_drafter_folder(None, folder) == folder and find_drafter_folder("elsewhere", folder) == Path("elsewhere")
    assert check_before_launch(speculative, folder) == folder.resolve()
    plain = edited(folder, tmp_path / "plain", num_nextn_predict_layers=...)
    with pytest.raises(ConfigError, match=f"speculative_config.model: method {config['method']} needs a drafter trained for"):
        check_before_launch(speculative, plain)


def fuse_experts(folder: Path) -> None:
    """All experts of a layer in one weight, as transformers holds them."""
    weights, found = load_file(folder / "model.safetensors"), {}
    for name in list(weights):
        if ".experts." in name:
            before, _, rest = name.partition(".experts.")
            number, part, _ = rest.split(".")
            found.setdefault(f"{before}.experts.", {})[part, int(number)] = weights.pop(name)
    for before, parts in found.items():
        numbers = range(len(parts) // 3)
        both = [torch.cat([parts["gate_proj", number], parts["up_proj", number]]) for number in numbers]
        weights[f"{before}gate_up_proj"] = torch.stack(both)
        weights[f"{before}down_proj"] = torch.stack([parts["down_proj", number] for number in numbers])
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize("own", [OWN[0], OWN[-1]], ids=str)
def test_modules_with_all_experts_in_one_weight(own: Own, tmp_path: Path) -> None:
    make_checkpoint(own, tmp_path / "model")
    fused = edited(tmp_path / "model", tmp_path / "fused")
    fuse_experts(fused)
    made = []
    for folder in (tmp_path / "model", fused):
        llm = serve(folder)
        seen = watched(llm)
        llm.generate([{"prompt_token_ids": random_tokens(30)}], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), use_tqdm=False)
        made.append(seen[0])
    assert torch.equal(*made)


@pytest.mark.parametrize("scheme", ["wint8", "fp8"])
def test_modules_with_experts_in_few_bits(scheme: str, folder: Path) -> None:
    """Drafts change a little, tokens do not."""
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompt = [{"prompt_token_ids": random_tokens(30)}]
    exact, short = serve(folder), serve(folder, quantization=scheme)
    first, second = watched(exact), watched(short)
    answers = [llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for llm in (exact, short)]
    assert answers[0] == answers[1]
    difference = ((first[0] - second[0]).abs().max() / first[0].abs().max()).item()
    assert 0 < difference < 0.2
