"""Checks a model folder before anything is loaded: what config.json says, and that its weights are the ones it speaks of.

A damaged folder that loads serves wrong answers with every light green, so the launcher checks in the first second, and whoever
loads a model checks again. No torch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backend.errors import ConfigError, ModelError
from backend.model_files import (
    ADAPTER,
    ADAPTER_FILE,
    INDEX_FILE,
    MERGED,
    WEIGHTS_FILE,
    explain_missing,
    find_end_tokens,
    find_nonzero,
    find_weights,
    has_same_weights,
    is_named,
    open_weights,
    read_config,
)
from backend.models.families import ARCHITECTURES, DRAFTERS, OLDER_NAMES, TEXT_MODELS, WITH_IMAGES
from backend.models.moe_spec import FUSED_PART, UNFUSED, MoeSpec, settle_fused, settle_shared
from backend.models.mtp_spec import MtpSpec
from backend.models.quantized_config import read_checkpoint_quantization
from backend.models.quantized_spec import CACHE_TENSORS, CheckpointQuantization, Expected
from backend.models.rope_spec import read_context_len
from backend.models.spec import AttentionSpec, DecoderSpec, Shapes, WeightList, settle_tied
from backend.models.text_part import LAYERS, place_weights
from backend.models.values import Values
from backend.parallel.split import check_divides
from backend.quantization_config import SCHEMES, STORED, QuantizationConfig

logger = logging.getLogger(__name__)

BUFFERS = re.compile(r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|masked_bias)$")
"""Tables that older files hold beside the weights: they are computed anew."""
MAX_LISTED = 5


def describe_names(names: Sequence[str]) -> str:
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


# -- config.json ------------------------------------------------------------------------------------------------------------------


def check_config(config: Mapping[str, Any], directory: str | Path) -> Values:
    """Raises ModelError for values of config.json that no model of any family has; returns the values."""
    where = f"{directory}/config.json"
    values = Values(config, where)
    read_checkpoint_quantization(config, directory)
    values.integer("vocab_size", 2**22)
    values.integer("max_position_embeddings", 2**24)
    _check_token_ids(values, "bos_token_id", config["vocab_size"])
    _check_token_ids(Values(config, str(find_end_tokens(Path(directory)))), "eos_token_id", config["vocab_size"])
    return values


def _check_token_ids(values: Values, key: str, vocab_size: int) -> None:
    """One id, a list of them, or none."""
    found = values.get(key)
    for token_id in found if isinstance(found, list) else [] if found is None else [found]:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise values.refuse(key, f"token ids from 0 to {vocab_size - 1} (vocab_size {vocab_size}), or null")


def read_model_config(directory: str | Path) -> dict[str, Any]:
    """config.json of a model, with what files of its kind leave out. Raises ModelError."""
    config = read_config(directory)
    _, sizes = TEXT_MODELS.get(str(config.get("model_type")), ("", {}))
    return sizes | config if _has_images(config) else config


def _has_images(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and any(name in WITH_IMAGES for name in names)


def find_architecture(config: Mapping[str, Any], directory: str | Path) -> str:
    """The model's family. Raises ModelError when none that it names is known."""
    names, kind = config.get("architectures") or [], config.get("model_type")
    listed = [OLDER_NAMES.get(name, name) for name in names if isinstance(name, str)] if isinstance(names, list) else []
    if known := [name for name in listed if name in ARCHITECTURES]:
        return known[0]
    if config.get("speculators_model_type"):  # which `vllm serve` takes for the model that it drafts for
        raise ModelError(
            f"{directory} is a drafter (speculators_model_type {config['speculators_model_type']!r:.80}), not a model: serve the model that it was "
            "made for, and name this folder as `model` of the speculative configuration"
        )
    if _has_images(config):
        if str(kind) in TEXT_MODELS:
            return TEXT_MODELS[str(kind)][0]
        raise ModelError(f"{directory}: text models of model_type {kind!r:.80} are not supported; known: {', '.join(TEXT_MODELS)}")
    of = f"model_type {kind!r:.80}, " if kind else ""
    images = WITH_IMAGES if "ForConditionalGeneration" in str(names) else ()
    raise ModelError(f"{directory}: {of}architectures {names!r:.200} are not supported; known: {', '.join((*ARCHITECTURES, *images))}")


def _find_drafter(config: Mapping[str, Any], directory: str | Path) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and names[0] in DRAFTERS:
        return names[0]
    raise ModelError(f"{directory}/config.json: architectures {names!r:.200} is no drafter of method mtp; known: {', '.join(DRAFTERS)}")


