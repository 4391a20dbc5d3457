"""Drafters whose heads score some of the target's tokens alone (`draft_token_map`): of each kind, the same scores as without, of those."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from backend import SamplingParams
from backend.config import BUNDLED_MODEL, EngineConfig
from backend.errors import ConfigError, ModelError
from backend.models import load_model
from backend.parallel.ranks import Ranks
from backend.quantization_config import QuantizationConfig
from backend.rank_hello import describe_self
from backend.text import Tokenizer
from backend.token_map import read_token_map
from deploy.cli import main
from deploy.served_model import model_parameters
from tests import test_block_drafters as blocks
from tests import test_draft_heads as heads
from tests import test_eagle as eagles
from tests import test_own_drafters as own_drafters
from tests.drafting import check_tokens, check_tree_tokens, serve, watched
from tests.families import Case, make_model, random_tokens
from tests.test_mixtures import on_ranks

Made = tuple[Path, str, Path | None]
"""The target, the method, and the drafter's folder."""


def make_heads(name: str) -> Callable[[Path], Made]:
    kind = next(own for own in heads.KINDS if own.name == name)

    def make(folder: Path) -> Made:
        model = make_model(heads.TARGET, folder / "target")
        heads.make(kind, folder / "drafter", model)
        return folder / "target", kind.method, folder / "drafter"

    return make


def make_with_layers(module: Any, name: str) -> Callable[[Path], Made]:
    kind = next(own for own in module.KINDS if own.name == name)

    def make(folder: Path) -> Made:
        make_model(module.TARGET, folder / "target")
        module.save_drafter(kind, module.make_weights(kind), folder / "drafter")
        return folder / "target", kind.method, folder / "drafter"

    return make


def make_mtp(folder: Path) -> Made:
    own_drafters.make_checkpoint(own_drafters.OWN[0], folder / "target")
    return folder / "target", "mtp", None


def make_draft_model(folder: Path) -> Made:
    make_model(Case("gemma2"), folder / "target")  # its head is the embedding, and its scores are capped
    return folder / "target", "draft_model", folder / "target"


MADE: dict[str, Callable[[Path], Made]] = {
    "mtp": make_mtp,
    "draft_model": make_draft_model,
    "eagle": make_with_layers(eagles, "EAGLE"),
    "eagle3": make_with_layers(eagles, "norm before fc, two layers"),
    "P-EAGLE": make_with_layers(eagles, "P-EAGLE, norms, one layer twice"),
    "dflash": make_with_layers(blocks, "DFlash"),
    "dspark": make_with_layers(blocks, "DSpark"),
    "medusa": make_heads("Medusa, an archive"),
    "hydra": make_heads("Hydra, two blocks, of an earlier state"),
    "speculator": make_heads("speculator, tied"),
    "LSTM": make_heads("LSTM"),
}


@pytest.fixture(scope="module", params=MADE)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    (folder / "target").mkdir()
    return MADE[request.param](folder)


def options(made: Made, token_map: Path | None = None, **more: Any) -> dict[str, Any]:
    _, method, drafter = made
    found: dict[str, Any] = {"method": method, **({"model": str(drafter)} if drafter is not None else {})}
    return found | ({"draft_token_map": str(token_map)} if token_map is not None else {}) | more


def write_map(made: Made, path: Path) -> torch.Tensor:
    """Every third token or so, not in their order."""
    vocab_size = json.loads((made[0] / "config.json").read_text())["vocab_size"]
    ids = torch.arange(1, vocab_size, 3)
    path.write_text(json.dumps(ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))].tolist()))
    return ids


