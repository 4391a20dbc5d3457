"""Writes a Hugging Face folder of a GGUF file: `foretoken convert`, and what `--model FILE.gguf` does once."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from backend.chat_template import ChatTemplate
from backend.errors import ModelError
from backend.models.families import ARCHITECTURES, DRAFTERS
from backend.models.families.gguf import GGUF_ARCHITECTURES, GgufModel, Metadata
from backend.models.gguf_file import GgufFile, shortest, stored_dtype
from backend.models.shards import ShardWriter, check_new, new_folder
from backend.models.spec import DecoderSpec, Shapes, WeightList
from backend.models.values import Values
from backend.sampling_defaults import is_other
from backend.vocabularies import CONTROL, NORMAL, PRE_TOKENIZERS, Vocabulary, byte_level_tokenizer, sentencepiece_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FACTORS = ("rope_freqs", "rope_factors_short", "rope_factors_long")
UNREAD = re.compile(r"^(rope_freqs|rope_factors_(short|long))\.weight$|\.attn_rot_embd\.weight$")
"""Tables of rotary embeddings, which config.json says."""
EXPERT = re.compile(r"(\.experts)\.(\d+)\.")
ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|user|>", "<|observation|>")
"""Tokens that end a turn in the families' templates: most files name one end alone."""
MAX_TOKENS = 2**22


def write_folder(path: Path, out: Path, dtype: str = "auto") -> None:
    """The model of the GGUF file `path`, in the new folder `out`.

    dtype: of its weights; auto: as they are in the file, and 16 bits for those in fewer. Raises ModelError for what is missing, damaged or not
    supported, by the names of the file; ConfigError without the package `gguf`, or for a folder that is not empty.
    """
    check_new(out)
    own = _plan(GgufFile(path))
    weights, config = own.weights, own.config
    with new_folder(out) as part:
        with ShardWriter(part) as writer:
            for name, shape in tqdm(own.wanted.items(), desc=f"Converting {path.name}", unit="tensor", disable=None):  # on terminals alone
                numbers, kind = weights.read(name, shape)
                kept = stored_dtype(kind, numbers) if dtype == "auto" else DTYPES[dtype]
                writer.add({name: numbers.to(kept)})
        _write(part / "generation_config.json", own.generation)
        (part / "tokenizer.json").write_text(json.dumps(own.tokenizer, ensure_ascii=False), "utf-8")
        _write(part / "tokenizer_config.json", own.settings)
        _write(part / "config.json", {"dtype": own.dtype if dtype == "auto" else dtype} | config)


def read_file(path: Path) -> tuple[GgufFile, dict[str, Any], DecoderSpec]:
    """A file that can be converted, what config.json would say of it, and what its model is made of. Raises ModelError, ConfigError."""
    own = _plan(GgufFile(path))
    return own.file, {"dtype": own.dtype} | own.config, own.spec


@dataclass(frozen=True, slots=True)
class _Plan:
    """What becomes of a file."""

    file: GgufFile
    config: dict[str, Any]
    spec: DecoderSpec
    generation: dict[str, Any]
    """generation_config.json."""
    tokenizer: dict[str, Any]
    settings: dict[str, Any]
    """tokenizer_config.json."""
    weights: _Weights
    wanted: Shapes

    @property
    def dtype(self) -> str:
        """What the model computes in on a GPU, unless config.json says another."""
        return _model_dtype([self.weights.kind(name, shape) for name, shape in self.wanted.items() if len(shape) == 2])


def _plan(file: GgufFile) -> _Plan:
    """Without a look at numbers. Raises ModelError for what is missing, left over, of another shape, or not supported."""
    model = _read_model(file)
    spec = _read_spec(file, model)
    tokenizer, settings, ends = _read_tokenizer(file, spec.vocab_size)
    config = model.config | {"bos_token_id": _token(file, "bos", spec.vocab_size), "eos_token_id": ends}
    weights = _Weights(file, model, spec)
    wanted = weights.list()
    if unused := [name for name in file.shapes if name not in weights.used and not UNREAD.search(name)]:
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        raise ModelError(f"{file.path}: tensor {', '.join(unused[:5])}{more} would not be used: the metadata are those of another model")
    weights.check(wanted)
    return _Plan(file, config, spec, _generation(file, config), tokenizer, settings, weights, wanted)


def _read_spec(file: GgufFile, model: GgufModel) -> DecoderSpec:
    return ARCHITECTURES[model.config["architectures"][0]](Values(model.config, str(file.path)))


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _model_dtype(kinds: list[str]) -> str:
    """What a model of weights in these forms computes in on a GPU."""
    same = set(kinds)
    return "float32" if same == {"F32"} else "float16" if same <= {"F16", "F32"} else "bfloat16"


# -- metadata -----------------------------------------------------------------------------------------------------------------------


