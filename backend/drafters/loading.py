"""Loads the model drafter that runs in the step, of whichever kind the configuration names."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from backend.budget import CostClass
from backend.config import BUNDLED_DRAFTER, EngineConfig
from backend.drafter_checks import check_drafter_rounding, check_num_drafts
from backend.errors import ConfigError
from backend.model_checks import find_drafter_folder
from backend.model_files import fingerprint
from backend.speculative_config import BLOCK_METHODS, HEAD_METHODS, MAX_SPECULATIVE_TOKENS, RECYCLING, SpeculativeConfig
from kernels.structs import MAX_NODES

if TYPE_CHECKING:
    import torch

    from backend.drafters.protocol import StepDrafter
    from backend.drafters.recurrent import RecurrentModel
    from backend.models import Model
    from backend.parallel.ranks import Ranks

logger = logging.getLogger(__name__)

MAX_TREE_LAYERS = 2
"""That make a draft each: all drafts of a tree but the first level's come from one."""


def load_step_drafter(config: EngineConfig, target: Model, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> StepDrafter | None:
    """The model drafter that runs in the step, if the configuration has one. Raises ConfigError, ModelError."""
    from backend.parallel.split import DoesNotDivideError

    try:
        return _load_step_drafter(config, target, dtype, device, ranks)
    except DoesNotDivideError as error:
        raise ConfigError(f"the drafter in {_find_folder(config)}: {error}; draft_tensor_parallel_size 1 has all of it on every rank") from None


def _load_step_drafter(config: EngineConfig, target: Model, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> StepDrafter | None:
    speculative = config.speculative_config
    if not _is_in_step(speculative):
        return None
    from backend.drafters.parallel import ParallelDrafter
    from backend.drafters.recurrent import RecurrentDrafter

    steps, most = speculative.num_model_steps or 1, 1
    drafter: StepDrafter
    tree = speculative.tree
    if speculative.model_method == RECYCLING:
        from backend.drafters.recycling import RecyclingDrafter

        assert tree is not None
        return RecyclingDrafter(target.vocab_size, tree.num_candidates, device)
    check_drafter_rounding(str(speculative.model_method), _find_folder(config), speculative.rounding)
    if speculative.model_method in HEAD_METHODS:
        from backend.drafters.heads import HeadsDrafter
        from backend.models.heads import load_heads

        folder, quantization = _find_folder(config), speculative.rounding
        method, own = speculative.model_method, config.model
        drafter = HeadsDrafter(load_heads(method, folder, own, target, dtype, device, quantization, config.load_format))
        most = drafter.max_drafts
    elif speculative.model_method in BLOCK_METHODS:
        from backend.drafters.block import BlockDrafter
        from backend.models.dflash import Dflash

        folder, is_spark = _find_folder(config), speculative.model_method == "dspark"
        own_ranks = ranks if speculative.draft_tensor_parallel_size > 1 else None
        arguments = (folder, target, dtype, device, speculative.rounding, config.load_format, own_ranks)
        block = Dflash(*arguments, num_drafts=steps, is_spark=is_spark)
        if speculative.min_draft_confidence and block.spec.confidence is None:
            least = speculative.min_draft_confidence
            raise ConfigError(f"speculative_config.min_draft_confidence is {least}; the drafter in {folder} has no confidence head: leave it out")
        drafter, most = BlockDrafter(block), block.spec.max_drafts
    else:
        model = _load_recurrent(config, target, dtype, device, ranks)
        drafter = RecurrentDrafter(model, steps) if model.mask_token_id is None else ParallelDrafter(model)
    tree_key = f"speculative_config.{'tree_paths' if speculative.tree_paths else 'tree_nodes'}"
    computed = sum(tree.computed_by_depth) if tree is not None and drafter.attends_drafts else 0
    if tree is not None and computed > MAX_NODES:
        raise ConfigError(
            f"speculative_config.tree_top_k is {tree.num_candidates}, and {len(tree.computed_by_depth) + 1} drafts follow one another: the drafter "
            f"goes on from {computed}; the limit is {MAX_NODES}: take a smaller tree_top_k or num_speculative_tokens"
        )
    if computed >= (context := config.max_model_len or target.max_model_len):  # no request would have room for one, nor the page table for its rows
        raise ConfigError(f"{tree_key} makes trees; the drafter goes on from {computed} drafts of one, and the context holds {context} tokens")
    if drafter.block is not None and tree is not None:
        made = f"the drafter in {_find_folder(config)} makes all drafts of a chain at once"
        raise ConfigError(f"{tree_key} makes trees; {made}: leave it out, or parallel_drafting false")
    if tree is not None and isinstance(drafter, RecurrentDrafter) and drafter.num_layers > MAX_TREE_LAYERS:
        raise ConfigError(
            f"{tree_key} makes trees; the drafter in {_find_folder(config)} has {drafter.num_layers} layers that make a draft each; the limit is "
            f"{MAX_TREE_LAYERS} with trees: leave it out, or take fewer num_speculative_tokens"
        )
    check_num_drafts(speculative, _find_folder(config), drafter.max_drafts)
    if steps == 1 < most and speculative.mtp_strategy == "default":
        made = f"the drafter in {_find_folder(config)} makes up to {min(most, MAX_SPECULATIVE_TOKENS)} for little more"
        logger.warning("speculative_config.num_speculative_tokens is 1, which is its default: %s", made)
    return drafter


def _load_recurrent(config: EngineConfig, target: Model, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> RecurrentModel:
    from backend.parallel.ranks import Ranks

    speculative, folder = config.speculative_config, _find_folder(config)
    own_ranks, is_parallel = ranks if speculative.draft_tensor_parallel_size > 1 else Ranks(), speculative.parallel_drafting
    if speculative.model_method == "draft_model":
        from backend.models.draft import DraftModel

        has_other, rounding = speculative.draft_vocabulary == "shared", speculative.rounding
        arguments = (folder, config.model, target, dtype, device, rounding, config.load_format, own_ranks, is_parallel)
        return DraftModel(*arguments, has_other_tokens=has_other)
    if speculative.model_method in ("eagle", "eagle3"):
        from backend.models.eagle import Eagle

        return Eagle(
            folder,
            target,
            dtype,
            device,
            speculative.rounding,
            config.load_format,
            own_ranks,
            is_multi_layer=speculative.model_method == "eagle3",
            is_parallel=is_parallel,
        )
    from backend.models.mtp import Mtp

    return Mtp(folder, target, dtype, device, speculative.rounding, config.load_format, own_ranks)


def count_tokens_after_step(config: SpeculativeConfig, drafter: StepDrafter | None, num_model: int) -> int:
    """Tokens past those of a step that a drafter at its end needs pages for; num_model: drafts of it that a request wants, maybe more than others."""
    if drafter is None:
        return 0
    steps, block = max(config.num_model_steps or 1, min(num_model, drafter.max_drafts)), drafter.block
    if config.tree is not None and drafter.attends_drafts:
        return max(1, sum(config.tree.computed_by_depth))
    return steps if block is None else max(steps, block.first + block.count_rows(steps))


def count_block_rows(drafter: StepDrafter | None) -> int:
    """Of a block that begins with the newest token, however many drafts are made of it; 0: there is none."""
    return drafter.block.count_rows(1) if drafter is not None and drafter.block is not None and drafter.block.first == 0 else 0


def cost_class(drafter: StepDrafter | None) -> CostClass:
    """How the time of the step's model drafter grows with its drafts."""
    return CostClass.PER_DRAFT if drafter is None or drafter.block is None else CostClass.BLOCK


def tap_width(config: SpeculativeConfig, drafter: StepDrafter | None, target: Model) -> int:
    """Numbers that are kept of each token that the target computed for a drafter, wherever it runs."""
    if drafter is not None:
        return drafter.tap_width
    return target.hidden_size if config.model_method else 0


def step_drafter_identity(config: EngineConfig) -> str:
    """What has to be equal for two nodes' drafters to go on from each other's memory; "": there is no drafter in the step."""
    speculative = config.speculative_config
    if not _is_in_step(speculative):
        return ""
    options = f"{speculative.rounding.names} {speculative.draft_vocabulary} {speculative.parallel_drafting}"
    folder = "" if speculative.model_method == RECYCLING else fingerprint(_find_folder(config))
    return f"{speculative.model_method} {folder} {options}"


def _is_in_step(config: SpeculativeConfig) -> bool:
    return bool(config.model_method) and config.placement != "bls"


def _find_folder(config: EngineConfig) -> Path:
    return find_drafter_folder(config.speculative_config.model, config.model) or BUNDLED_DRAFTER
