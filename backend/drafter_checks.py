"""Checks the folder of a model drafter of any kind before anything is loaded: as `backend.model_checks` does of models. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from backend.errors import ConfigError, ModelError
from backend.model_checks import (
    BUFFERS,
    check_config,
    check_drafter,
    check_fits_target,
    check_model,
    check_rounded_parts,
    check_weights,
    describe_names,
    find_architecture,
    has_own_drafter,
    read_model_config,
    read_spec,
)
from backend.model_files import explain_missing, find_pickled, find_weights, list_pickled, read_config
from backend.models.dflash_spec import DflashSpec, read_dflash
from backend.models.eagle_spec import (
    MASK_KEYS,
    PARD_KEYS,
    TYPE_KEY,
    EagleSpec,
    choose_parallel,
    merge_config,
    read_eagle,
    read_eagle3,
    read_mask_token,
)
from backend.models.families import ARCHITECTURES, DRAFTERS
from backend.models.heads_spec import HEADS, MEDUSA_PREFIX, HeadsSpec, LstmSpec, Sizes, SpeculatorSpec
from backend.models.quantized_config import read_checkpoint_quantization
from backend.models.quantized_spec import CACHE_TENSORS
from backend.models.rope_spec import read_context_len
from backend.models.spec import WeightList
from backend.models.values import Values
from backend.quantization_config import QuantizationConfig
from backend.shared_tokens import read_shared_tokens
from backend.speculative_config import MODEL_METHODS, SpeculativeConfig
from backend.speculative_names import find_unnamed
from backend.tokenizer_checks import check_same_tokens

DEFAULT_LEN = 2048
"""transformers' of Llama, which some drafters do not name; it matters to extended contexts alone."""
MOST_LAYERS = 1024
"""Of a target that is not known: which of them a drafter taps changes none of its own sizes."""
LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")
HEAD = re.compile(r"(?!.*\.res_connection\.)(?:medusa_heads\.)?(?:hydra_mlp|hydra_lm_head|blocks|lm_heads)\.(\d+)\.")
LEARNED = re.compile(
    r"(?:medusa_heads\.)?(?:hydra_mlp|hydra_lm_head|blocks|lm_heads)\."
    r"|(?:model\.)?(?:(?:layers\.\d+|midlayer|transformer)\.|(?:fc|fc_norm\.\d+|aux_norm_\w+|input_norm|embedding_layernorm|hidden_states_layernorm)\.(?:weight|bias)$)"
)
"""Weights of a drafter's layers, and of what config.json may or may not say that its inputs go through: none of them is there for nothing."""

MODULES_METHOD = "mtp"
"""Whose modules may come with a model."""
SPECULATORS = {"eagle": "eagle", "eagle3": "eagle3", "peagle": "eagle3", "dflash": "dflash", "dspark": "dspark"}
"""Methods by what speculators calls them."""
OWN_WEIGHTS = {
    "eagle3": re.compile(r"(?:model\.)?(?:midlayer|layers\.0)\.hidden_norm\."),
    "dspark": re.compile(r"(?:markov_head|markov_w1)\."),
    "dflash": re.compile(r"(?:model\.)?hidden_norm\."),
    "eagle": re.compile(r"(?:model\.)?fc\.|fusion_fc\."),
    "medusa": re.compile(r"(?:medusa_heads\.)?(?:\d+\.(?:medusa_layers\.)?\d+\.linear|blocks\.\d+\.layers|lm_heads\.\d+)\."),
    "hydra": re.compile(r"hydra_mlp\.|hydra_lm_head\."),
    "mlp_speculator": re.compile(r"(?:speculator\.)?(?:emb|forget_emb)\.0\."),
}
"""Of each method a weight that no drafter of a later one has, nor any model."""
OWN_WORDS = {
    "dspark": ("dspark",),
    "dflash": ("dflash", "dflash_config"),
    "eagle3": ("eagle3", "eagle_config", "draft_vocab_size"),
    "eagle": ("eagle", "add_para_norm"),
    "medusa": ("medusa", "medusa_num_heads", "medusa_num_layers", "truncated_vocab_size"),
    "hydra": ("hydra", "hydra_num_heads", "hydra_head_arch"),
    "mlp_speculator": ("speculator", "n_predict"),
}
"""Likewise, where the weights do not say it: a word in the name of the class or in model_type, then keys."""


