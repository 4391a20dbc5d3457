"""DFlash and DSpark drafters against a plain statement of their formulas, in each of the formats that they are published in."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from backend import SamplingParams
from backend.drafter_checks import check_drafter_folder, find_method
from backend.errors import ConfigError, ModelError
from backend.planned import Drafted
from tests.drafting import NUM_DRAFTS, check_drafts, check_tokens, serve, watch_verified, watched
from tests.families import Case, assert_close, edited, make_model, random_tokens

HIDDEN, HEADS, KV_HEADS, SIZE, INNER, VOCABULARY, FEW, NUM_LAYERS, RANK, EPS = 32, 4, 2, 64, 40, 302, 64, 8, 6, 1e-5
TARGET = Case("llama", config={"num_hidden_layers": NUM_LAYERS, "head_dim": SIZE, "hidden_size": HIDDEN, "vocab_size": VOCABULARY})
LAYER = {
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "num_hidden_layers": 2,
    "rms_norm_eps": EPS,
    "rope_theta": 1000.0,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
}
SPARK = {"block_size": 4, "mask_token_id": 9, "target_layer_ids": [0, 3, 6], "markov_rank": RANK, "enable_confidence_head": True}


@dataclass(frozen=True)
class Kind:
    """A published way: what config.json says, and what it means."""

    name: str
    method: str = "dflash"
    config: dict[str, Any] = field(default_factory=dict)
    is_speculators: bool = False
    mask: int = 9
    tapped: tuple[int, ...] = (1, 4, 7)
    """By what enters them."""
    num_skipped: int = 0
    """Rows of a block before that of the first draft."""
    is_causal: bool = False
    """In layers without windows."""
    windows: tuple[int | None, ...] = (None, None)
    """Of layers."""
    are_windows_causal: bool = True
    """Else rows see all of a block,"""
    is_window_shared: bool = True
    """and before it as many tokens each; or those from where they would begin if each row were the last one."""
    is_interleaved: bool = False
    """Numbers 2 i and 2 i + 1 of a head turn together."""
    is_whole: bool = False
    """It has an embedding and a head of its own."""
    has_map: bool = False

    def __str__(self) -> str:
        return self.name

    def value(self, key: str, default: Any) -> Any:
        """What config.json says of a head, beside the other values or in their section."""
        return {**self.config, **self.config.get("dflash_config", {})}.get(key, default)


LISTED = {"mask_token_id": 301, "target_layer_ids": [0, 3, 6]}
DFLASH = Kind("DFlash", config={"block_size": 5, "dflash_config": LISTED}, mask=301, num_skipped=1)
DSPARK = Kind("DSpark", "dspark", SPARK | {"confidence_head_with_markov": True, "architectures": ["Qwen3DSparkModel"]}, is_whole=True)
KINDS = [
    DFLASH,
    Kind(
        "causal",
        config={"dflash_config": DFLASH.config["dflash_config"] | {"block_size": 16, "causal": True}},
        mask=301,
        num_skipped=1,
        is_causal=True,
    ),
    Kind(
        "DFlash of DeepSeek",
        config={"architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": 9, "target_layer_ids": [-1, 7], "markov_rank": 0},
        tapped=(0, 8),
        is_whole=True,
    ),
    Kind(
        "DFlash of speculators",
        config={"block_size": 8, "mask_token_id": 9, "aux_hidden_state_layer_ids": [2, 5], "draft_vocab_size": FEW},
        is_speculators=True,
        tapped=(2, 5),
        num_skipped=1,
        is_whole=True,
        has_map=True,
    ),
    DSPARK,
    Kind("gated", "dspark", SPARK | {"markov_head_type": "gated", "logit_scale": 0.5}),
    Kind("with a state", "dspark", SPARK | {"markov_head_type": "rnn"}, is_whole=True),
    Kind(
        "DSpark of speculators",
        "dspark",
        {
            **SPARK,
            "target_layer_ids": None,
            "aux_hidden_state_layer_ids": [1, 4, 7],
            "draft_vocab_size": FEW,
            "sample_from_anchor": False,
            "block_size": 5,
        },
        is_speculators=True,
        num_skipped=1,
        is_whole=True,
        has_map=True,
    ),
    Kind(
        "DSpark of SpecForge",
        "dspark",
        {
            "architectures": ["DSparkDraftModel"],
            "block_size": 4,
            "num_target_layers": NUM_LAYERS,
            "dflash_config": {
                "attention_mode": "gqa",
                "confidence_head_alpha": 1.0,
                "confidence_head_with_markov": True,
                "markov_head_type": "gated",
                "markov_rank": RANK,
                "mask_token_id": 9,
                "projector_type": "dspark",
            },
        },
        tapped=(2, 6),
    ),
    Kind(
        "DSpark of ModelOpt",
        "dspark",
        {
            "architectures": ["DFlashDraftModel"],
            "block_size": 4,
            "dflash_config": {
                "mask_token_id": 9,
                "target_layer_ids": [0, 3, 6],
                "projector_type": "dspark",
                "shift_label": True,
                "markov_rank": RANK,
                "markov_head_type": "gated",
                "use_confidence_head": True,
            },
        },
    ),
    Kind("neighbours turn", config=DFLASH.config | {"is_neox_style": False}, mask=301, num_skipped=1, is_interleaved=True),
]

SLIDING, FULL = "sliding_attention", "full_attention"
MIXED = {"use_sliding_window": True, "layer_types": [SLIDING, FULL]}
LATER = {"use_sliding_window": True, "layer_types": [FULL, SLIDING]}
WINDOWED = [
    Kind("window", config=DFLASH.config | MIXED | {"sliding_window": 7}, mask=301, num_skipped=1, windows=(7, None)),
    Kind("window larger than the context", config=DFLASH.config | MIXED | {"sliding_window": 9999}, mask=301, num_skipped=1, windows=(9999, None)),
    Kind("window as the context", config=DFLASH.config | LATER | {"sliding_window": 38}, mask=301, num_skipped=1, windows=(None, 38)),
    Kind(
        "windows by number",
        config=DFLASH.config | {"use_sliding_window": True, "sliding_window": 1, "max_window_layers": 1},
        mask=301,
        num_skipped=1,
        windows=(None, 1),
    ),
    Kind(
        "causal, windows in all layers",
        config={"block_size": 5, "layer_types": [FULL] * 2, "dflash_config": LISTED | {"use_swa": True, "swa_window_size": 12, "causal": True}},
        mask=301,
        num_skipped=1,
        windows=(12, 12),
    ),
    Kind(
        "causal, a window in one layer",
        config={"block_size": 5, **LATER, "dflash_config": LISTED | {"swa_window_size": 6, "causal": True}},
        mask=301,
        num_skipped=1,
        is_causal=True,
        windows=(None, 6),
    ),
    Kind("DSpark, window smaller than the block", "dspark", DSPARK.config | LATER | {"sliding_window": 2}, is_whole=True, windows=(None, 2)),
    Kind(
        "windows of speculators",
        "dspark",
        SPARK
        | {"sample_from_anchor": True, "use_sliding_window": True, "layer_types": [SLIDING] * 2, "sliding_window": 9}
        | {"sliding_window_non_causal": False},
        is_speculators=True,
        windows=(9, 9),
    ),
    Kind(
        "whole blocks of speculators",
        config={"block_size": 6, "mask_token_id": 9, "aux_hidden_state_layer_ids": [1, 4, 7], "sliding_window_non_causal": True}
        | {**LATER, "sliding_window": 5},
        is_speculators=True,
        num_skipped=1,
        windows=(None, 5),
        are_windows_causal=False,
    ),
    Kind(
        "whole blocks of ModelOpt",
        config={"block_size": 5, "layer_types": [FULL] * 2, "sliding_window": 5}
        | {"dflash_config": LISTED | {"use_swa": True, "swa_window_size": 5, "causal": False}},
        mask=301,
        num_skipped=1,
        windows=(5, 5),
        are_windows_causal=False,
        is_window_shared=False,
    ),
    Kind(
        "whole blocks, a window in one layer",
        "dspark",
        SPARK | MIXED | {"sliding_window": 9, "is_causal": False},
        windows=(9, None),
        are_windows_causal=False,
        is_window_shared=False,
    ),
]


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def turn(x: torch.Tensor, first: int, *, is_interleaved: bool) -> torch.Tensor:
    """Rotary embedding of [T, heads, SIZE] at positions from `first` on."""
    if is_interleaved:
        halves = turn(torch.cat([x[..., ::2], x[..., 1::2]], dim=-1), first, is_interleaved=False)
        return torch.stack(halves.chunk(2, dim=-1), dim=-1).flatten(-2)
    frequencies = 1000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
    angles = torch.arange(first, first + len(x))[:, None, None] * torch.cat([frequencies, frequencies])
    half = torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], dim=-1)
    return x * angles.cos() + half * angles.sin()


@dataclass
class Drafter:
    kind: Kind
    weights: dict[str, torch.Tensor]
    model: Any

    def layer(self, number: int, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """x: of the block; context [T, hidden]: of the tokens before it."""
        own = {key.removeprefix(f"layers.{number}."): weight for key, weight in self.weights.items() if key.startswith(f"layers.{number}.")}
        y, known = norm(x, own["input_layernorm.weight"]), len(context)

        def project(part: str, states: torch.Tensor) -> torch.Tensor:
            return F.linear(states, own[f"self_attn.{part}_proj.weight"]).view(len(states), -1, SIZE)

        q = turn(norm(project("q", y), own["self_attn.q_norm.weight"]), known, is_interleaved=self.kind.is_interleaved)
        both = torch.cat([context, y])
        k = turn(norm(project("k", both), own["self_attn.k_norm.weight"]), 0, is_interleaved=self.kind.is_interleaved)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, project("v", both)))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(SIZE)
        scores = scores.masked_fill(~self.see(number, known, len(x)), float("-inf"))
        x = x + F.linear(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(x), -1), own["self_attn.o_proj.weight"])
        y = norm(x, own["post_attention_layernorm.weight"])
        return x + F.linear(F.silu(F.linear(y, own["mlp.gate_proj.weight"])) * F.linear(y, own["mlp.up_proj.weight"]), own["mlp.down_proj.weight"])

    def see(self, number: int, known: int, count: int) -> torch.Tensor:
        """[count, known + count]: the places that rows of a block see in a layer; the first `known` are before it."""
        kind, window, rows = self.kind, self.kind.windows[number], []
        for own in range(known, known + count):
            is_causal = kind.is_causal if window is None else kind.are_windows_causal
            last, first = (own if is_causal else known + count - 1), 0
            if window is not None:
                first = known - window if kind.is_window_shared and not is_causal else own - window + 1
            rows.append([first <= place <= last for place in range(known + count)])
        return torch.tensor(rows)

    def condense(self, token_ids: list[int]) -> torch.Tensor:
        found = self.model.model(torch.tensor([token_ids]), use_cache=False, output_hidden_states=True)
        outputs: list[torch.Tensor] = []  # transformers' last entry is the state after the final norm
        handle = self.model.model.layers[-1].register_forward_hook(lambda _, __, output: outputs.append(output))
        self.model.model(torch.tensor([token_ids]), use_cache=False)
        handle.remove()
        last = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
        entering = [*(state[0] for state in found.hidden_states[:-1]), last[0] if last.ndim == 3 else last]
        joined = torch.cat([entering[number] for number in self.kind.tapped], dim=-1)
        return norm(F.linear(joined, self.weights["fc.weight"]), self.weights["hidden_norm.weight"])

    @torch.inference_mode()
    def states(self, token_ids: list[int]) -> torch.Tensor:
        """Of the drafts after the tokens [NUM_DRAFTS, hidden]."""
        kind, own = self.kind, self.weights
        context = self.condense(token_ids[:-1])
        embeddings = own["embed_tokens.weight"] if kind.is_whole else self.model.model.embed_tokens.weight
        x = embeddings[torch.tensor([token_ids[-1], *[kind.mask] * (NUM_DRAFTS - 1 + kind.num_skipped)])]
        for number in range(LAYER["num_hidden_layers"]):
            x = self.layer(number, x, context)
        return norm(x, own["norm.weight"])[kind.num_skipped :]

    def bias(self, token_id: int, hidden: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the Markov head adds to a draft's scores after a token, and its next state."""
        own, kind = self.weights, self.kind.value("markov_head_type", "vanilla")
        latent = own["markov_head.markov_w1.weight"][token_id]
        if kind == "gated":
            seen = torch.cat([hidden, latent])
            latent = torch.sigmoid(own["markov_head.gate_proj.weight"] @ seen + own["markov_head.gate_proj.bias"]) * latent
        elif kind == "rnn":
            seen = torch.cat([state, latent, hidden])
            gate, candidate, out = (own["markov_head.joint_proj.weight"] @ seen + own["markov_head.joint_proj.bias"]).split(RANK)
            gate = torch.sigmoid(gate)
            latent, state = torch.tanh(out), gate * state + (1 - gate) * torch.tanh(candidate)
        return own["markov_head.markov_w2.weight"] @ latent, state

    @torch.inference_mode()
    def draft(self, token_ids: list[int], count: int) -> list[torch.Tensor]:
        kind, own = self.kind, self.weights
        token, state, logits = token_ids[-1], torch.zeros(RANK), []
        for hidden in self.states(token_ids)[:count]:
            scores = (own["lm_head.weight"] @ hidden if kind.is_whole else self.model.lm_head(hidden)) * kind.config.get("logit_scale", 1.0)
            if kind.method == "dspark":
                bias, state = self.bias(token, hidden, state)
                scores = scores + bias
            if kind.has_map:
                whole = torch.full((VOCABULARY,), float("-inf"))
                whole[torch.arange(FEW) + own["d2t"]] = scores
                scores = whole
            logits.append(scores)
            token = int(scores.argmax())
        return logits


