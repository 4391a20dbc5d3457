"""The model that a server is to have, and its drafter: found, checked before anything is started, and said to Triton's models."""

from __future__ import annotations

import dataclasses
import hashlib
import signal
import subprocess
from pathlib import Path
from typing import Any

from backend import model_checks
from backend.config import BUNDLED_DRAFTER, EngineConfig, ParallelConfig, is_bundled
from backend.drafter_checks import check_drafter_folder, check_drafter_rounding, check_num_drafts
from backend.errors import ConfigError, ModelError
from backend.model_files import find_pickled, name_others, name_tokenizers, read_config, settle_path
from backend.model_sources import MOVED, Source, check_ascii, find_model
from backend.quantization_config import QuantizationConfig
from backend.speculative_config import SpeculativeConfig
from backend.tokenizer_checks import check_tokenizer
from deploy.named_files import find_corpus, find_token_map
from deploy.options import SERVE_KEYS
from deploy.server import server_state
from deploy.together import FORETOKEN, end_with_parent


def check_model(
    name: str,
    max_model_len: int | None = None,
    load_format: str = "safetensors",
    source: Source | None = None,
    parallel: ParallelConfig | None = None,
    unknown_tokens: str = "error",
) -> Path:
    """The model's folder, absolute, which a GGUF file or a name on the hub is brought to first.

    Raises ModelError and ConfigError for what would only fail once the server runs, or serve nonsense."""
    if not name.strip():  # of a shell's variable that is not set
        raise ModelError("the model's name is empty: name a folder, a GGUF file, or a name on the hub (ORG/NAME)")
    folder = find_model(name, source)
    check_ascii("model folder", folder, MOVED)
    values = model_checks.read_model_config(folder)
    model_checks.find_architecture(values, folder)  # before what a folder of another kind lacks
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder / 'tokenizer.json'} is missing{name_tokenizers(folder)}")
    has_weights = load_format != "dummy"
    if has_weights and not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} has no *.safetensors{name_others(folder)}")
    spec = model_checks.check_model(folder, has_weights=has_weights)
    if parallel is not None:
        model_checks.check_split(spec, parallel.tensor_parallel_size, is_expert_parallel=parallel.expert_parallel)
    model_checks.check_max_model_len(max_model_len, spec.max_model_len)
    check_tokenizer(folder, spec, unknown_tokens)
    return folder


def convert_apart(path: Path, out: Path) -> None:
    """`foretoken convert`, as a process of its own: this one stays without torch. Raises ModelError; what was wrong has been said.

    It ends with this process, which has the folder's lock: the next one would write to the same folder beside it."""
    command = [*FORETOKEN, "convert", str(path), str(out)]
    if subprocess.run(command, preexec_fn=end_with_parent(signal.SIGKILL)).returncode:
        raise ModelError(f"{path} could not be converted")


def find_named_drafter(name: str, load_format: str, download_dir: str | None) -> Path:
    """Raises ModelError, which says that it is of the drafter."""
    source = Source(download_dir=download_dir, has_weights=load_format != "dummy", convert=convert_apart, is_served=True)
    try:
        return find_model(name, source)
    except ModelError as error:
        raise ModelError(f"speculative_config.model: {error}") from None


def check_drafter(config: SpeculativeConfig, model: Path, load_format: str = "safetensors", download_dir: str | None = None) -> Path | None:
    """The drafter's folder, absolute, when a method needs one. Raises ConfigError, ModelError."""
    method = config.model_method
    if not config.has_weights:
        return None
    asked = str(find_named_drafter(config.model, load_format, download_dir)) if config.model else None
    found = model_checks.find_drafter_folder(asked, model)
    if found is None and not is_bundled(model):
        raise ConfigError(f"speculative_config.model: method {method} needs a drafter trained for {model}: name its folder (see foretoken train)")
    folder = settle_path(found or BUNDLED_DRAFTER)
    read_config(folder)
    check_ascii("drafter folder", folder, MOVED)
    has_weights = load_format != "dummy"
    if has_weights and not any(folder.glob("*.safetensors")) and find_pickled(folder) is None:
        raise ModelError(f"{folder} has no *.safetensors")
    has_other = config.draft_vocabulary == "shared"
    most = check_drafter_folder(method, folder, model, has_weights=has_weights, is_parallel=config.parallel_drafting, has_other_tokens=has_other)
    check_num_drafts(config, folder, most)
    module = model_checks.check_drafter(folder) if method == "mtp" and has_weights else None
    model_checks.check_rounding(read_config(folder), folder, config.rounding, module)
    check_drafter_rounding(method, folder, config.rounding)
    return folder


def model_parameters(values: dict[str, Any], engine: EngineConfig, model: Path) -> dict[str, dict[str, Any]]:
    """What goes into each model's config.pbtxt. Raises ConfigError, ModelError."""
    decode = {k: v for k, v in values.items() if k not in SERVE_KEYS} | {"model": str(model)}
    is_prefill = engine.disaggregation.role == "prefill"
    parameters = {"prefill": decode} if is_prefill else {"decode": decode, "tokenizer": {"model": str(model)}}
    if engine.parallel_config.node_rank:
        parameters = {"decode": decode}
    config = engine.speculative_config
    drafter = check_drafter(config, model, engine.load_format, values.get("download_dir"))
    speculative = dict(values.get("speculative_config") or {})
    if drafter is not None:
        speculative["model"] = str(drafter)
        if config.placement == "bls":
            own: dict[str, Any] = {"model": str(drafter), "target": str(model), "num_model_steps": config.num_model_steps}
            for key, value in (("quantization", config.quantization), ("target_quantization", engine.quantization)):
                own[key] = dataclasses.asdict(value) if isinstance(value, QuantizationConfig) else value
            shared = {k: decode[k] for k in ("dtype", "device", "num_threads", "single_thread_tokens", "cpu_kernels") if k in decode}
            parameters["mtp_drafter"] = {k: v for k, v in own.items() if v is not None} | shared
    if "suffix" in config.loaded_methods and config.suffix_decoding_cache_path is None:
        name = hashlib.blake2b(str(model).encode(), digest_size=6).hexdigest()
        speculative["suffix_decoding_cache_path"] = str(server_state() / f"suffix-{name}.npz")
    elif config.suffix_decoding_cache_path is not None:
        check_ascii("speculative_config.suffix_decoding_cache_path", Path(config.suffix_decoding_cache_path), "name another")
    if config.suffix_decoding_corpus:
        speculative["suffix_decoding_corpus"] = find_corpus(config.suffix_decoding_corpus)
    if config.draft_token_map is not None:
        speculative["draft_token_map"] = find_token_map(config.draft_token_map, model_checks.read_model_config(model)["vocab_size"])
        if "mtp_drafter" in parameters:
            parameters["mtp_drafter"]["draft_token_map"] = speculative["draft_token_map"]
    if speculative:
        decode["speculative_config"] = speculative
    return parameters
