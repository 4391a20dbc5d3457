"""Answers of a given form: always of that form, with every method the tokens of plain decoding, and never at others' cost."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import scipy
import tokenizers
import torch

from backend import SamplingParams, limited_process, step_drafting
from backend.config import BUNDLED_MODEL
from backend.errors import RequestError
from backend.grammar import Grammars, Matcher, fill_masks, fit_drafts
from backend.grammar.endless import is_endless
from backend.grammar.proving import Prover
from backend.schema_numbers import settle_numbers
from backend.step import draft_phase
from backend.structured_outputs import MAX_CHOICES, StructuredOutputs
from backend.text import Tokenizer
from kernels.ops import mask_logits
from tests.conftest import EVERY_METHOD, code_prompts
from tests.small import LLM
from tests.test_methods import METHODS, PLAIN, Asked, ids_of, run

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LINE = r"def [a-z_]{3,10}\(self\):\n    return [0-9]{1,4}"
FORMS: list[dict[str, Any]] = [
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"json": json.dumps(SCHEMA), "whitespace_pattern": "[ \n]{1,2}"},
    {"regex": LINE},
    {"choice": ["self.width", "self.height", "other thing"]},
    {"json_object": True, "disable_any_whitespace": True},
    {"grammar": 'start: "x" ("+" NUM){1,4} ";"\nNUM: /[0-9]{1,3}/'},
    {"grammar": 'root ::= "[" item ("," item)? "]"\nitem ::= "yes" | "no"'},
]
TOKENS = 64


def check_form(form: dict[str, Any], text: str) -> None:
    if "choice" in form:
        assert text in form["choice"]
    elif "regex" in form:
        assert re.fullmatch(form["regex"], text)
    elif "json_object" in form:
        assert isinstance(json.loads(text), dict)
    elif "json" in form:
        value = json.loads(text)
        assert list(value) == ["name", "age", "tags"] and len(value["name"]) <= 12 and 0 <= value["age"] <= 150
        assert set(value["tags"]) <= {"red", "green", "blue"} and 1 <= len(value["tags"]) <= 3
    else:
        assert re.fullmatch(r"x(\+\d{1,3}){1,4};|\[(yes|no)(,(yes|no))?\]", text)


def formed(index: int, **options) -> SamplingParams:
    """Greedy, or seeded; every third request is free."""
    form = None if index % 3 == 2 else FORMS[index % len(FORMS)]
    temperature = [0.0, 1.0, 0.7][index % 4 % 3]
    limit = 24 if form is None else TOKENS
    return SamplingParams(**{"max_tokens": limit, "temperature": temperature, "seed": 70 + index, "structured_outputs": form, **options})


@pytest.fixture(params=["waiting", "ahead"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return request.getfixturevalue({"waiting": "llm_all", "ahead": "llm_ahead"}[request.param])


@pytest.fixture(scope="module")
def prompts(llm_all) -> list[list[int]]:
    return [llm_all.engine.tokenizer.encode(p) for p in code_prompts(21, (60, 300), seed=9)]


@pytest.fixture(scope="module")
def plain(llm_plain, prompts) -> list:
    return run(llm_plain, [Asked(p, formed(i), PLAIN) for i, p in enumerate(prompts)])


@pytest.fixture(scope="module")
def grammars(llm_plain) -> Grammars:
    model = llm_plain.engine.worker.model
    return Grammars(llm_plain.engine.tokenizer, model.vocab_size, model.eos_token_ids)


def ends_of(outputs) -> list:
    return [(o.text, o.finish_reason) for o in outputs]


# -- the same tokens, of the form ---------------------------------------------------------------------------------------------


def test_answers_have_their_form(plain):
    whole = 0
    for index, output in enumerate(plain):
        form = formed(index).structured_outputs
        if form is not None and output.finish_reason == "stop":
            check_form(FORMS[index % len(FORMS)], output.text)
            whole += 1
        assert set(output.sources) == {"target"}
    assert whole >= 12


def test_drafts_change_nothing(llm, prompts, plain):
    """Every method in one batch with free requests."""
    choices = [*METHODS.values(), {"method": "mtp", "num_speculative_tokens": 6}, {"method": "ngram", "num_speculative_tokens": 8}, PLAIN]
    for shift in (0, 4):
        outputs = run(llm, [Asked(p, formed(i), choices[(i + shift) % len(choices)]) for i, p in enumerate(prompts)])
        assert ids_of(outputs) == ids_of(plain)
        assert ends_of(outputs) == ends_of(plain)
        assert {s for o in outputs for s in o.sources} >= {"target", "grammar", "mtp", "ngram", "suffix"}


@pytest.mark.parametrize("strategy", ["greedy", "rejection", "topp"])
def test_strategies_keep_the_form(llm, prompts, strategy):
    choices = [{**METHODS[m], "verify_strategy": strategy} for m in ("mtp", "ngram", "mtp with suffix", "mtp with ngram")]
    outputs = run(llm, [Asked(p, formed(i), choices[i % len(choices)]) for i, p in enumerate(prompts)])
    for index, output in enumerate(outputs):
        if index % 3 != 2 and output.finish_reason == "stop":
            check_form(FORMS[index % len(FORMS)], output.text)
    assert sum(o.stats.accepted for o in outputs) > 0


CHUNKS, FEW_PAGES = {"max_num_batched_tokens": 24, "max_batch_size": 16}, {"num_pages": 22, "enable_prefix_caching": False}


@pytest.mark.parametrize(("options", "is_ahead"), [(CHUNKS, True), (FEW_PAGES, False), (FEW_PAGES, True)], ids=str)
def test_chunks_and_preemption_change_nothing(llm_all, prompts, plain, options, is_ahead):
    options = dict(options)
    if "num_pages" in options:
        options["kv_cache_memory"] = options.pop("num_pages") * llm_all.engine.worker.store.page_bytes
    own = LLM(speculative_config=EVERY_METHOD, async_scheduling=is_ahead, **options)
    choices = [*METHODS.values(), PLAIN]
    outputs = run(own, [Asked(p, formed(i), choices[i % len(choices)]) for i, p in enumerate(prompts)])
    assert ids_of(outputs) == ids_of(plain)
    if "kv_cache_memory" in options:
        assert own.engine.metrics.preemptions > 0


TOGETHER: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "biases": {"logit_bias": dict.fromkeys(range(100, 160), 5.0)},
    "stop string": {"stop": ("e",), "include_stop": True},
    "min_tokens": {"min_tokens": 20},
    "ignore_eos": {"ignore_eos": True},
    "bad words": {"bad_words": ("red", "1")},
    "filters": {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "log-probabilities": {"logprobs": 3},
}


def test_parameters_act_together(llm_all, llm_plain, prompts):
    """Every set with every method, all in one batch."""
    asked = [(name, i, formed(i, **own)) for name, own in TOGETHER.items() for i in range(len(METHODS))]
    choices = list(METHODS.values())
    expected = run(llm_plain, [Asked(prompts[i], params, PLAIN) for _, i, params in asked])
    outputs = run(llm_all, [Asked(prompts[i], params, choices[i]) for _, i, params in asked])
    for (name, index, _), output, plain in zip(asked, outputs, expected, strict=True):
        assert output.token_ids == plain.token_ids and ends_of([output]) == ends_of([plain]), f"{name}, prompt {index}"
        if name != "stop string" and index % 3 != 2 and output.finish_reason == "stop":
            check_form(FORMS[index % len(FORMS)], output.text)


@pytest.mark.parametrize("strategy", ["target_match", "rejection"])
def test_model_drafters_draft_what_is_allowed(llm_all, prompts, strategy, monkeypatch):
    """On CPU: so nothing is left to be cut, and what comes is what came without."""
    cut: list[int] = []

    def fit(matcher: Matcher, token_ids: list[int], sources: list[str], num_drawn: int, limit: int, wants_forced: bool) -> Any:
        given = [i for i, who in zip(token_ids[:limit], sources) if who == "mtp"]
        count, _ = matcher.look_ahead(given, limit, False)
        cut.append(len(given) - count if matcher.after(given[:count]) is not None else 0)  # what follows a whole text is of no use
        return fit_drafts(matcher, token_ids, sources, num_drawn, limit, wants_forced)

    monkeypatch.setattr(step_drafting, "fit_drafts", fit)
    asked = {"method": "mtp", "num_speculative_tokens": 3, "verify_strategy": strategy}
    params = [SamplingParams(max_tokens=TOKENS, temperature=0, structured_outputs=StructuredOutputs(**form)) for form in FORMS]
    texts, numbers = [], []
    for is_masked in (True, False):
        if not is_masked:
            monkeypatch.setattr(draft_phase, "mask_draft", lambda logits, *_: logits)
        cut.clear()
        outputs = run(llm_all, [Asked(prompt, own, asked) for prompt, own in zip(prompts, params)])
        texts.append(ids_of(outputs))
        numbers.append((sum(cut), sum(output.stats.accepted for output in outputs)))
    (none, more), (some, fewer) = numbers
    assert none == 0 < some and more > fewer and texts[0] == texts[1]


def test_n_completions_each_follow(llm_all):
    own = SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=5, n=4, structured_outputs={"regex": LINE})
    texts = [o.text for o in llm_all.generate("class Box:\n", own, use_tqdm=False)[0].outputs]
    assert len(set(texts)) > 1
    for text in texts:
        check_form({"regex": LINE}, text)


def test_a_whole_text_ends_at_once(llm_all, llm_plain):
    """Nothing may follow it, so no end of text has to be computed, and min_tokens does not hold it off."""
    for own in (llm_plain, llm_all):
        output = own.generate("x", SamplingParams(max_tokens=9, min_tokens=9, structured_outputs={"choice": ["self.width"]}), use_tqdm=False)[
            0
        ].outputs[0]
        assert (output.text, output.finish_reason) == ("self.width", "stop")
        assert own.engine.worker.model.eos_token_ids.isdisjoint(output.token_ids)


# -- forced tokens ------------------------------------------------------------------------------------------------------------


def test_forced_tokens_are_drafts_without_a_drafter(llm_plain):
    own = SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=3, structured_outputs=FORMS[0])
    forced, without = (
        llm_plain.generate("class Box:\n", own, speculative=choice, use_tqdm=False)[0].outputs[0] for choice in (None, {"num_speculative_tokens": 0})
    )
    assert forced.token_ids == without.token_ids
    assert forced.sources.count("grammar") == forced.stats.accepted > 5 and without.stats.drafted == 0
    assert forced.stats.steps < without.stats.steps


def test_forced_tokens_can_be_left_out(llm_all):
    """Of requests without a drafter, and of those with one."""
    own = LLM(max_forced_tokens=0, speculative_config={"method": "none", "request_methods": ["ngram"]})
    asked = SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=3, structured_outputs=FORMS[0])
    assert own.generate("class Box:\n", asked, use_tqdm=False)[0].outputs[0].stats.drafted == 0
    choice = {"method": "ngram", "num_speculative_tokens": 5}
    without, forced = (o.generate("class Box:\n", asked, speculative=choice, use_tqdm=False)[0].outputs[0] for o in (own, llm_all))
    assert without.token_ids == forced.token_ids and "grammar" in forced.sources and "grammar" not in without.sources


class TestDrafts:
    """What is verified of drafts: `fit_drafts`."""

    @pytest.fixture
    def own(self, grammars) -> Matcher:
        return grammars.compile(StructuredOutputs(regex=r"self\.(width|height) = [0-9]{3}"))

    def split(self, llm_plain, text: str) -> list[int]:
        return llm_plain.engine.tokenizer.encode(text, add_special_tokens=False)

    def test_forbidden_ones_are_cut(self, own, llm_plain):
        good, bad = self.split(llm_plain, "self.width"), self.split(llm_plain, "def")
        fitted, sources, _ = fit_drafts(own, [*good, *bad, *good], ["ngram"] * 12, 0, len(good))
        assert (fitted, sources) == (good, ["ngram"] * len(good))
        fitted, sources, _ = fit_drafts(own, [*good, *bad, *good], ["ngram"] * 12, 0, 12)
        assert fitted[: len(good)] == good and llm_plain.engine.tokenizer.decode(fitted).startswith("self.width =")
        assert sources == ["ngram"] * len(good) + ["grammar"] * (len(fitted) - len(good))

    def test_a_drawn_one_stays_to_be_rejected(self, own, llm_plain):
        good, bad = self.split(llm_plain, "self.width"), self.split(llm_plain, "def")
        drafts = [*good, *bad, *good]
        fitted, sources, num_drawn = fit_drafts(own, drafts, ["mtp"] * len(drafts), len(drafts), 16)
        assert fitted == [*good, bad[0]] and len(sources) == num_drawn == len(good) + 1

    def test_nothing_changes_the_place(self, own, llm_plain):
        tokens = self.split(llm_plain, "self.width = 123")
        for _ in range(2):
            fit_drafts(own, tokens, ["ngram"] * len(tokens), 0, len(tokens))
            fill_masks([(own, tokens)])
        assert own.advance([*tokens, 0]) == len(tokens) and own.is_complete

    def test_the_end_is_a_draft_where_the_text_is_whole(self, grammars, llm_plain):
        (end,) = llm_plain.engine.worker.model.eos_token_ids
        tokens = self.split(llm_plain, "ab")
        own = grammars.compile(StructuredOutputs(regex="(ab)+"))
        assert fit_drafts(own, [*tokens, end, *tokens], ["mtp"] * 9, 0, 9)[0] == [*tokens, end]
        assert end not in fit_drafts(own, [end, *tokens], ["mtp"] * 9, 0, 9)[0]
        assert end not in fit_drafts(own.copy(ignores_end=True), [*tokens, end], ["mtp"] * 9, 0, 9)[0]


def test_masks_say_what_may_follow(grammars, llm_plain):
    """For every draft, each token of the vocabulary."""
    tokenizer, vocab_size = llm_plain.engine.tokenizer, llm_plain.engine.worker.model.vocab_size
    (end,) = llm_plain.engine.worker.model.eos_token_ids
    matchers = [grammars.compile(StructuredOutputs(**form)) for form in ({"regex": "(ab?c)+d*"}, {"choice": ["abc", "xyz"]})]
    asked = [
        (matchers[0], tokenizer.encode("abcab", add_special_tokens=False)),
        (matchers[1], []),
        (matchers[0].copy(), tokenizer.encode("acd", add_special_tokens=False)),
    ]
    masks, starts = fill_masks(asked)
    assert masks.shape == (sum(1 + len(d) for _, d in asked), -(-vocab_size // 32)) and starts == [0, 1 + len(asked[0][1]), 2 + len(asked[0][1])]
    logits = torch.zeros(len(masks), vocab_size)
    cu = torch.tensor([*starts, len(masks)], dtype=torch.int32)
    mask_logits(logits, torch.from_numpy(masks), torch.tensor(starts, dtype=torch.int32), cu)
    for (matcher, drafts), start in zip(asked, starts):
        for place in range(1 + len(drafts)):
            allowed = set(torch.nonzero(logits[start + place] == 0)[:, 0].tolist())
            own = matcher.inner.deep_copy()
            own.consume_tokens(drafts[:place])
            expected = {t for t in range(vocab_size) if t != end and own.validate_tokens([t])} | ({end} if own.is_accepting() else set())
            assert allowed == expected


def test_allowed_tokens(grammars, llm, llm_plain, hf_model):
    """The likeliest of them, with every method; an end of text where it is among them, and nowhere else."""
    prompt, (end,) = llm_plain.engine.tokenizer.encode("for i in range(3):\n    x += "), llm_plain.engine.worker.model.eos_token_ids
    ids = [*range(40, 61), 7, 300]
    masks, _ = fill_masks([(grammars.compile(StructuredOutputs(allowed_token_ids=own)), [41, 7]) for own in (ids, [*ids, end])])
    for row, mask in enumerate(masks):
        allowed = [t for t in range(32 * masks.shape[1]) if mask[t // 32] >> t % 32 & 1]
        assert allowed == sorted([*ids, end] if row > 2 else ids)
    form = {"allowed_token_ids": ids}
    answers = run(
        llm,
        [Asked(prompt, SamplingParams(max_tokens=12, temperature=0.0, structured_outputs=form), METHODS.get(name, PLAIN)) for name in ("", *METHODS)],
    )
    known, expected = list(prompt), []
    for _ in range(12):
        scores = hf_model(torch.tensor([known])).logits[0, -1]
        expected.append(max(sorted(ids), key=lambda t: scores[t].item()))
        known.append(expected[-1])
    assert all(own == expected for own in ids_of(answers)) and {own.finish_reason for own in answers} == {"length"}
    ending = SamplingParams(
        max_tokens=12, temperature=0.0, structured_outputs={"allowed_token_ids": [expected[0], end]}, logit_bias={end: 50.0}, min_tokens=2
    )
    (answer,) = run(llm_plain, [Asked(prompt, ending, PLAIN)])
    assert answer.finish_reason == "stop" and answer.token_ids[:2] == [expected[0]] * 2 and len(answer.token_ids) <= 3


@pytest.mark.parametrize("ids", ["5", [-1], [True], [1.0], [None], {"1": 2}], ids=str)
def test_allowed_tokens_are_a_list_of_ids(ids):
    with pytest.raises(ValueError, match="allowed_token_ids must be a list of token ids from 0 on, got"):
        StructuredOutputs.from_value({"allowed_token_ids": ids})


@pytest.mark.parametrize("is_special", [False, True], ids=["added", "special"])
def test_texts_that_a_token_of_another_meaning_writes(is_special):
    """Where they are forced they come in pieces, be they drafts or chosen one by one: grammars take such a token only where they name it."""
    tokenizer = Tokenizer(BUNDLED_MODEL)
    tokenizer.inner.add_tokens([tokenizers.AddedToken("<think>", special=is_special)])
    tokenizer.inner.add_tokens(["[A]", "<b", "< c>"])
    mark, size = tokenizer.inner.token_to_id("<think>"), tokenizer.inner.get_vocab_size()
    grammars = Grammars(tokenizer, size, [0])
    vocabulary = grammars.compile(StructuredOutputs(regex="x")).vocabulary
    added = set(tokenizer.inner.get_added_tokens_decoder()) - vocabulary.end_ids
    assert vocabulary.marks == {t for t in added if vocabulary.tokenizer.is_special_token(t)}
    for asked, text in (
        ({"regex": "<think>0[0-9]"}, "<think>00"),
        ({"json": {"const": "a<think>"}}, '"a<think>"'),
        ({"choice": ["<think> \u00e9", "<think> \u00e8"]}, "<think> \u00e8"),
        ({"grammar": f'start: "1" <[{mark}]> "2"'}, "1<think>2"),
    ):
        whole = grammars.compile(StructuredOutputs(**asked))
        for wants_forced in (False, True):
            matcher, said = whole.copy(), []
            while not matcher.is_complete:
                drafts, _, _ = fit_drafts(matcher, [], [], 0, 8, wants_forced)
                masks, _ = fill_masks([(matcher, drafts)])
                assert all(masks[place, t // 32] >> t % 32 & 1 for place, t in enumerate(drafts))
                last = np.nonzero(np.unpackbits(masks[len(drafts)].view(np.uint8), bitorder="little")[:size])[0]
                said += [*drafts, int(last[0])]  # the end of the text, or of two texts the first
                matcher.advance(said[-len(drafts) - 1 :])
            assert tokenizer.decode([t for t in said if t], skip_special_tokens=False) == text and (mark in said) == ("grammar" in asked)


def test_looking_ahead_leaves_a_matcher_where_it_is(grammars, llm_plain):
    """Also over ordinary tokens that a grammar names by their ids."""
    drafts = llm_plain.engine.tokenizer.encode("x12", add_special_tokens=False)
    matcher = grammars.compile(StructuredOutputs(grammar=f"start: <[{drafts[0]}]> /[0-9]+/"))
    for _ in range(2):
        masks, _ = fill_masks([(matcher, drafts)])
        assert matcher.look_ahead(drafts, 99)[0] == len(drafts) and matcher.look_ahead([], 1)[1] == drafts[:1]
    for place, draft in enumerate(drafts):
        assert np.array_equal(masks[place], fill_masks([(matcher, ())])[0][0])
        matcher.advance([draft])


def test_masks_forbid_in_their_rows_alone():
    logits = torch.arange(5 * 40, dtype=torch.float32).view(5, 40).to(torch.bfloat16)
    masks = torch.from_numpy(np.array([[0b101, 0], [-1, -1], [0, 1 << 7]], dtype=np.int32))
    before = logits.clone()
    mask_logits(logits, masks, torch.tensor([-1, 1, 0], dtype=torch.int32), torch.tensor([0, 2, 4, 5], dtype=torch.int32))
    assert torch.equal(logits[:3], before[:3])
    assert torch.isfinite(logits[3]).nonzero()[:, 0].tolist() == [39] and torch.isfinite(logits[4]).nonzero()[:, 0].tolist() == [0, 2]
    with pytest.raises(ValueError, match=r"masks are torch.int32 \[3, 1\]; contiguous int32 \[M, 2\] is needed for V = 40"):
        mask_logits(logits, masks[:, :1].contiguous(), torch.tensor([0], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32))


def test_rejection_draws_from_the_masked_distribution(llm, hf_model):
    """The model's drafts are drawn without the mask: many are forbidden."""
    tokenizer = llm.engine.tokenizer
    prompt = tokenizer.encode("self.width = 10\nself.height = 20\nself.depth = ")
    asked = SamplingParams(max_tokens=2, temperature=1.0, n=50, structured_outputs={"grammar": 'start: "1" /[ 02,.)\\n]/'})
    counts: Counter[int] = Counter()
    for round_ in range(16):
        own = {"method": "mtp", "num_speculative_tokens": 1, "verify_strategy": "rejection"}
        result = llm.generate(
            {"prompt_token_ids": prompt}, SamplingParams(**{**_fields(asked), "seed": 1000 * round_}), speculative=own, use_tqdm=False
        )[0]
        counts.update(o.token_ids[1] for o in result.outputs)
    (one,) = tokenizer.encode("1", add_special_tokens=False)
    with torch.inference_mode():
        logits = hf_model(torch.tensor([[*prompt, one]])).logits[0, -1]
    allowed = sorted({tokenizer.encode(f"1{c}", add_special_tokens=False)[-1] for c in " 02,.)\n"})
    probs = logits[allowed].softmax(-1).double().numpy()
    assert set(counts) <= set(allowed)
    kept = [i for i, p in enumerate(probs) if p * counts.total() >= 5]
    seen = np.array([counts[allowed[i]] for i in kept], dtype=float)
    assert scipy.stats.chisquare(seen, probs[kept] / probs[kept].sum() * seen.sum()).pvalue > 1e-3


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in ("max_tokens", "temperature", "n", "structured_outputs")}


