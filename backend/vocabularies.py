"""Vocabularies of other formats as a tokenizer.json of the `tokenizers` library: GGUF's metadata, SentencePiece's models. No torch.

A byte-level vocabulary has its merges, and its file names how text is cut before (`PRE_TOKENIZERS`). SentencePiece's has scores, of which the
order of merges follows (Kudo and Richardson 2018): two pieces are joined where the joined one's score is the best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of tokens, by SentencePiece's numbers, which GGUF has as well."""
SPACE = "▁"

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_WORDS, QWEN2_WORDS = _WORDS % "{1,3}", _WORDS % ""
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_REST}"
DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a byte-level vocabulary's text is cut before merges."""

    patterns: tuple[str, ...]
    """One after the other, each within the pieces that the ones before it left."""
    is_whole: bool = False
    """A piece that is a token as a whole is not merged anew."""
    has_bos: bool = False
    """The first token is put before a text, unless the file says otherwise."""
    is_composed: bool = False
    """Text is brought to Unicode's form NFC before."""


_LLAMA3 = PreTokenizer((LLAMA3_WORDS,), is_whole=True, has_bos=True)
_GPT2 = PreTokenizer((GPT2_WORDS,))
_QWEN2 = PreTokenizer((QWEN2_WORDS,), is_composed=True)
_DIGITS = PreTokenizer((r"\p{N}", GPT2_WORDS))
_GLM4 = PreTokenizer((LLAMA3_WORDS,))
_DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", DEEPSEEK3_WORDS))
_NOT_HAN = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_WORDS = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN[0]}*{_NOT_HAN[1]}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN[0]}+{_NOT_HAN[1]}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}|\p{{N}}{{1,3}}|{_REST}"
_RARE = "\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68\U00010570-\U000105bc\U00016e40-\U00016e7f\U0001d400-\U0001d7cb\U0001df00-\U0001df1e"
"""Letters with a case that DeepSeek's list of them does not have."""
_CASED = rf"[\p{{Lu}}\p{{Lt}}\p{{Ll}}&&[^{_RARE}]]"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_MARKS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
_DEEPSEEK2 = PreTokenizer((r"[\r\n]", rf"\s?{_CASED}+", rf"\s?{_MARKS}+", r"\s+$", _EAST_ASIAN, r"\p{N}"))
_CODER = PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}"))
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "tekken": PreTokenizer((TEKKEN_WORDS,), is_whole=True, has_bos=True),
    "glm4": _GLM4,
    "chatglm-bpe": _GLM4,
    "deepseek-llm": _DEEPSEEK2,
    "deepseek-v3": _DEEPSEEK3,
    "deepseek-coder": _CODER,
    "dbrx": PreTokenizer((LLAMA3_WORDS,)),
    "gpt-4o": PreTokenizer((O200K_WORDS,)),
    "kimi-k2": PreTokenizer((KIMI_WORDS,), is_whole=True),
}
"""By the names that llama.cpp gives them (llama-vocab.cpp)."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id, and what each is."""

    tokens: Sequence[str]
    kinds: Sequence[int]
    where: str
    """The file, for complaints."""

    def ids(self) -> dict[str, int]:
        """Raises ModelError for a token that is there twice: one of the two could not be written."""
        found: dict[str, int] = {}
        for number, token in enumerate(self.tokens):
            if token in found:
                raise ModelError(f"{self.where}: token {number} is {token!r:.40}, and so is token {found[token]}")
            found[token] = number
        return found

    def added(self) -> list[dict[str, Any]]:
        """Tokens that are found in text before anything else, and those that are no text."""
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": number, "content": token, **flags, "special": kind in (CONTROL, UNKNOWN)}
            for number, (token, kind) in enumerate(zip(self.tokens, self.kinds))
            if kind in (CONTROL, UNKNOWN) or (kind == USER_DEFINED and token and SPACE not in token)
        ]