def make_weights(kind: Kind) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def matrix(*shape: int, scale: float = 0.2) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    def ones(size: int) -> torch.Tensor:
        return torch.rand(size, generator=generator) + 0.5

    made = {"fc.weight": matrix(HIDDEN, len(kind.tapped) * HIDDEN), "hidden_norm.weight": ones(HIDDEN), "norm.weight": ones(HIDDEN)}
    for number in range(LAYER["num_hidden_layers"]):
        name, sizes = f"layers.{number}", {"q": HEADS * SIZE, "k": KV_HEADS * SIZE, "v": KV_HEADS * SIZE}
        made |= {f"{name}.self_attn.{part}_proj.weight": matrix(rows, HIDDEN) for part, rows in sizes.items()}
        made |= {f"{name}.self_attn.{part}_norm.weight": ones(SIZE) for part in "qk"}
        made[f"{name}.self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * SIZE, scale=0.06)
        made |= {f"{name}.mlp.{part}_proj.weight": matrix(INNER, HIDDEN) for part in ("gate", "up")}
        made |= {f"{name}.mlp.down_proj.weight": matrix(HIDDEN, INNER)}
        made |= {f"{name}.{part}_layernorm.weight": ones(HIDDEN) for part in ("input", "post_attention")}
    rows = FEW if kind.has_map else VOCABULARY
    if kind.is_whole:
        made |= {"embed_tokens.weight": matrix(VOCABULARY, HIDDEN, scale=0.5), "lm_head.weight": matrix(rows, HIDDEN)}
    if kind.has_map:
        ids = torch.randperm(VOCABULARY, generator=generator)[:FEW].sort().values
        made |= {"d2t": ids - torch.arange(FEW), "t2d": torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, ids, True)}
    if kind.method == "dspark":
        made |= {"markov_head.markov_w1.weight": matrix(VOCABULARY, RANK, scale=1), "markov_head.markov_w2.weight": matrix(rows, RANK)}
        mixer = {"gated": ("gate_proj", RANK, HIDDEN + RANK), "rnn": ("joint_proj", 3 * RANK, HIDDEN + 2 * RANK)}
        if mixed := mixer.get(kind.value("markov_head_type", "")):
            name, out, width = mixed
            made |= {f"markov_head.{name}.weight": matrix(out, width), f"markov_head.{name}.bias": matrix(out)}
        width = HIDDEN + (RANK if kind.value("confidence_head_with_markov", kind.is_speculators or kind.value("use_confidence_head", False)) else 0)
        made |= {"confidence_head.proj.weight": matrix(1, width, scale=0.5), "confidence_head.proj.bias": matrix(1)}
    return made