def find_method(folder: Path, *, has_weights: bool = True) -> str:
    """The method that the drafter of a folder is of, whatever target it is for. Raises ModelError where neither config.json nor the names of the
    weights say it. has_weights: false where they are made up."""
    config = read_config(folder)
    given, kind = config.get("architectures"), config.get("model_type")
    classes = [name for name in given if isinstance(name, str)] if isinstance(given, list) else []
    if (made := config.get(TYPE_KEY)) is not None:
        if not isinstance(made, str) or made not in SPECULATORS:
            raise ModelError(f"{folder}/config.json: {TYPE_KEY} is {made!r:.80}, which names no method; known: {', '.join(SPECULATORS)}")
        return SPECULATORS[made]
    if any(name in DRAFTERS and name not in ARCHITECTURES for name in classes):
        return MODULES_METHOD
    # EAGLE's authors give drafters their target's class: weights say more.
    pickled = find_pickled(folder)
    names: Collection[str] = ()
    if has_weights:
        names = list_pickled(pickled) if pickled is not None else find_weights(folder) if any(folder.glob("*.safetensors")) else ()
    for method, pattern in OWN_WEIGHTS.items():
        if any(pattern.match(name) for name in names):
            return method
    words = " ".join([*classes, str(kind)]).lower()
    for method, (word, *keys) in OWN_WORDS.items():
        if word in words or any(config.get(key) is not None for key in keys):
            # DeepSeek's class is of drafters without the head that makes it a DSpark drafter, too.
            return "dflash" if method == "dspark" and config.get("markov_rank") == 0 else method
    try:
        if pickled is None and find_architecture(config, folder):
            return MODULES_METHOD if has_own_drafter(config) else "draft_model"
    except ModelError:
        pass
    weights = sorted(name for name in names if name.endswith(".weight"))
    looked = f"weights such as {weights[0]}" if weights else "no names of weights"
    if pickled is not None:  # no model's are read of such
        looked += f" in {pickled.name}"
    raise ModelError(f"{folder}/config.json: architectures {given!r:.200} is no drafter or model known here (model_type {kind!r:.80}, and {looked})")


def settle_method(values: Any, find: Callable[[str], Path], *, has_weights: bool = True) -> tuple[Any, str]:
    """A speculative_config as it was given -> the same, where it names a drafter and no method with the method that the folder is of, and a line
    that says so. find: where a drafter is. Raises ConfigError where the folder does not say it, and what find raises."""
    if (found := find_unnamed(values)) is None:
        return values, ""
    key, asked, method_key = found
    read_config(folder := find(asked))  # of a folder that is none, that alone is said
    try:
        method = find_method(folder, has_weights=has_weights)
    except ModelError as error:
        raise ConfigError(f"speculative_config.method must be given: {asked} does not say it: {error}; one of {', '.join(MODEL_METHODS)}") from None
    line = f"speculative_config.method is {method}, which the drafter in {folder} is made for"
    return {**values, key: str(folder), method_key: method}, line


def check_drafter_folder(
    method: str, folder: Path, model: Path, *, has_weights: bool = True, is_parallel: bool | None = None, has_other_tokens: bool = False
) -> int | None:
    """How many drafts it makes in a step at most, where its heads or its blocks say so. Raises ModelError for a folder that holds no
    drafter of this method for the model. has_weights: false where they are made up; is_parallel: whether it has to draft in parallel; None: as it
    was made; has_other_tokens: its tokenizer is another one."""
    target = read_model_config(model)
    if method == "mtp":
        length = read_context_len(Values(target, f"{model}/config.json"))
        own = read_config(folder)
        check_fits_target(own, folder, hidden_size=target["hidden_size"], vocab_size=target["vocab_size"], max_model_len=length)
        check_drafter(folder, has_weights=has_weights)
    elif method == "draft_model":
        check_model(folder, has_weights=has_weights)
        if has_other_tokens:
            read_shared_tokens(folder, model)
            return None
        if has_weights:
            check_same_tokens(folder, model)
        read_parallel(folder, is_parallel)
    else:
        sizes = {"hidden_size": target["hidden_size"], "vocab_size": target["vocab_size"], "num_layers": target["num_hidden_layers"]}
        # What is in an archive of tensors is known to torch alone.
        is_readable = has_weights and find_pickled(folder) is None
        names: Collection[str] = find_weights(folder) if is_readable else ()
        if method in ("eagle", "eagle3"):
            spec = read_eagle_spec(folder, names, is_multi_layer=method == "eagle3", **sizes)
            choose_parallel(spec, names, is_parallel)
            weights = WeightList()
            spec.list_weights(weights, sizes["vocab_size"])
            if is_readable:
                quantization = read_checkpoint_quantization(read_config(folder), folder)
                check_weights(folder, weights, f"num_hidden_layers is {len(spec.layers)}", quantization)
            return None
        weights = WeightList()
        if method in ("dflash", "dspark"):
            block = read_dflash_spec(folder, names, is_spark=method == "dspark", **sizes)
            block.list_weights(weights)
            if is_readable:
                quantization = read_checkpoint_quantization(read_config(folder), folder)
                check_weights(folder, weights, f"num_hidden_layers is {len(block.layers)}", quantization)
            return block.max_drafts
        heads = read_heads_spec(method, folder, names, model)
        heads.list_weights(weights)
        if is_readable:
            if any(name.startswith(MEDUSA_PREFIX) for name in names):
                weights.ignored |= {name for name in names if not name.startswith(MEDUSA_PREFIX)}
            check_weights(folder, weights, f"{folder} holds heads", read_checkpoint_quantization(read_config(folder), folder))
        # Medusa's authors' configurations may say fewer than an archive holds; of weights that are made up there are as many as they say.
        if is_readable or not has_weights or method != "medusa":
            return heads.num_heads
    return None