def _read_model(file: GgufFile) -> GgufModel:
    name = file.values.get("general.architecture")
    if not isinstance(name, str) or name not in GGUF_ARCHITECTURES:
        raise ModelError(f"{file.path}: general.architecture {name!r:.40} is not supported; known: {', '.join(GGUF_ARCHITECTURES)}")
    own = {key.removeprefix(f"{name}."): value for key, value in file.values.items() if key.startswith(f"{name}.")}
    shapes, factors = file.shapes, {}
    for part in FACTORS:
        if (tensor := f"{part}.weight") in shapes:
            factors[part] = tuple(shortest(file.read(tensor, shapes[tensor]).flatten().tolist()))
    return GGUF_ARCHITECTURES[name](Metadata(Values(own, f"{file.path}: {name}"), shapes, factors))


def _token(file: GgufFile, kind: str, vocab_size: int) -> int | None:
    """The id of bos, eos and so on. Raises ModelError for one that there is no such token for."""
    key = f"tokenizer.ggml.{kind}_token_id"
    value = file.values.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size):
        raise ModelError(f"{file.path}: {key} is {value!r:.40}; it must be from 0 to {vocab_size - 1}")
    return value


def _generation(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """What generation_config.json says; a file may recommend how to sample. Raises ModelError for what no request could have."""
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    own = {name: value for key, name in names.items() if (value := file.values.get(f"general.sampling.{key}")) is not None}
    for key, name in names.items():
        if name in own:
            is_other(str(file.path), f"general.sampling.{key}", name, own[name])
    return {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"], **({"do_sample": True} if own else {}), **own}


# -- tokenizer ----------------------------------------------------------------------------------------------------------------------


def _read_tokenizer(file: GgufFile, vocab_size: int) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    """tokenizer.json, tokenizer_config.json, and the tokens that end a text. Raises ModelError."""
    tokens = _list(file, "tokens", str)
    if tokens is None:
        raise ModelError(f"{file.path} has no tokenizer.ggml.tokens: a model is served with its tokenizer")
    if len(tokens) > vocab_size:
        raise ModelError(f"{file.path}: tokenizer.ggml.tokens has {len(tokens)} tokens; the embedding has {vocab_size}")
    kinds = _list(file, "token_type", int, len(tokens)) or [NORMAL] * len(tokens)
    vocabulary = Vocabulary(tokens, kinds, str(file.path))
    names = {
        f"{kind}_token": _token(file, own, len(tokens)) for kind, own in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    kind = file.values.get("tokenizer.ggml.model")
    pre = file.values.get("tokenizer.ggml.pre", None if kind == "gpt2" else "")  # other kinds do not look at it
    if not isinstance(pre, str):
        raise ModelError(f"{file.path}: tokenizer.ggml.pre is {pre!r:.40}; it must be one of: {', '.join(PRE_TOKENIZERS)}")
    has_bos = kind == "llama" or (pre in PRE_TOKENIZERS and PRE_TOKENIZERS[pre].has_bos)
    before, after = (
        names[name] if file.values.get(f"tokenizer.ggml.add_{name}", default) else None
        for name, default in (("bos_token", has_bos), ("eos_token", False))
    )
    around = () if before is None else (before,)
    if kind == "gpt2":
        merges = _list(file, "merges", str)
        if merges is None:
            raise ModelError(f"{file.path} has no tokenizer.ggml.merges")
        tokenizer = byte_level_tokenizer(vocabulary, merges, pre, before=around, after=after)
    elif kind == "llama":
        scores = _list(file, "scores", float, len(tokens))
        if scores is None:
            raise ModelError(f"{file.path} has no tokenizer.ggml.scores")
        has_prefix = file.values.get("tokenizer.ggml.add_space_prefix", True)
        tokenizer = sentencepiece_tokenizer(vocabulary, scores, has_space_prefix=bool(has_prefix), before=around, after=after)
    else:
        raise ModelError(f"{file.path}: tokenizer.ggml.model {kind!r:.40} is not supported; known: gpt2, llama")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokens[number] for name, number in names.items() if number is not None},
        "clean_up_tokenization_spaces": False,
        "chat_template": _read_template(file),
    }
    ends = [_token(file, own, len(tokens)) for own in ("eos", "eot", "eom")]
    ends += [number for number, (token, own) in enumerate(zip(tokens, kinds)) if own == CONTROL and token in ENDS]
    return tokenizer, settings, list(dict.fromkeys(number for number in ends if number is not None))


def _read_template(file: GgufFile) -> Any:
    """As transformers reads it: text, or several by name. Raises ModelError for what is none: before weights are written, not after."""
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    known = {name: file.values.get(key) for name, key in keys.items()}
    for name, template in known.items():
        if template is not None and not isinstance(template, str):
            raise ModelError(f"{file.path}: {keys[name]} is {template!r:.80}; it must be text")
        if template:
            ChatTemplate(template, f"{file.path}: {keys[name]}")
    if known["tool_use"] is None:
        return known["default"]
    return [{"name": name, "template": template} for name, template in known.items() if template is not None]


def _list(file: GgufFile, key: str, kind: type, length: int | None = None) -> list[Any] | None:
    """A list of the tokenizer's. Raises ModelError for one of other things, or of another length."""
    key = f"tokenizer.ggml.{key}"
    found = file.values.get(key)
    if found is None:
        return None
    if not isinstance(found, list) or len(found) > MAX_TOKENS or not all(isinstance(own, kind) and own == own for own in found):  # NaN has no order
        raise ModelError(f"{file.path}: {key} is {found!r:.80}; it must be a list of {kind.__name__}, no more than {MAX_TOKENS}")
    if length is not None and len(found) != length:
        raise ModelError(f"{file.path}: {key} has {len(found)} entries; there are {length} tokens")
    return found


# -- weights ------------------------------------------------------------------------------------------------------------------------


class _Weights:
    """Hugging Face's weights of a file's tensors."""

    def __init__(self, file: GgufFile, model: GgufModel, spec: DecoderSpec) -> None:
        self._file, self._model, self._spec = file, model, spec
        gguf = file._gguf
        arch = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[file.values["general.architecture"]]
        self._names = gguf.get_tensor_name_map(arch, len(spec.layers) + model.config.get("num_nextn_predict_layers", 0))
        self._held = file.shapes
        self.used: set[str] = set()

    def list(self) -> Shapes:
        """All that the folder will have. Raises ModelError for what the file has no tensor for."""
        weights, config = WeightList(), self._model.config
        self._spec.list_weights(weights)
        architecture = config["architectures"][0]
        if config.get("num_nextn_predict_layers"):
            weights.add_known(DRAFTERS[architecture](Values(config, str(self._file.path))))
        optional = {name: shape for group in weights.optional for name, shape in group.items()}
        found = weights.required | {name: shape for name, shape in optional.items() if self._has(name)}
        for name in found:
            self.used.update(self._sources(name))
        if missing := [f"{source} ({name})" for name in found for source in self._sources(name) if source not in self._held]:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise ModelError(f"{self._file.path}: tensor {', '.join(missing[:5])}{more} is missing")
        return found

    def _tensor(self, name: str) -> str:
        """What llama.cpp calls a weight, or a stack of experts'; "" where it has no name for it."""
        name = EXPERT.sub(r"\1.", name).replace("e_score_correction_bias", "e_score_correction.bias")
        return self._names.get_name(name, (".weight", ".bias")) or ""

    def _sources(self, name: str) -> tuple[str, ...]:
        """The tensors that a weight is made of."""
        tensor = self._tensor(name)
        if tensor.endswith(".attn_kv_b.weight") and tensor not in self._held:
            return tensor.replace("attn_kv_b", "attn_k_b"), tensor.replace("attn_kv_b", "attn_v_b")
        return (tensor,)

    def _has(self, name: str) -> bool:
        return all(source in self._held for source in self._sources(name))

    def check(self, wanted: Shapes) -> None:
        """Raises ModelError for a tensor of another shape than the metadata make it."""
        for name, shape in wanted.items():
            for part in self._parts(name, shape):
                self._file.check(*part)

    def _parts(self, name: str, shape: tuple[int, ...]) -> Sequence[tuple[str, tuple[int, ...], int | None]]:
        """Of what a weight is made of: the tensor, its shape, and which of a stack it is."""
        sources, expert = self._sources(name), EXPERT.search(name)
        if len(sources) == 2:  # keys are stored for queries that are multiplied with them, the other way round
            heads, rank, key, value = self._latent_sizes
            return [(sources[0], (heads, rank, key), None), (sources[1], (heads, value, rank), None)]
        return [(sources[0], shape, int(expert[2]) if expert else None)]

    @property
    def _latent_sizes(self) -> tuple[int, ...]:
        return tuple(self._model.config[own] for own in ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"))

    def kind(self, name: str, shape: tuple[int, ...]) -> str:
        """The form that a weight is stored in."""
        return self._file.kind(self._parts(name, shape)[0][0])

    def read(self, name: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, str]:
        """A weight in float32, and the form that it was stored in."""
        found, kind = [self._file.read(*part) for part in self._parts(name, shape)], self.kind(name, shape)
        if len(found) == 2:  # keys and values of a latent's heads
            return torch.cat([found[0].transpose(1, 2), found[1]], dim=1).reshape(shape), kind
        (numbers,) = found
        if self._model.norm_offset and "norm" in name.rsplit(".", 2)[-2]:
            numbers -= self._model.norm_offset
        if self._model.is_permuted and (own := re.search(r"\.self_attn\.([qk])_proj\.(weight|bias)$", name)):
            heads = self._model.config["num_attention_heads" if own[1] == "q" else "num_key_value_heads"]
            numbers = numbers.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(shape)
        return numbers, kind