def save_drafter(kind: Kind, weights: dict[str, torch.Tensor], folder: Path) -> None:
    folder.mkdir()
    config = {**LAYER, **kind.config}
    if kind.is_speculators:
        own = {key: value for key, value in config.items() if key in (*LAYER, *LATER, "sliding_window")}
        config = {"speculators_model_type": kind.method, "transformer_layer_config": own, **{k: v for k, v in config.items() if k not in own}}
    (folder / "config.json").write_text(json.dumps(config))
    if kind.value("use_confidence_head", False):  # whose heads' names have no prefix
        weights = {name.removeprefix("markov_head.").replace("confidence_head.proj", "confidence_proj"): weight for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors")


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


@pytest.mark.parametrize("policy", ["reject_all", "accept_all"])
def test_drafts_are_those_of_the_formulas(policy: str, drafter: tuple[Drafter, Path], target: tuple[Any, Path]) -> None:
    own, folder = drafter
    check_drafter_folder(own.kind.method, folder, target[1])
    check_drafts(serve(target[1], method=own.kind.method, model=str(folder), accept_policy=policy), own.draft, policy)


@pytest.mark.parametrize("drafter", [KINDS[0], KINDS[6], KINDS[7], WINDOWED[0], *WINDOWED[8:10]], ids=str, indirect=True)
def test_tokens_are_those_without_drafts(drafter: tuple[Drafter, Path], target: tuple[Any, Path]) -> None:
    check_tokens(target[1], drafter[0].kind.method, model=str(drafter[1]))


@pytest.mark.parametrize(("drafter", "expected"), [(KINDS[0], (1, NUM_DRAFTS + 1)), (KINDS[1], (NUM_DRAFTS + 1, 1))], ids=str, indirect=["drafter"])
def test_what_attention_is_compiled_for(drafter: tuple[Drafter, Path], expected: tuple[int, int], target: tuple[Any, Path]) -> None:
    """Rows that see all of a block ask alone; causal ones are a request's last queries. It is what steps ask for."""
    llm = serve(target[1], method=drafter[0].kind.method, model=str(drafter[1]))
    program, asked = llm.engine.worker.program, []
    block = program.drafting._block
    assert block is not None
    plan = block._plan

    def watched_plan(*arguments: Any, **options: Any) -> Any:
        made = plan(*arguments, **options)
        asked.append((made.max_query_len, len(made.seq_lens)))
        return made

    block._plan = watched_plan  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    llm.generate([{"prompt_token_ids": random_tokens(9, seed)} for seed in range(3)], params, use_tqdm=False)
    ((heads, *sizes, is_whole),) = program.drafting.block_attention([0, NUM_DRAFTS])
    assert tuple(sizes) == expected and not is_whole and heads == llm.engine.worker.drafter.block_heads
    assert (sizes[0], 3 * sizes[1]) in asked and all(width == sizes[0] for width, _ in asked)


CAUSAL, ALONE, OPEN = (NUM_DRAFTS + 1, 1, False), (1, NUM_DRAFTS + 1, False), (NUM_DRAFTS + 1, 1, True)
COMPILED = [(0, 7, [ALONE, CAUSAL]), (8, 5 + NUM_DRAFTS + 1, [ALONE]), (9, 5, [OPEN]), (10, 9, [(1, NUM_DRAFTS, False), (NUM_DRAFTS, 1, True)])]


@pytest.mark.parametrize(("number", "window", "expected"), COMPILED, ids=[str(WINDOWED[number]) for number, *_ in COMPILED])
def test_what_attention_with_windows_is_compiled_for(
    number: int, window: int, expected: list[tuple[int, int, bool]], target: tuple[Any, Path], tmp_path: Path
) -> None:
    """Of layers that see a block in two ways both, with every window that steps ask for. A block's last row is its request's last token."""
    kind = WINDOWED[number]
    save_drafter(kind, make_weights(kind), tmp_path / "drafter")
    drafting = serve(target[1], method=kind.method, model=str(tmp_path / "drafter")).engine.worker.program.drafting
    assert [tuple(sizes) for _, *sizes in drafting.block_attention([0, NUM_DRAFTS])] == expected
    assert drafting.block_kinds == {(window, None)}


@pytest.mark.parametrize("drafter", [KINDS[2], WINDOWED[0]], ids=str, indirect=True)
def test_chunks_and_cached_prefixes_leave_no_gap(drafter: tuple[Drafter, Path], target: tuple[Any, Path]) -> None:
    """Drafts after a prompt in chunks, and after one whose beginning a request without drafts has computed. It looks at the last layer's output."""
    own, folder = drafter
    options = {"max_batch_size": 8, "max_num_batched_tokens": 16}
    llm = serve(target[1], options, method=own.kind.method, model=str(folder), accept_policy="reject_all")
    params, prompts = SamplingParams(max_tokens=1 + NUM_DRAFTS, temperature=0.0, ignore_eos=True), [random_tokens(37), random_tokens(45, 1)]
    seen = watched(llm)
    llm.generate([{"prompt_token_ids": prompts[1][:30]}], params, speculative={"method": "none"}, use_tqdm=False)
    assert not seen
    for prompt in prompts:
        seen.clear()
        (result,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        expected = own.draft([*prompt, result.outputs[0].token_ids[0]], NUM_DRAFTS)
        for own_logits, other in zip(seen, expected):
            assert_close(own_logits[0], other)
    assert llm.engine.scheduler.num_cached_tokens >= 24


@pytest.mark.parametrize("drafter", [*KINDS[:2], WINDOWED[0], *WINDOWED[8:10]], ids=str, indirect=True)
def test_pages_that_hold_no_block(drafter: tuple[Drafter, Path], target: tuple[Any, Path]) -> None:
    """Pages are as many as the request has tokens: near its end no draft is made, and none of rows that have no place."""
    own, folder = drafter
    speculative = {"method": own.kind.method, "model": str(folder), "accept_policy": "reject_all"}
    memory = 8 * serve(target[1], **speculative).engine.worker.store.page_bytes
    seen = watch_verified(serve(target[1], {"kv_cache_memory": memory}, **speculative))
    for tokens, drafts, _ in seen:
        assert drafts == [int(scores.argmax()) for scores in own.draft(tokens, len(drafts))]
    assert len(seen[-1][0]) < 37 + 24


@pytest.mark.parametrize("drafter", [KINDS[4]], ids=str, indirect=True)
def test_drafts_end_where_the_confidence_head_says(drafter: tuple[Drafter, Path], target: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """And drafts are judged by it, where others' are by their drafter's greatest probability."""
    own, folder = drafter
    told, note = list[Sequence[float]](), Drafted.note

    def watched_note(self: Drafted, score: int, found: list[float] | None, *names: str) -> None:
        told.append(found or [])
        note(self, score, found, *names)

    monkeypatch.setattr(Drafted, "note", watched_note)
    prompt = random_tokens(37)
    params = SamplingParams(max_tokens=2 + NUM_DRAFTS, temperature=0.0, ignore_eos=True)

    def count_drafts(least: float) -> tuple[int, list[int]]:
        llm = serve(target[1], method="dspark", model=str(folder), min_draft_confidence=least, accept_policy="reject_all")
        (result,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        assert result.outputs[0].stats.steps == params.max_tokens
        return result.outputs[0].stats.drafted, result.outputs[0].token_ids

    everything, answer = count_drafts(0.0)
    chances = []
    for known in range(1, params.max_tokens):
        tokens = [*prompt, *answer[:known]]
        drafts, row = [tokens[-1], *(int(scores.argmax()) for scores in own.draft(tokens, NUM_DRAFTS))], []
        for token, hidden in zip(drafts, own.states(tokens)):
            seen = torch.cat([hidden, own.weights["markov_head.markov_w1.weight"][token]])
            row.append(torch.sigmoid(own.weights["confidence_head.proj.weight"][0] @ seen + own.weights["confidence_head.proj.bias"][0]).item())
        chances.append(row[: params.max_tokens - known - 1])
    assert everything == sum(map(len, chances))
    assert len(told) >= len(chances)
    for row, found in zip(chances, told, strict=False):
        assert list(found[: len(row)]) == pytest.approx(row, abs=1e-4) and len(found) >= len(row)
    least = sorted(chance for row in chances for chance in row)[everything // 3] + 1e-6
    kept = [next((i for i, chance in enumerate(row) if chance < least), len(row)) for row in chances]
    assert 0 < sum(kept) < everything
    assert count_drafts(least) == (sum(kept), answer)


# -- what is no drafter of this target --------------------------------------------------------------------------------------------

REFUSED = [
    (0, {"hidden_size": 48}, "hidden_size is 48; the target's is 32"),
    (0, {"vocab_size": 400}, "vocab_size is 400; the target's is 302"),
    (0, {"block_size": 1}, "block_size is 1; it must be an integer from 2 to 1024"),
    (0, {"dflash_config": {"mask_token_id": 302, "target_layer_ids": [0, 3, 6]}}, "mask_token_id is 302; it must be an integer from 0 to 301"),
    (0, {"dflash_config": {"target_layer_ids": [0, 3, 6]}}, "config.json has no 'mask_token_id'"),
    (0, {"dflash_config": {"mask_token_id": 1}}, "config.json has no 'aux_hidden_state_layer_ids', nor 'target_layer_ids' in dflash_config"),
    (
        0,
        {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 8]}},
        r"target_layer_ids is \[0, 8\]; it must be a list of layers of the target",
    ),
    (0, {"dflash_config": LISTED | {"attention_value_scale": 0.5}}, "attention_value_scale is 0.5; it must be 1, or left out: it is not served"),
    (0, {"use_gemma_norm": True}, "use_gemma_norm is True; it must be left out: it is not served"),
    (0, {"layer_types": [FULL, SLIDING], "sliding_window": 8}, "use_sliding_window is None; it must be true where layer_types has sliding_attention"),
    (0, LATER | {"sliding_window": None}, "sliding_window is None; it must be an integer where layer_types has sliding_attention"),
    (0, LATER | {"sliding_window": 0}, "sliding_window is 0; it must be an integer from 1 to 16777216"),
    (0, LATER | {"layer_types": [FULL, "chunked_attention"]}, "it must be a list of num_hidden_layers .2. of: full_attention, sliding_attention"),
    (
        0,
        LATER | {"sliding_window": 4, "is_causal": False},
        r"sliding_window is 4; it must be block_size \(5\) at least, where rows see all of a block",
    ),
    (
        0,
        {"dflash_config": LISTED | {"use_swa": True, "swa_window_size": 4}},
        r"swa_window_size is 4; it must be block_size \(5\) at least, where rows see all",
    ),
    (0, {"dflash_config": LISTED | {"use_swa": True, "causal": True}}, "config.json has no 'sliding_window'"),
    (0, {"dflash_config": LISTED | {"use_swa": True, "causal": True, "swa_window_size": 0}}, "swa_window_size is 0; it must be an integer from 1"),
    (0, {"markov_rank": RANK}, "markov_rank is 6; it must be 0 with method dflash; a drafter with this head is one of method dspark"),
    (0, {"dflash_config": LISTED | {"projector_type": "domino"}}, "projector_type 'domino' is not supported; known: dflash, dspark"),
    (0, {"dflash_config": {"mask_token_id": 1}, "num_target_layers": 9}, "num_target_layers is 9; it must be 8, as many as the target has"),
    (0, {"num_target_layers": 36}, "num_target_layers is 36; it must be 8, as many as the target has"),
    (4, {"num_target_layers": 6}, "num_target_layers is 6; it must be 8, as many as the target has"),
    (0, {"dflash_config": LISTED | {"num_target_layers": 6}}, "num_target_layers is 6; it must be 8, as many as the target has"),
    (0, {"num_hidden_layers": 1}, r"weight layers\.1\..* would not be used: num_hidden_layers is 1, and the weights are those of another"),
    (0, {"num_hidden_layers": 3}, r"weight layers\.2\..* is missing"),
    (3, {"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3'; it must be 'dflash' with this method"),
    (3, {"speculators_model_type": ...}, "speculators_model_type is None; it must be 'dflash', where there is a transformer_layer_config"),
    (4, {"markov_rank": 0}, "confidence_head_with_markov is True; it must be false where markov_rank is 0"),
    (4, {"markov_head_type": "lstm"}, "markov_head_type 'lstm' is not supported; known: vanilla, gated, rnn"),
    (4, {"markov_head_type": "gated"}, r"weight markov_head\.gate_proj\.(weight.*|bias) is missing"),
    (4, {"markov_rank": 0, "confidence_head_with_markov": False}, r"weight markov_head\..* would not be used: no such head is named"),
    (6, {"sample_from_anchor": False}, "sample_from_anchor is False; it must be true where markov_head_type is rnn"),
]


@pytest.mark.parametrize(("number", "values", "message"), REFUSED, ids=[f"{KINDS[i]}: {' '.join(values)}" for i, values, _ in REFUSED])
def test_what_is_refused_before_the_launch_and_at_load(
    number: int, values: dict[str, Any], message: str, target: tuple[Any, Path], tmp_path: Path
) -> None:
    kind = KINDS[number]
    save_drafter(kind, make_weights(kind), tmp_path / "made")
    own = edited(tmp_path / "made", tmp_path / "drafter", **values)
    with pytest.raises(ModelError, match=message):
        check_drafter_folder(kind.method, own, target[1])
    with pytest.raises(ModelError, match=message):
        serve(target[1], method=kind.method, model=str(own))


@pytest.mark.parametrize(
    ("made", "method", "message"),
    [
        ("DFlashDraftModel", "dspark", "it must be a DSpark drafter's with this method"),
        ("DFlashDraftModel", "eagle", "it must be an EAGLE drafter's with this method"),
        ("Qwen3DSparkModel", "eagle", "it must be an EAGLE drafter's with this method"),
    ],
)
def test_a_folder_of_another_method(made: str, method: str, message: str, target: tuple[Any, Path], tmp_path: Path) -> None:
    """With two taps its tensors have the names and sizes of an EAGLE drafter's."""
    values = {"mask_token_id": 1, "target_layer_ids": [0, 3]}
    kind = Kind("two taps", config={"block_size": 4, "dflash_config": values}, tapped=(1, 4))
    save_drafter(kind, make_weights(kind), tmp_path / "made")
    own = edited(tmp_path / "made", tmp_path / "drafter", architectures=[made])
    check_drafter_folder("dflash", own, target[1])
    with pytest.raises(ModelError, match=message):
        check_drafter_folder(method, own, target[1])


def test_a_drafter_from_before_it_was_said_which_rows_draft(target: tuple[Any, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Hardly a draft of it would be right, so there has to be a word about it."""
    save_drafter(KINDS[7], make_weights(KINDS[7]), tmp_path / "made")
    check_drafter_folder("dspark", tmp_path / "made", target[1])
    assert not caplog.text
    check_drafter_folder("dspark", edited(tmp_path / "made", tmp_path / "drafter", sample_from_anchor=...), target[1])
    assert "drafter/config.json has no 'sample_from_anchor': the newest token's row drafts" in caplog.text


def test_one_draft_of_many(target: tuple[Any, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_drafter(DFLASH, make_weights(DFLASH), tmp_path / "drafter")
    serve(target[1], method="dflash", model=str(tmp_path / "drafter"), num_speculative_tokens=None)
    assert "num_speculative_tokens is 1, which is its default: the drafter in" in caplog.text and "makes up to 4 for little more" in caplog.text


def test_what_a_drafter_cannot_do(target: tuple[Any, Path], tmp_path: Path) -> None:
    save_drafter(DFLASH, make_weights(DFLASH), tmp_path / "drafter")
    folder = str(tmp_path / "drafter")
    with pytest.raises(ConfigError, match=r"num_model_steps is 5; the drafter in .* makes 4 drafts a step at most"):
        serve(target[1], method="dflash", model=folder, num_speculative_tokens=5)
    with pytest.raises(ConfigError, match="min_draft_confidence has no effect with method dflash: it is a key of dspark"):
        serve(target[1], method="dflash", model=folder, min_draft_confidence=0.5)
    kind = Kind("without", "dspark", SPARK | {"enable_confidence_head": False})
    save_drafter(kind, make_weights(kind), tmp_path / "spark")
    with pytest.raises(ConfigError, match=r"min_draft_confidence is 0.5; the drafter in .* has no confidence head: leave it out"):
        serve(target[1], method="dspark", model=str(tmp_path / "spark"), min_draft_confidence=0.5)
    with pytest.raises(ConfigError, match="min_draft_confidence must be from 0 to 1, got 2"):
        serve(target[1], method="dspark", model=folder, min_draft_confidence=2)


@pytest.mark.parametrize("scheme", ["wint8", "fp8"])
def test_layers_in_few_bits(scheme: str, target: tuple[Any, Path], tmp_path: Path) -> None:
    """Drafts change a little, tokens do not."""
    kind = KINDS[4]
    save_drafter(kind, make_weights(kind), tmp_path / "drafter")
    prompt, params = [{"prompt_token_ids": random_tokens(30)}], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    answers, logits = [], []
    for quantization in (None, scheme):
        llm = serve(target[1], method=kind.method, model=str(tmp_path / "drafter"), quantization=quantization)
        logits.append(watched(llm))
        answers.append(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]
    difference = ((logits[0][0] - logits[1][0]).abs().max() / logits[0][0].abs().max()).item()
    assert 0 < difference < 0.2