def list_drafter_weights(folder: Path) -> WeightList:
    """The weights of a drafter of any kind but drafting heads, whatever target it is for: sizes that are the target's are taken from what it says
    itself. Raises ModelError for a folder that holds none."""
    if _find_listed(read_config(folder), DRAFTERS):
        weights = WeightList()
        check_drafter(folder).list_weights(weights)
        return weights
    method = find_method(folder)
    if method in HEADS:
        raise ModelError(f"{folder} holds heads of method {method}, which are kept as they are stored")
    names, values = find_weights(folder), _read_values(folder)
    hidden, vocab_size = values.integer("hidden_size", 2**17), values.integer("vocab_size", 2**22)
    hidden = values.integer("target_hidden_size", 2**17, default=hidden)
    places = (values, *(values.section(name) for name in ("dflash_config", "eagle_config")))
    stated = next((place for place in places if place.has("num_target_layers")), values)
    sizes = {"hidden_size": hidden, "vocab_size": vocab_size, "num_layers": stated.integer("num_target_layers", MOST_LAYERS, default=MOST_LAYERS)}
    weights = WeightList()
    try:
        if method.startswith("eagle"):
            spec = read_eagle_spec(folder, names, is_multi_layer=method == "eagle3", **sizes)
            spec.list_weights(weights, vocab_size)
        else:
            read_dflash_spec(folder, names, is_spark=method == "dspark", **sizes).list_weights(weights)
        check_weights(folder, weights, f"num_hidden_layers is {values.get('num_hidden_layers')}")
    except ModelError as error:
        raise ModelError(f"{folder} is no drafter of method {method}: {error}") from None
    return weights


def _find_listed(config: Mapping[str, Any], known: Collection[str]) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and any(isinstance(name, str) and name in known for name in names)


def check_drafter_rounding(method: str, folder: Path, quantization: QuantizationConfig) -> None:
    """Raises ModelError where experts alone of a drafter are to be rounded, which has none."""
    if quantization.moe_quant_type is None or quantization.dense_quant_type is not None:
        return
    weights = WeightList()
    if method == "mtp":
        check_drafter(folder, has_weights=False).list_weights(weights)
    elif method == "draft_model":
        read_spec(folder).list_weights(weights)
    check_rounded_parts(f"{folder}/config.json", weights, quantization)


def check_num_drafts(config: SpeculativeConfig, folder: Path, most: int | None) -> None:
    """Raises ConfigError where more are wanted than its drafter makes in a step."""
    steps = config.num_model_steps or 1
    if most is None or steps <= most or config.has_usual_steps:  # what nobody asked for is no more than there is
        return
    default = ": without it, it is num_speculative_tokens" if steps == config.num_speculative_tokens else ""  # which alone may be given
    raise ConfigError(f"speculative_config.num_model_steps is {steps}; the drafter in {folder} makes {most} drafts a step at most{default}")


def read_parallel(directory: str | Path, wanted: bool | None) -> int | None:
    """The mask token of a draft model that makes its drafts in parallel (PARD); None: it makes one after the other.

    wanted: None: where the model was made for it. Raises ModelError where it is wanted of a model that was not, or the token is none of its.
    """
    config = read_config(directory)
    values = Values(config, f"{directory}/config.json")
    found = read_mask_token(values, values.integer("vocab_size", 2**22))
    if wanted and found is None:
        raise ModelError(
            f"{values.where} names no mask token ({', '.join(MASK_KEYS)}): drafts are made in parallel by drafters that were trained for it; "
            "leave parallel_drafting out"
        )
    return found if wanted or (wanted is None and any(values.has(key) for key in PARD_KEYS)) else None