def find_drafter_folder(asked: str | None, model: str | Path) -> Path | None:
    """Where a drafter's weights are: in the folder asked for, or else beside the model's own; None: neither is."""
    if asked is not None:
        return Path(asked)
    return Path(model) if has_own_drafter(read_config(model)) else None


def has_own_drafter(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures")
    is_known = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and names[0] in ARCHITECTURES and names[0] in DRAFTERS
    return is_known and bool(config.get("num_nextn_predict_layers"))


def check_max_model_len(asked: int | None, own: int) -> None:
    if asked is not None and asked > own:
        raise ConfigError(f"max_model_len {asked} is beyond the model's own limit {own}")


def check_fits_target(config: Mapping[str, Any], directory: str | Path, *, hidden_size: int, vocab_size: int, max_model_len: int) -> None:
    """Raises ModelError when a drafter's config.json is that of no drafter, or of another model's."""
    where = f"{directory}/config.json"
    _find_drafter(config, directory)
    for key, own in (("hidden_size", hidden_size), ("vocab_size", vocab_size)):
        if config.get(key) != own:
            raise ModelError(f"{where}: {key} is {config.get(key)!r:.80}; the target's is {own}")
    if (length := read_context_len(Values(config, where))) < max_model_len:
        raise ModelError(f"{where}: max_position_embeddings is {length}; the target's is {max_model_len}")


# -- weights ----------------------------------------------------------------------------------------------------------------------


def read_spec(directory: str | Path) -> DecoderSpec:
    """What a folder's config.json says that its model is made of, under the names that its family has for weights. Raises ModelError."""
    return _read_model(directory)[3]


def _read_model(directory: str | Path) -> tuple[dict[str, Any], str, Values, DecoderSpec]:
    config = read_model_config(directory)
    name, values = find_architecture(config, directory), check_config(config, directory)
    spec = ARCHITECTURES[name](values)
    _check_stated(values, spec)
    return config, name, values, spec


def check_model(directory: str | Path, *, has_weights: bool = True) -> DecoderSpec:
    """What the model of a folder is made of, which can be served. has_weights: false where they are made up.

    Raises ModelError for what is missing, damaged, left over or not supported.
    """
    config, name, values, spec = _read_model(directory)
    if has_weights:
        names = find_weights(Path(directory))
        spec = settle_tied(settle_fused(settle_shared(place_weights(spec, names), names), names), names)
        weights = WeightList()
        spec.list_weights(weights)
        if has_own_drafter(config):  # which is read with a method that wants it, and need not be there
            weights.add_known(DRAFTERS[name](values).settle_fused(names))
        quantization = read_checkpoint_quantization(config, directory)
        if quantization is not None and quantization.has_weights:
            _check_any(Path(directory), weights, quantization)
        check_weights(Path(directory), weights, f"num_hidden_layers is {config['num_hidden_layers']}", quantization)
        if spec.is_tied:
            _check_tied(Path(directory), f"{spec.head}.weight", f"{spec.embedding}.weight")
    else:
        _refuse_dummy(config, directory)
    return spec


def check_split(spec: DecoderSpec, size: int, *, is_expert_parallel: bool = False) -> None:
    """Raises DoesNotDivideError where `size` ranks cannot hold the model's parts, as loading it would."""
    for layer in spec.layers:
        (num_q, num_kv, _), mlp = layer.attention.heads, layer.mlp
        check_divides(num_q, size, "num_attention_heads")
        check_divides(num_kv, size, "num_key_value_heads", can_repeat=True)
        if not isinstance(mlp, MoeSpec):
            check_divides(mlp.down.in_features, size, "intermediate_size")
            continue
        if is_expert_parallel:
            check_divides(mlp.router.num_experts, size, f"{mlp.router.count_key} (expert_parallel)")
        else:
            check_divides(mlp.inner, size, mlp.inner_key)
        if mlp.shared is not None:
            check_divides(mlp.shared.down.in_features, size, "the shared experts' size")


def _check_stated(values: Values, spec: DecoderSpec) -> None:
    """Raises ModelError where the file says of each layer what this family does not read, and it is not so."""
    windows = [isinstance(layer.attention, AttentionSpec) and layer.attention.window is not None for layer in spec.layers]
    found = {
        "layer_types": ["sliding_attention" if has_window else "full_attention" for has_window in windows],
        "mlp_layer_types": ["sparse" if isinstance(layer.mlp, MoeSpec) else "dense" for layer in spec.layers],
    }
    for key, own in found.items():
        if values.has(key) and values.get(key) != own:
            raise values.refuse(key, f"what a model of {values.get('architectures')} has by its other keys: {own!r:.120}")


def _check_tied(directory: Path, head: str, embedding: str) -> None:
    """Raises ModelError where the file has another head than the embedding that is to be used for it."""
    files = find_weights(directory)
    if head in files and embedding in files and not has_same_weights(files[head], head, files[embedding], embedding):
        raise ModelError(
            f"{directory}/config.json: tie_word_embeddings is true, by the file or the family, and the weight {head} is not {embedding}: say false, "
            "or take the weight out"
        )


def check_drafter(directory: str | Path, *, has_weights: bool = True) -> MtpSpec:
    """The same of a drafter (`check_fits_target` comes before it: a drafter of another model is called that)."""
    config = read_config(directory)
    name, values = _find_drafter(config, directory), check_config(config, directory)
    spec = DRAFTERS[name](values)
    if has_weights:
        names = find_weights(Path(directory))
        spec, weights = spec.settle_fused(names), WeightList()
        spec.list_weights(weights)
        if name in ARCHITECTURES:
            weights.add_known(settle_fused(ARCHITECTURES[name](values), names))
        quantization = read_checkpoint_quantization(config, directory)
        check_weights(Path(directory), weights, f"num_nextn_predict_layers is {config['num_nextn_predict_layers']}", quantization)
    else:
        _refuse_dummy(config, directory)
    return spec


def _check_any(directory: Path, weights: WeightList, quantization: CheckpointQuantization) -> None:
    """Raises ModelError where no projection at all is what config.json says that they are."""
    files, names = find_weights(directory), [name.removesuffix(".weight") for name, shape in weights.required.items() if len(shape) == 2]
    if not any(quantization.find(name, files) for name in names):
        raise ModelError(f"{directory}: no weight is quantized as config.json says ({quantization.method}); {names[-1]} is among those that could be")


def _refuse_dummy(config: Mapping[str, Any], directory: str | Path) -> None:
    if (found := read_checkpoint_quantization(config, directory)) is not None and found.has_weights:
        raise ModelError(
            f"{directory}: load_format dummy makes plain weights, not {found.method}; take quantization_config out, and use quantization"
        )


def check_rounding(config: Mapping[str, Any], directory: str | Path, quantization: QuantizationConfig | None, module: MtpSpec | None = None) -> None:
    """Raises ModelError where weights would be rounded that are rounded already. module: all that is read, which may be plain beside a model's."""
    found = read_checkpoint_quantization(config, directory)
    if found is None or not found.has_weights or quantization is None or not (quantization.dense_quant_type or quantization.moe_quant_type):
        return
    if module is not None:
        weights, files = WeightList(), find_weights(Path(directory))
        module.list_weights(weights)
        if not any(found.find(name, files) for name in weights.rounded):
            return
    raise ModelError(f"{directory}: the weights are quantized already ({found.method}); leave quantization {quantization.names} out")


def check_rounded_parts(where: str, weights: WeightList, quantization: QuantizationConfig | None) -> None:
    """Raises ModelError where experts alone are to be rounded, and none of these weights is an expert's: nothing would be."""
    if quantization is None or quantization.moe_quant_type is None or quantization.dense_quant_type is not None:
        return
    if "moe" not in weights.rounded.values():
        raise ModelError(f"{where}: quantization {quantization.names} rounds experts, and the model has none; name a dense_quant_type")


def check_experts(directory: str | Path, quantization: QuantizationConfig | None) -> None:
    """The same of a model's folder."""
    spec, weights = read_spec(directory), WeightList()
    spec.list_weights(weights)
    check_rounded_parts(spec.where, weights, quantization)


def settle_quantization(value: Any, directory: str | Path) -> tuple[Any, str]:
    """An option `quantization` that names the format a checkpoint has anyway asks for nothing -> the option that is left, and a line that says so.

    Raises ModelError where the two contradict each other.
    """
    named = STORED.get(value.lower().replace("_tensors", "-tensors")) if isinstance(value, str) else None
    if named is None:
        return value, ""
    found = read_checkpoint_quantization(read_config(directory), directory)
    if found is None or not found.has_weights:
        if named in SCHEMES:
            return value, ""
        raise ModelError(
            f"quantization {value!r}: the weights in {directory} are plain: leave it out, or name what they are rounded to: {', '.join(SCHEMES)}"
        )
    if found.method.split()[0] != named:
        raise ModelError(f"quantization {value!r} contradicts the checkpoint in {directory}, which is {found.method}: leave it out")
    return None, f"quantization {value} has no effect, and none is needed: the checkpoint says itself that it is {found.method}"


def check_weights(directory: Path, weights: WeightList, num_layers: str, quantization: CheckpointQuantization | None = None) -> None:
    """Raises ModelError unless the folder's weights are the required ones, and whole groups of the optional ones.

    A layer's weight that nobody reads means that config.json is another model's; others are named in a warning.
    """
    files = find_weights(directory)
    required, extra = _expand(weights.required, files, quantization, directory)
    required |= {name: Expected((shape,), ("I64", "I32")) for name, shape in weights.ids.items()}
    known, groups = required | extra | {name: Expected((shape,)) for name, shape in weights.zeros.items()}, []
    for group in weights.optional:
        own, extra = _expand(group, files, quantization, directory)
        groups.append(own)
        known |= own | extra
    if fused := next((name for name in files if name not in known and FUSED_PART.search(name)), None):
        raise ModelError(f"{directory}: weight {fused}: experts in one weight for all are not supported in quantized form: {UNFUSED}")
    if missing := [name for name in required if name not in files]:
        raise ModelError(f"{directory}: weight {describe_names(missing)} is missing{explain_missing(missing, files)}")
    for own in groups:
        if 0 < len(absent := [name for name in own if name not in files]) < len(own):
            raise ModelError(f"{directory}: weight {describe_names(absent)} is missing, though the projections beside it have theirs")
    unused = [name for name in files if name not in known and name not in weights.ignored and not BUFFERS.search(name)]
    if quantization is not None:
        unused = [name for name in unused if not CACHE_TENSORS.search(name)]
    if adapted := [name for name in unused if ADAPTER.search(name)]:
        raise ModelError(f"{directory}: weight {describe_names(adapted)} would not be used: {MERGED}")
    if layers := [name for name in unused if name.startswith(LAYERS)]:
        raise ModelError(f"{directory}: weight {describe_names(layers)} would not be used: {num_layers}, and the weights are those of another model")
    if unused:
        logger.warning("%s: %d weights are not used: %s", directory, len(unused), describe_names(unused))
    if is_named(adapter := directory / ADAPTER_FILE):  # which transformers would put into the model
        logger.warning("%s is not read: the model is served without its adapter", adapter)
    if is_named(whole := directory / WEIGHTS_FILE) and whole not in files.values():  # which transformers would take
        logger.warning("%s is not read: %s names other files, which are there", whole, INDEX_FILE)
    if unspoken := [name for name in files if name in weights.unspoken]:
        logger.warning("%s: %d biases are used of which config.json does not speak: %s", directory, len(unspoken), describe_names(unspoken))
    by_file: dict[Path, list[str]] = {}
    for name in known:
        if name in files:
            by_file.setdefault(files[name], []).append(name)
    for path, names in by_file.items():
        _check_file(path, {name: known[name] for name in names})
        zeros = [name for name in names if name in weights.zeros]
        if zeros and (wrong := find_nonzero(path, zeros)):
            raise ModelError(f"{path}: weight {describe_names(wrong)} is not zero; this family adds no biases there")


def _expand(
    shapes: Shapes, files: Mapping[str, Path], quantization: CheckpointQuantization | None, directory: Path
) -> tuple[dict[str, Expected], dict[str, Expected]]:
    """The tensors that stand for these weights, and those that may be beside them."""
    needed: dict[str, Expected] = {}
    extra: dict[str, Expected] = {}
    for name, shape in shapes.items():
        projection = name.removesuffix(".weight")
        layout = None if quantization is None or len(shape) != 2 or projection == name else quantization.find(projection, files)
        if layout is None:
            needed[name] = Expected((shape,))
            continue
        try:
            needed |= {f"{projection}.{part}": own for part, own in layout.tensors(*shape).items()}
        except ValueError as error:
            raise ModelError(f"{directory}: {projection} cannot be quantized as config.json says: {error}") from None
        extra |= {f"{projection}.{part}": own for part, own in layout.optional(shape[1]).items()}
    return needed, extra


def _check_file(path: Path, tensors: Mapping[str, Expected]) -> None:
    with open_weights(path, "np") as file:
        held = set(file.keys())
        for name, expected in tensors.items():
            if name not in held:
                raise ModelError(f"{path}: weight {name} is missing, though the index says that it is there")
            entry = file.get_slice(name)
            shape = tuple(entry.get_shape())
            if expected.shapes and shape not in expected.shapes:
                raise ModelError(f"{path}: weight {name} has shape {shape}; config.json makes it {expected.shapes[0]}")
            if entry.get_dtype() not in expected.dtypes:
                raise ModelError(f"{path}: weight {name} is of dtype {entry.get_dtype()}; known: {', '.join(expected.dtypes)}")
