"""What has a form may be thought about first: any text, then the mark, then the form and nothing else, whoever drafts across the border."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from backend import LLM, SamplingParams
from backend.config import BUNDLED_MODEL
from backend.grammar import Grammars, Matcher, fill_masks, fit_drafts
from backend.grammar.thinking import FORM, MAY_THINK, THINKING
from backend.structured_outputs import StructuredOutputs
from backend.text import Tokenizer
from tests.conftest import EVERY_METHOD
from tests.test_hand_offs import check_idle, pair  # noqa: F401 -- a fixture
from tests.test_methods import METHODS, PLAIN, Asked, ids_of, run

END = 0
THOUGHT = "x = 1\ny = 2\n</think>"
PROMPT = f"<think>\n{THOUGHT}\n\nprint(x, y)\n\n" * 6 + "<think>\n"
CALL = r"print\([xy], [0-9]{2}\)"


# A model that goes on as its prompt did: the tests' small one forgets to end a thought.


@pytest.fixture(scope="module")
def own_model() -> type[LLM]:
    return LLM


@pytest.fixture(scope="module")
def llm_plain() -> LLM:
    return LLM(enable_prefix_caching=False)


@pytest.fixture(scope="module")
def llm_all() -> LLM:
    return LLM(speculative_config=EVERY_METHOD)


@pytest.fixture(scope="module")
def llm_ahead() -> LLM:
    return LLM(speculative_config=EVERY_METHOD, async_scheduling=True)


@pytest.fixture(scope="module")
def plain_tokenizer() -> Tokenizer:
    """Without tokens for the marks: its `</`, `think` and `>` are others'."""
    return Tokenizer(BUNDLED_MODEL)