def read_heads_spec(
    method: str, directory: str | Path, names: Collection[str], target_directory: str | Path
) -> HeadsSpec | SpeculatorSpec | LstmSpec:
    """What drafting heads are made of, for the target in a folder. names: of their weights, where they are known. Raises ModelError."""
    target = Values(read_model_config(target_directory), f"{target_directory}/config.json")
    sizes = Sizes(target.integer("hidden_size", 2**17), target.integer("vocab_size", 2**22), target.integer("num_hidden_layers", 1024))
    values = Values(read_config(directory), f"{directory}/config.json")
    quantization = read_checkpoint_quantization(read_config(directory), directory)
    spec, weights = HEADS[method](values, names, sizes, target), WeightList()
    spec.list_weights(weights)
    _check_learned(values, [name for name in names if (found := HEAD.match(name)) and int(found[1]) < spec.num_heads], weights)

    def is_held(name: str) -> bool:
        return name in names or (quantization is not None and quantization.find(name.removesuffix(".weight"), names) is not None)

    if names and (missing := [name for name in (*weights.required, *weights.ids) if not is_held(name)]):
        raise ModelError(f"{directory}: weight {describe_names(missing)} is missing{explain_missing(missing, names)}")
    for group in weights.optional:  # of an archive this is not known before: those that are missing would be zero
        if 0 < len(absent := [name for name in group if name not in names]) < len(group):
            raise ModelError(f"{directory}: weight {describe_names(absent)} is missing, though the projections beside it have theirs")
    return spec


def read_eagle_spec(
    directory: str | Path, names: Collection[str], *, is_multi_layer: bool, hidden_size: int, vocab_size: int, num_layers: int
) -> EagleSpec:
    """What an EAGLE drafter is made of, for a target of these sizes. names: of its weights, where they are known. Raises ModelError."""
    values = _read_values(directory)
    spec = (read_eagle3 if is_multi_layer else read_eagle)(values, names, num_layers)
    _check_sizes(values, spec.target_hidden_size, hidden_size, vocab_size)
    _check_layers(values, names, len(spec.layers))
    weights = WeightList()
    spec.list_weights(weights, vocab_size)
    _check_learned(values, names, weights)
    return spec


def read_dflash_spec(
    directory: str | Path, names: Collection[str], *, is_spark: bool, hidden_size: int, vocab_size: int, num_layers: int
) -> DflashSpec:
    """What a DFlash or DSpark drafter is made of, likewise. Raises ModelError."""
    values = _read_values(directory)
    spec = read_dflash(values, names, num_layers, is_spark=is_spark)
    _check_sizes(values, spec.target_hidden_size, hidden_size, vocab_size)
    _check_layers(values, names, len(spec.layers))
    weights = WeightList()
    spec.list_weights(weights)
    _check_learned(values, names, weights)
    return spec


def _read_values(directory: str | Path) -> Values:
    """Ids of special tokens are not looked at: a drafter's are never used, and published ones name tokens of other models (SpecForge's)."""
    found = {"max_position_embeddings": DEFAULT_LEN} | merge_config(read_config(directory), f"{directory}/config.json")
    return check_config({key: value for key, value in found.items() if key not in ("bos_token_id", "eos_token_id")}, directory)


def _check_layers(values: Values, names: Collection[str], count: int) -> None:
    """Raises ModelError where there are weights of more layers than config.json says: without those, hardly a draft would be accepted."""
    if extra := [name for name in names if (found := LAYER.match(name)) and int(found[1]) >= count]:
        rule = f"num_hidden_layers is {count}, and the weights are those of another drafter"
        raise ModelError(f"{values.where}: weight {extra[0]} would not be used: {rule}")


def _check_learned(values: Values, names: Collection[str], weights: WeightList) -> None:
    """Raises ModelError where a weight that changes every draft would not be used, however it is stored."""
    known = {*weights.required, *(name for group in weights.optional for name in group)}
    parts = {name.rpartition(".")[0] for name in known}
    for name in names:
        is_known = name in known if name.endswith((".weight", ".bias")) else name.rpartition(".")[0] in parts
        if LEARNED.match(name) and not is_known and not BUFFERS.search(name) and not CACHE_TENSORS.search(name):
            rule = "config.json does not say what it is for, and without it hardly a draft would be right"
            raise ModelError(f"{values.where}: weight {name} would not be used: {rule}")


def _check_sizes(values: Values, target_hidden_size: int, hidden_size: int, vocab_size: int) -> None:
    """What the drafter says of its target, and what the target's sizes are."""
    key = "target_hidden_size" if values.has("target_hidden_size") else "hidden_size"
    for name, own, other in ((key, target_hidden_size, hidden_size), ("vocab_size", values.integer("vocab_size", 2**22), vocab_size)):
        if own != other:
            raise ModelError(f"{values.where}: {name} is {own}; the target's is {other}")