def byte_level_tokenizer(vocabulary: Vocabulary, merges: Sequence[str], pre: str, *, before: Sequence[int], after: int | None) -> dict[str, Any]:
    """tokenizer.json of a byte-level vocabulary, its merges `left right` in their order.

    pre: a key of PRE_TOKENIZERS. before, after: ids of tokens that are put around a text. Raises ModelError.
    """
    if pre not in PRE_TOKENIZERS:
        raise ModelError(f"{vocabulary.where}: the pre-tokenizer {pre!r:.40} is not known; known: {', '.join(PRE_TOKENIZERS)}")
    rules, ids, pairs = PRE_TOKENIZERS[pre], vocabulary.ids(), []
    for number, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if not right or any(part not in ids for part in (left, right, left + right)):
            raise ModelError(f"{vocabulary.where}: merge {number} ({merge!r:.40}) is not of two tokens that make one")
        pairs.append([left, right])
    cuts: list[dict[str, Any]] = [{"type": "Split", "pattern": {"Regex": own}, "behavior": "Isolated", "invert": False} for own in rules.patterns]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return _file(
        vocabulary,
        normalizer={"type": "NFC"} if rules.is_composed else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*cuts, level]},
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        model={"vocab": ids, "merges": pairs, "ignore_merges": rules.is_whole},
        around=(before, after),
    )


def sentencepiece_tokenizer(
    vocabulary: Vocabulary,
    scores: Sequence[float],
    *,
    has_space_prefix: bool,
    is_prefixed_once: bool = False,
    before: Sequence[int],
    after: int | None,
) -> dict[str, Any]:
    """tokenizer.json of a SentencePiece BPE vocabulary with the score of each token.

    has_space_prefix: texts begin with a space, and what stands behind a special token does, unless is_prefixed_once.
    """
    ids = vocabulary.ids()
    unknown = next((token for token, kind in zip(vocabulary.tokens, vocabulary.kinds) if kind == UNKNOWN), None)
    has_bytes = any(kind == BYTE for kind in vocabulary.kinds)
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    stages: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if has_space_prefix:
        stages.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    normalizer: dict[str, Any] | None = replaced
    pre_tokenizer = None
    if has_space_prefix and is_prefixed_once:
        normalizer, pre_tokenizer = None, {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
    elif has_space_prefix:
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, replaced]}
    return _file(
        vocabulary,
        normalizer=normalizer,
        pre_tokenizer=pre_tokenizer,
        decoder={"type": "Sequence", "decoders": stages},
        model={
            "vocab": ids,
            "merges": _merges_of(vocabulary, ids, scores),
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": has_bytes,
        },
        around=(before, after),
    )


def _merges_of(vocabulary: Vocabulary, ids: Mapping[str, int], scores: Sequence[float]) -> list[list[str]]:
    """Every way in which a piece is two others, the best pieces first."""
    pieces = {token for token, kind in zip(vocabulary.tokens, vocabulary.kinds) if kind in (NORMAL, USER_DEFINED)}
    found = []
    for token in vocabulary.tokens:
        if token not in pieces:
            continue
        ways = [(token[:cut], token[cut:]) for cut in range(1, len(token)) if token[:cut] in pieces and token[cut:] in pieces]
        ways.sort(key=lambda way: (ids[way[0]], ids[way[1]]))
        found += [(-scores[ids[token]], left, right) for left, right in ways]
    found.sort(key=lambda merge: merge[0])  # stable: equal scores in the vocabulary's order
    return [[left, right] for _, left, right in found]


def _file(
    vocabulary: Vocabulary,
    *,
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    decoder: dict[str, Any],
    model: dict[str, Any],
    around: tuple[Sequence[int], int | None],
) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _put_around(vocabulary, *around),
        "decoder": decoder,
        "model": {"type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "unk_token": None, **model},
    }


def _put_around(vocabulary: Vocabulary, before: Sequence[int], after: int | None) -> dict[str, Any] | None:
    """A template that puts tokens before and after a text."""
    if not before and after is None:
        return None

    def template(names: tuple[str, ...]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for number, name in enumerate(names):
            found += [{"SpecialToken": {"id": vocabulary.tokens[own], "type_id": number}} for own in before]
            found.append({"Sequence": {"id": name, "type_id": number}})
            found += [{"SpecialToken": {"id": vocabulary.tokens[after], "type_id": number}}] if after is not None else []
        return found

    around = [*before, *([] if after is None else [after])]
    special = {vocabulary.tokens[i]: {"id": vocabulary.tokens[i], "ids": [i], "tokens": [vocabulary.tokens[i]]} for i in around}
    return {"type": "TemplateProcessing", "single": template(("A",)), "pair": template(("A", "B")), "special_tokens": special}