def test_scores_are_those_of_the_tokens_alone(made: Made, tmp_path: Path) -> None:
    ids, found = write_map(made, tmp_path / "map.json"), []
    for token_map in (None, tmp_path / "map.json"):
        llm = serve(made[0], **options(made, token_map, num_speculative_tokens=1, accept_policy="reject_all"))
        seen = watched(llm)
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        llm.generate([{"prompt_token_ids": random_tokens(37)}], params, use_tqdm=False)
        found.append(torch.stack([own[0] for own in seen]))
    whole, few = found
    is_drafted = torch.zeros(whole.shape[1], dtype=torch.bool)
    is_drafted[ids] = True
    assert len(few) > 5 and few.shape == whole.shape and torch.equal(few > float("-inf"), is_drafted.expand_as(few))
    torch.testing.assert_close(few[:, ids], whole[:, ids], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("made", ["mtp", "dspark", "medusa"], indirect=True)
def test_tokens_are_those_without_drafts(made: Made, tmp_path: Path) -> None:
    write_map(made, tmp_path / "map.json")
    check_tokens(made[0], **options(made, tmp_path / "map.json"))


@pytest.mark.parametrize("made", ["eagle3", "hydra"], indirect=True)
def test_trees_change_no_token(made: Made, tmp_path: Path) -> None:
    write_map(made, tmp_path / "map.json")
    check_tree_tokens(made[0], 36, **options(made, tmp_path / "map.json", tree_nodes=48))  # most of the target's tokens are never drafted


@pytest.mark.parametrize("scheme", [None, "wint8", "wint4", "fp8", "block_wise_fp8"])
@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_a_head_in_few_bits(family: str, scheme: str | None, tmp_path: Path) -> None:
    """Tied to the embedding and not."""
    make_model(Case(family), tmp_path)
    (tmp_path / "map.json").write_text(json.dumps([7, *range(40, 140)]))
    quantization = QuantizationConfig(dense_quant_type=scheme, head_quant_type=scheme)

    def score(ranks: Ranks, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        map_file = str(tmp_path / "map.json")
        sizes = {"only_head": True, "quantization": quantization, "draft_token_map": map_file}
        model = load_model(tmp_path, torch.float32, torch.device("cpu"), ranks, **sizes)  # type: ignore[arg-type]
        assert model.draft_ids is not None
        return model.draft_scores(states), model.logits(states)[:, model.draft_ids]

    states = torch.randn(5, json.loads((tmp_path / "config.json").read_text())["hidden_size"])
    for few, expected in (score(Ranks(), states), *on_ranks(2, lambda ranks: score(ranks, states))):
        assert few.shape == (5, 101)
        torch.testing.assert_close(few, expected, atol=1e-5, rtol=1e-5)


def test_ranks_agree_on_the_tokens(tmp_path: Path) -> None:
    """Wherever each has them: other drafts on one of them would part their ways."""

    def describe(name: str, ids: list[int]) -> Any:
        (tmp_path / name).write_text(json.dumps(ids))
        values = {"model": str(BUNDLED_MODEL), "speculative_config": {"method": "mtp", "draft_token_map": str(tmp_path / name)}}
        return describe_self(EngineConfig.from_dict(values), 0)

    one = describe("one.json", [1, 2, 3])
    assert not one.differences(describe("same.json", [1, 2, 3]))
    assert "draft_token_map" in one.differences(describe("other.json", [1, 2, 4]))


def test_the_drafter_in_another_process_is_told(tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text("[1, 2]")
    values = {"speculative_config": {"method": "mtp", "placement": "bls", "draft_token_map": str(tmp_path / "map.json")}}
    parameters = model_parameters(values, EngineConfig.from_dict(values), BUNDLED_MODEL)
    assert parameters["mtp_drafter"]["draft_token_map"] == str(tmp_path / "map.json")


@pytest.mark.parametrize("suffix", [".json", ".pt"])
def test_what_a_file_may_hold(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"map{suffix}"

    def write(value: Any) -> None:
        if suffix == ".pt":
            torch.save(value, path)
        else:
            path.write_text(json.dumps(value))

    write([5, 0, 99])
    assert read_token_map(path, 100) == [0, 5, 99]
    for value, message in (
        ([], r"must hold a list of token ids, got \[\]"),
        ({"ids": [1]}, "must hold a list of token ids, got"),
        ([1, 100], "element 1 must be a token id from 0 to 99, got 100"),
        ([-1], "element 0 must be a token id from 0 to 99, got -1"),
        ([1, True], "element 1 must be a token id from 0 to 99, got True"),
        ([1.0], "element 0 must be a token id from 0 to 99, got 1.0"),
        ([7, 3, 7], "holds 3 token ids, 1 of them twice"),
    ):
        write(value)
        with pytest.raises(ConfigError, match=rf"speculative_config.draft_token_map: .*{message}"):
            read_token_map(path, 100)
    path.write_bytes(b"[1, 2")
    with pytest.raises(ConfigError, match=rf"draft_token_map: {path} cannot be read"):
        read_token_map(path, 100)
    path.unlink()
    with pytest.raises(ConfigError, match=rf"draft_token_map: {path} cannot be read: .*missing"):
        read_token_map(path, 100)


def test_tensors_of_torch(tmp_path: Path) -> None:
    """As SGLang reads them: a tensor, or a list of numbers or tensors."""
    for value in (torch.tensor([4, 2]), torch.tensor([4, 2], dtype=torch.int32), [torch.tensor(4), 2]):
        torch.save(value, tmp_path / "freq.pt")
        assert read_token_map(tmp_path / "freq.pt", 10) == [2, 4]
    for value in (torch.tensor([[4, 2]]), torch.tensor([4.0])):
        torch.save(value, tmp_path / "freq.pt")
        with pytest.raises(ConfigError, match="must hold a list of token ids, got 'a tensor"):
            read_token_map(tmp_path / "freq.pt", 10)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (make_with_layers(eagles, "SpecForge"), "d2t"),
        (make_with_layers(blocks, "DFlash of speculators"), "d2t"),
        (make_heads("Medusa, few tokens"), "token_map"),
    ],
)
def test_a_drafter_with_tokens_of_its_own(make: Callable[[Path], Made], names: str, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    made = make(tmp_path)
    ids = write_map(made, tmp_path / "map.json")
    with pytest.raises(ModelError, match=rf"{names} names the tokens that .* leave draft_token_map out .*\(it names {len(ids)}\)"):
        serve(made[0], **options(made, tmp_path / "map.json"))


def test_a_map_is_made_of_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokens that they have most, and the end of answers; it is not written over, and a part of it is not left."""
    text = "def read(path):\n    return path\n" * 20
    (tmp_path / "code.py").write_text(text)
    command = ["token-map", str(BUNDLED_MODEL), "--data", str(tmp_path / "code.py"), "--size", "8", "--out", str(tmp_path / "map.json")]
    assert main(command) == 0
    assert "8 of 4096 tokens" in capsys.readouterr().out
    counts = torch.tensor(Tokenizer(BUNDLED_MODEL).encode(text, add_special_tokens=False)).bincount(minlength=4096)
    ids, end = read_token_map(tmp_path / "map.json", 4096), json.loads((BUNDLED_MODEL / "config.json").read_text())["eos_token_id"]
    assert end in ids and len(ids) == 8
    others = torch.ones(4096, dtype=torch.bool)
    others[ids] = False
    assert min(int(counts[token_id]) for token_id in ids if token_id != end) >= int(counts[others].max())
    assert main(command) == 2 and "map.json exists already" in capsys.readouterr().err
    own = [*command[:-1], str(tmp_path / "full.json")]

    def begin_and_fail(path: Path, _: str) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", begin_and_fail)
        assert main(own) == 2 and f"--out {tmp_path / 'full.json'}: No space left on device" in capsys.readouterr().err
    assert main(own) == 0
    assert main([*command[:-4], "--size", "4097", "--out", str(tmp_path / "other.json")]) == 2
    assert "--size must be from 1 to 4096" in capsys.readouterr().err