@pytest.fixture(scope="module")
def marked_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With a token for either mark, as models that think have."""
    folder = tmp_path_factory.mktemp("marked")
    shutil.copy(Path(BUNDLED_MODEL) / "tokenizer_config.json", folder)
    inner = tokenizers.Tokenizer.from_file(str(Path(BUNDLED_MODEL) / "tokenizer.json"))
    inner.add_tokens(["<think>", "</think>"])
    inner.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def allowed_in(masks: np.ndarray, row: int, size: int) -> set[int]:
    return set(np.nonzero(np.unpackbits(masks[row].view(np.uint8), bitorder="little")[:size])[0].tolist())


@pytest.mark.parametrize("is_marked", [False, True], ids=["by text", "by tokens"])
@pytest.mark.parametrize("state", [THINKING, MAY_THINK, FORM], ids=["thinks", "may think", "form"])
def test_masks_and_drafts_across_the_border(plain_tokenizer, marked_tokenizer, is_marked, state):
    """For every draft the masks are those of its place, and allow what may be taken in there."""
    tokenizer = marked_tokenizer if is_marked else plain_tokenizer
    size = tokenizer.inner.get_vocab_size()
    grammars = Grammars(tokenizer, size, [END])
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    texts = [
        THOUGHT + "print(x, 12)",
        "a < b </think",
        "<think>x</think>\n\nprint(x, 1",
        "\n<think>a</think>print(",
        "print(y, 12)",
        "x</think> no",
        "",
    ]
    drafts = [*map(encode, texts), [*encode("a"), END, *encode("b")]]
    rows = [(grammars.compile(StructuredOutputs(regex=CALL), state=state), own) for own in drafts]
    masks, starts = fill_masks(rows)
    num_formed = 0
    for (matcher, own), start in zip(rows, starts, strict=True):
        fitted, sources, _ = fit_drafts(matcher, own, ["ngram"] * len(own), 0, len(own) + 8)
        place = matcher
        for number in range(1 + len(own)):
            found = allowed_in(masks, start + number, size)
            if place.state >= THINKING:
                assert found == {t for t in range(size) if place.allows(t)}
            elif not place.is_complete:  # of tokens that a form forces, the mask has those alone that the tokenizer writes
                assert np.array_equal(masks[start + number], fill_masks([(place, ())])[0][0]) and all(map(place.allows, found))
            if number == len(own) or not place.allows(own[number]):
                break
            place = place.copy()
            place.advance([own[number]])
            num_formed += place.state == FORM
        assert fitted[:number] == own[:number] and set(sources[number:]) <= {"grammar"}
        assert place.after(fitted[number:]) is not None and matcher.state == (state if is_marked or state != MAY_THINK else FORM)
    assert num_formed > 0


def test_a_model_that_may_think_does_so_or_begins_with_the_form(marked_tokenizer):
    grammars = Grammars(marked_tokenizer, marked_tokenizer.inner.get_vocab_size(), [END])
    encode = lambda text: marked_tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    for text, is_good in (
        ("<think>\nx</think>yes", True),
        ("\n<think>x</think>no", True),
        ("yes", True),
        ("\n\nyes", False),
        ("<think>x</think>\nyes", False),
        ("<think></think>", False),
        ("x</think>yes", False),
    ):
        matcher: Matcher | None = grammars.compile(StructuredOutputs(choice=("yes", "no")), state=MAY_THINK)
        place = matcher
        for token_id in encode(text):
            place = place if place is None or not place.allows(token_id) else place.after([token_id]) or matcher
        whole = encode(text)
        count, _ = matcher.look_ahead(whole, 99)  # type: ignore[union-attr]
        assert (count == len(whole) and text.endswith(("yes", "no"))) == is_good, text
    without = Grammars(marked_tokenizer, encode("<think>")[0], [END])
    assert without.compile(StructuredOutputs(choice=("yes", "no")), state=MAY_THINK).state == FORM, "the model does not know the token"
    opened = grammars.compile(StructuredOutputs(choice=("yes", "no")), state=MAY_THINK).after(encode("\n"))
    assert opened is not None and opened.look_ahead([], 4) == (0, encode("<think>")), "nothing else may follow"


def asked(temperature: float, seed: int = 0, max_tokens: int = 72) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, structured_outputs={"regex": CALL})


def check_form(output) -> None:
    """Thoughts are free, and what is said after them has its form, unless `max_tokens` cut it."""
    _, mark, said = output.text.partition("</think>")
    assert output.finish_reason == ("stop" if re.fullmatch(CALL, said) else "length") and (mark or output.finish_reason == "length")


def test_few_pages_and_small_chunks_change_nothing(llm_plain):
    """Of requests that are set back in their thoughts and in their forms."""
    prompt, params = llm_plain.engine.tokenizer.encode(PROMPT)[-40:], [asked(0.4 * (seed % 4), seed) for seed in range(12)]
    expected = run(llm_plain, [Asked(prompt, own, PLAIN) for own in params])
    llm = LLM(
        kv_cache_memory=34 * llm_plain.engine.worker.store.page_bytes,
        enable_prefix_caching=False,
        max_num_batched_tokens=24,
        max_batch_size=16,
        speculative_config=EVERY_METHOD,
        async_scheduling=True,
    )
    assert ids_of(run(llm, [Asked(prompt, own, {"method": "mtp"}) for own in params])) == ids_of(expected)
    assert llm.engine.metrics.preemptions > 0
    llm.close()


@pytest.mark.parametrize("strategy", ["rejection", "topp"])
def test_strategies_keep_the_form(llm_all, llm_ahead, strategy):
    for llm in (llm_all, llm_ahead):
        prompt = llm.engine.tokenizer.encode(PROMPT)
        methods = ["mtp", "ngram", "mtp with suffix"]
        outputs = run(llm, [Asked(prompt, asked(0.6, seed), {**METHODS[own], "verify_strategy": strategy}) for seed, own in enumerate(methods * 2)])
        assert sum(output.stats.accepted for output in outputs) > 20 and any(output.finish_reason == "stop" for output in outputs)
        for output in outputs:
            check_form(output)


@pytest.mark.parametrize("fixture", ["llm_all", "llm_ahead"])
def test_drafts_change_nothing(request, llm_plain, fixture):
    """Tokens of plain decoding by every method."""
    llm = request.getfixturevalue(fixture)
    prompt = llm.engine.tokenizer.encode(PROMPT)
    params = [asked(0.0), asked(0.0, max_tokens=4), *(asked(0.2 * seed, seed) for seed in range(1, 5))]
    choices = list(METHODS.values())
    expected = run(llm_plain, [Asked(prompt, own, PLAIN) for own in params])
    for shift in (0, 3):
        outputs = run(llm, [Asked(prompt, own, choices[(i + shift) % len(choices)]) for i, own in enumerate(params)])
        assert ids_of(outputs) == ids_of(expected)
    assert expected[0].text.startswith(THOUGHT) and expected[0].finish_reason == "stop"
    assert expected[1].finish_reason == "length" and "</think>" not in expected[1].text
    for output in expected:
        check_form(output)


def test_prompts_of_another_node(llm_plain, pair):  # noqa: F811
    """The node that computes the prompt knows what may come first."""
    llm, link = pair(False)
    own = SamplingParams(max_tokens=72, temperature=0.0, structured_outputs={"json": {"type": "integer"}})
    before = llm.engine.hand_offs.num_fetched
    texts = [o.generate(PROMPT, own, use_tqdm=False)[0].outputs[0].text for o in (llm, llm_plain)]
    assert texts[0] == texts[1] and texts[0].startswith(THOUGHT) and isinstance(json.loads(texts[0].removeprefix(THOUGHT)), int)
    assert llm.engine.hand_offs.num_fetched == before + 1 and not llm.engine.hand_offs.fallbacks
    check_idle(link)