# -- what cannot be -----------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "schema that is no JSON": ({"json": '{"type": '}, "^structured_outputs.json is not valid JSON"),
    "nothing at all": ({"json": False}, "structured_outputs.json: nothing fulfils the schema false"),
    "unknown type": ({"json": {"type": "strng"}}, "structured_outputs.json: Invalid type: strng"),
    "nothing fulfils": ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, r"minimum \(5\) is greater than maximum \(3\)"),
    "no such definition": ({"json": {"$ref": "#/$defs/x"}}, "'/\\$defs/x' does not exist"),
    "elsewhere": ({"json": {"$ref": "https://example.com/schema.json"}}, "example.com/schema.json"),
    "not enforced": ({"json": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: \\["uniqueItems"\\]'),
    "too deep": ({"json": '{"items":' * 400 + "{}" + "}" * 400}, "structured_outputs.json"),
    "bad regex": ({"regex": "[a-"}, "structured_outputs.regex: .*unclosed character class"),
    "look-around": ({"regex": "(?=a)b"}, "look-around"),
    "regex that nothing matches": ({"regex": r"[^\s\S]"}, "no text but the empty one fulfils it"),
    "the empty text": ({"regex": ""}, "no text but the empty one fulfils it"),
    "unknown rule": ({"grammar": 'start: "a" | foo'}, 'structured_outputs.grammar: .*unknown name: "foo"'),
    "no grammar": ({"grammar": "root ::= ("}, "structured_outputs.grammar"),
    "an integer that is rounded": ({"json": {"enum": ["x", 2**53 + 1]}}, "json: enum 9007199254740993 cannot be enforced: it would be written as"),
    "a bound that is rounded": ({"json": {"type": "integer", "minimum": 2**53 + 1}}, "json: minimum 9007199254740993 cannot be enforced"),
    "a bound beyond 64 bits": ({"json": {"items": {"type": "integer", "maximum": -(10**19)}}}, "maximum -10000000000000000000 cannot be"),
    "an exclusive bound": ({"json": {"type": "integer", "exclusiveMaximum": -(2**62)}}, "exclusiveMaximum -4611686018427387904 cannot be"),
    "a bound too close by": ({"json": {"exclusiveMinimum": 0, "maximum": 1e-13}}, "exclusiveMinimum 0 cannot be enforced beside a bound that is no"),
    "no number": ({"json": {"items": {"minimum": float("nan")}}}, "json: at /items: minimum must be a finite number, got nan"),
    "no value": ({"json": {"enum": [1, float("inf")]}}, "json: enum has inf, which JSON cannot write"),
    "a token that the model does not have": ({"allowed_token_ids": [3, 4096]}, "allowed_token_ids has 4096; the model's tokens are 0 to 4095"),
    "no token but ends": ({"allowed_token_ids": [0]}, r"allowed_token_ids has nothing but ends of text \(0\)"),
    "the least of 64 bits": ({"json": {"const": -(2**63)}}, "const -9223372036854775808 cannot be enforced"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused(grammars, name):
    asked, message = REFUSED[name]
    with pytest.raises(RequestError, match=message) as caught:
        grammars.compile(StructuredOutputs(**asked))
    assert len(str(caught.value)) < 700


INNER: dict[str, dict[str, Any]] = {
    "/properties/a/properties/b~1c: Invalid type: strng": {"properties": {"a": {"properties": {"b/c": {"type": "strng"}}}}},
    "/items/anyOf/1: regex parse error": {"items": {"anyOf": [{"type": "string"}, {"type": "string", "pattern": "(["}]}},
    "/properties/x: Pointer '/$defs/none' does not exist": {"properties": {"x": {"$ref": "#/$defs/none"}}},
    "/properties/a/properties/b: Unsatisfiable schema: minimum (5) is greater than maximum (2)": {
        "properties": {"a": {"type": "object", "properties": {"b": {"type": "integer", "minimum": 5, "maximum": 2}}, "required": ["b"]}},
        "required": ["a"],
        "type": "object",
    },
    '/$defs/X/items: Unimplemented keys: ["not"]': {"properties": {"a": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"items": {"not": {}}}}},
    "/$defs/N: no value with an end fulfils it: it requires itself": {
        "properties": {"n": {"$ref": "#/$defs/N"}},
        "required": ["n"],
        "type": "object",
        "$defs": {"N": {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}, "required": ["n"]}},
    },
    "/$defs/N/properties/m: Invalid type: x": {"$ref": "#/$defs/N", "$defs": {"N": {"properties": {"n": {"$ref": "#/$defs/N"}, "m": {"type": "x"}}}}},
}


@pytest.mark.parametrize("place", INNER)
def test_a_refusal_says_where_in_a_schema(grammars, place):
    for schema in (INNER[place], json.dumps(INNER[place])):
        with pytest.raises(RequestError, match=re.escape(f"structured_outputs.json: at {place}")):
            grammars.compile(StructuredOutputs(json=schema))


NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}}}
ENDS: list[tuple[dict[str, Any], bool]] = [
    (NODE, True),
    ({**NODE, "required": ["v"]}, True),
    ({**NODE, "required": ["next"]}, False),
    ({**NODE, "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]}, True),
    ({**NODE, "properties": {"next": {"oneOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]}}, "required": ["next"]}, False),
    ({**NODE, "type": ["object", "null"], "required": ["next"]}, True),
    ({"type": "array", "items": {"$ref": "#"}}, True),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, False),
    ({"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 1}, True),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"$ref": "#/$defs/c"}, "c": {"$ref": "#/$defs/a~1b"}}}, False),
    ({"$ref": "#/$defs/0", "$defs": {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(2000)}}, True),
    ({"$ref": "#/$defs/x", "properties": 5, "required": 5, "$defs": 5, "type": {}}, True),
]


@pytest.mark.parametrize(("schema", "ends"), ENDS, ids=range(len(ENDS)))
def test_schemas_that_require_themselves(schema, ends):
    assert is_endless(schema) is not ends


BREAKING: dict[str, dict[str, Any]] = {
    "a negative number without end": {"grammar": 'start: %json {"const": -9223372036854775808}'},
    "rules that lead to rules": {"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(5000)) + 'r5000: "a"'},
    "references to references": {"json": {"$ref": "#/$defs/0", "$defs": {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(3000)} | {"3000": {}}}},
    "a remainder of a million": {"json": {"type": "integer", "multipleOf": 999983}},
    "two remainders": {"json": {"type": "integer", "multipleOf": 7919, "allOf": [{"multipleOf": 7907}]}},
}
"""Each ends the process that compiles it, or keeps it at work for as long as it may be."""


@pytest.mark.parametrize("name", BREAKING)
def test_what_breaks_the_compiler_breaks_nothing_else(name, monkeypatch):
    start = limited_process.subprocess.Popen

    def start_shortened(command: list[str], **options: Any) -> Any:
        code = command[-1].replace("; main()", "; import backend.grammar.proving as p; p.PROVE_SECONDS = 0.5; main()")
        return start([*command[:-1], code], **options)

    monkeypatch.setattr(limited_process.subprocess, "Popen", start_shortened)
    own, asked = Grammars(Tokenizer(BUNDLED_MODEL), 4096, [0]), StructuredOutputs(**BREAKING[name])
    message = f"structured_outputs.{asked.form}: it is nested too deeply, too large, or has a number that is, for its compiler"
    with pytest.raises(RequestError, match=message):
        own.compile(asked)
    assert own.compile(StructuredOutputs(regex="once")), "the next one is compiled"
    monkeypatch.setattr(Prover, "prove", lambda *asked: pytest.fail("it is tried again"))
    with pytest.raises(RequestError, match=message):
        own.compile(asked)


@pytest.mark.parametrize(
    ("schema", "values", "others"),
    [
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, [-(2**63) + 1024, -1, 0, 2**63 - 1], [2**63]),
        ({"minimum": 0, "maximum": 2**64 - 1}, [0, 2**63 - 1], [-1]),
        ({"minimum": 2**53 + 3, "maximum": 2**53 + 6}, [2**53 + 4, 2**53 + 6], [2**53 + 2, 2**53 + 7]),
        ({"exclusiveMinimum": -(2**63), "exclusiveMaximum": 2**63}, [-(2**63) + 1024, 2**63 - 1], [2**63]),
        ({"enum": [2**60, 2**63 - 1]}, [2**60, 2**63 - 1], [2**60 + 1]),
        ({"minimum": 3, "default": 2**53 + 1, "anyOf": [{"maximum": 5}]}, [3, 5], [2, 6]),
    ],
)
def test_large_integers(grammars, schema, values, others):
    """Bounds of 64 bits, as generators of schemas write them: what is allowed fulfils them."""

    def follows(value: int) -> bool:
        own = grammars.compile(StructuredOutputs(json={"type": "integer", **schema}))
        tokens = own.vocabulary.tokenizer.tokenize_str(str(value))
        return own.inner.try_consume_tokens(tokens) == len(tokens) and own.inner.is_accepting()

    assert [follows(v) for v in values] == [True] * len(values) and not any(follows(v) for v in others)


@pytest.mark.parametrize(
    ("schema", "values", "others"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.25", "0.001", "0.5"], ["0", "0.0", "-0", "0.6"]),
        ({"type": "number", "exclusiveMinimum": 99.0, "exclusiveMaximum": 99.25}, ["99.1"], ["99", "99.0", "99.25"]),
        ({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, ["-1.25", "-1.5"], ["-1", "-1.0", "-0.9"]),
        ({"type": "number", "minimum": 5, "exclusiveMinimum": True, "maximum": 5.5}, ["5.25", "5.5"], ["5", "5.0", "5.75"]),
        ({"type": "integer", "maximum": 5, "exclusiveMaximum": True, "minimum": 3, "exclusiveMinimum": False}, ["3", "4"], ["2", "5"]),
        ({"type": "number", "allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, ["0.25", "0.5"], ["0", "0.0", "0.6"]),
        ({"type": "integer", "allOf": [{"exclusiveMaximum": -1}, {"minimum": -2.5}]}, ["-2"], ["-1", "-3"]),
        ({"type": "number", "$ref": "#/$defs/a", "minimum": -0.5, "$defs": {"a": {"exclusiveMaximum": 0}}}, ["-0.25"], ["0", "-0", "0.0"]),
        ({"type": "string", "pattern": '^[^"]*$'}, [r'"a\\b\n"', '""', '"[^"'], [r'"\""', r'"a\"b"']),
        ({"type": "string", "pattern": r"^\[?[^\\]+$"}, [r'"[\""', '"x"'], [r'"\\"', r'"[x\\"']),
        ({"type": "object", "patternProperties": {'^[^"]$': {}}, "additionalProperties": False}, ['{"a":1}'], [r'{"\"":1}']),
    ],
)
def test_what_the_compiler_would_allow(grammars, schema, values, others):
    """A whole number that is excluded, also as draft 4 says it, where the other bound is less than one away, wherever it stands; in negated classes
    quotation marks and backslashes."""
    own = grammars.compile(StructuredOutputs(json=schema))

    def follows(text: str) -> bool:
        matcher, tokens = own.copy().inner, own.vocabulary.tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    assert [follows(v) for v in values] == [True] * len(values) and not any(follows(v) for v in others)


def test_bounds_that_are_rounded_may_be_left_out(grammars):
    schema = {"type": "object", "properties": {"minimum": {"type": "integer", "minimum": 10**20}, "const": {"const": 1}}}
    assert settle_numbers(schema, True) == {"type": "object", "properties": {"minimum": {"type": "integer"}, "const": {"const": 1}}}
    with pytest.raises(ValueError, match="minimum 100000000000000000000 cannot be enforced"):
        settle_numbers(schema, False)


@pytest.mark.parametrize("bound", ["maximum", "exclusiveMaximum"])
def test_numbers_below_more_than_64_bits(grammars, bound):
    """The compiler has none such that are no integers: a closer bound is as good."""
    for largest in (2**63, 1e19, 1.7e308):
        own = grammars.compile(StructuredOutputs(json={"type": "number", "minimum": 0.5, bound: largest}))
        tokens = own.vocabulary.tokenizer.tokenize_str("1234567890.5")
        assert own.inner.try_consume_tokens(tokens) == len(tokens) and own.inner.is_accepting()


def test_keywords_that_ask_for_nothing(grammars):
    """Strict requests too: zod writes the first for every record."""
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "array", "uniqueItems": False}}
    own = grammars.compile(StructuredOutputs(json=record))
    tokens = own.vocabulary.tokenizer.tokenize_str('{"a": [1, 1]}')
    assert own.inner.try_consume_tokens(tokens) == len(tokens) and own.inner.is_accepting()
    with pytest.raises(RequestError, match="propertyNames"):
        grammars.compile(StructuredOutputs(json={**record, "propertyNames": {"pattern": "^a"}}))
    for name in ("password", "path"):  # pydantic's SecretStr and Path: any text
        assert grammars.compile(StructuredOutputs(json={"type": "string", "format": name}))
    with pytest.raises(RequestError, match="Unknown format: file-path"):  # which has to exist
        grammars.compile(StructuredOutputs(json={"type": "string", "format": "file-path"}))


def test_what_vllms_clients_send_beside():
    """All fields of its StructuredOutputsParams, at the values that ask for nothing."""
    beside = {"disable_fallback": False, "disable_additional_properties": False, "structural_tag": None, "_backend": None, "_backend_was_auto": False}
    assert StructuredOutputs.from_value({"choice": ["a"], "json": None, **beside}) == StructuredOutputs(choice=("a",))
    for key, value in (("disable_additional_properties", True), ("structural_tag", "{}")):
        with pytest.raises(ValueError, match=f"unknown key '{key}'"):
            StructuredOutputs.from_value({"choice": ["a"], key: value})


def test_properties_whose_names_come_again(grammars):
    """They count once for who reads the answer: no number of them is held to that they may miss."""
    numbers = {"type": "object", "additionalProperties": {"type": "integer"}}
    own = {"properties": {"a": {}, "b": {}}, "additionalProperties": False, "required": ["a", "b"]}
    for schema in ({**numbers, "minProperties": 1}, {**numbers, "minProperties": 2, "required": ["a"]}, {**own, "minProperties": 2}):
        assert grammars.compile(StructuredOutputs(json={"type": "object", **schema}))
    for schema in ({**numbers, "minProperties": 2}, {**numbers, "minProperties": 3, "required": ["a"]}):
        with pytest.raises(RequestError, match=r"minProperties \d cannot be enforced"):
            grammars.compile(StructuredOutputs(json=schema))
        assert grammars.compile(StructuredOutputs(json=schema, is_lenient=True))


@pytest.mark.parametrize("texts", [["a", "ab", "abc"], ['"', "\\", "\n", "${x}", "/a/", "\0"], [f"k{i}" for i in range(MAX_CHOICES)]], ids=len)
def test_choices_are_followed(grammars, texts):
    """Those that begin others, those that notations of grammars would take for something, and as many as there may be."""
    asked = StructuredOutputs(choice=texts)
    for text in texts[:3] + texts[-3:]:
        own = grammars.compile(asked)
        tokens = own.vocabulary.tokenizer.tokenize_str(text)
        assert own.inner.try_consume_tokens(tokens) == len(tokens) and own.inner.is_accepting()
        fill_masks([(own, [])])
        assert not own.inner.is_error() and not own.inner.try_consume_tokens(own.vocabulary.tokenizer.tokenize_str("?"))


@pytest.mark.parametrize(
    "grammar", ['?start: sum\n?sum: N "+" N -> add\nN: /[0-9]/', '!start: "1" "+" "2"', "start[max_tokens=9]: /[0-9+]+/", 'x ::= "1+2"\nroot ::= x']
)
def test_both_notations_of_grammars_are_known(grammars, grammar):
    own = grammars.compile(StructuredOutputs(grammar=grammar))
    tokens = own.vocabulary.tokenizer.tokenize_str("1+2")
    assert own.inner.try_consume_tokens(tokens) == len(tokens) and own.inner.is_accepting()


def test_the_schema_that_anything_fulfils(grammars):
    for schema in (True, "true", {}):
        own = grammars.compile(StructuredOutputs(json=schema))
        tokens = own.vocabulary.tokenizer.tokenize_str('[1, {"a": null}]')
        assert own.inner.try_consume_tokens(tokens) == len(tokens) and own.inner.is_accepting()


def test_keywords_that_cannot_be_enforced_may_be_left_out(grammars):
    assert grammars.compile(StructuredOutputs(json={"type": "array", "uniqueItems": True}, is_lenient=True))


DEAD_ENDS: dict[str, dict[str, Any]] = {
    "bad words forbid what it asks for": {"bad_words": ("b",), "structured_outputs": {"regex": "(ab|bb){6}"}},
    "too much work": {"structured_outputs": {"regex": "((a?){300}){300}a{300}"}},
}


@pytest.mark.parametrize("name", DEAD_ENDS)
def test_a_dead_end_costs_its_own_request_alone(llm_ahead, prompts, plain, name):
    """In the middle of its text."""
    engine, errors = llm_ahead.engine, []
    asked = SamplingParams(max_tokens=40, temperature=0.0, **DEAD_ENDS[name])
    engine.submit(list(prompts[0]), asked, lambda d: errors.append(d.error), request_id="stuck")
    assert ids_of(run(llm_ahead, [Asked(prompts[2], formed(2), PLAIN)])) == [plain[2].token_ids]
    assert isinstance(errors[-1], RequestError) and "no token was both allowed by the grammar and possible" in str(errors[-1])


def test_grammars_are_compiled_once(grammars):
    first, second = (grammars.compile(StructuredOutputs(regex="once [a-z]+")) for _ in range(2))
    assert first is not second and first.inner is not second.inner
    tokens = first.vocabulary.tokenizer.tokenize_str("once abc")
    assert first.advance(tokens) == len(tokens)
    assert second.advance(tokens[:1]) == 1, "each request has a place of its own"
