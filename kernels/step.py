"""What the target and the drafter compute next, laid out on the device from the state that the last step left there.

A step has B rows, one per request, and room for T packed tokens. `fields` [8, B] int32 is what the host says of each row: its slot,
the pages it holds, the number of tokens at which it ends, how many drafts to verify, how many its model drafter may make next, and how many
drafts it may have once a lookup lengthened them (-1: no lookup), and which rows have the same first pages (a group's number, -1: none) with
how many tokens on them. The last slot is a dummy: rows that have it compute nothing. Tokens that
belong to nobody, or that lie past a request's pages, use the scratch page, which is the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels._load import Kernel, load
from kernels.reference import step as reference

NUM_FIELDS = 8
SLOT, NUM_PAGES, END, VERIFY_LIMIT, MODEL_LIMIT, LOOKUP_LIMIT, PREFIX_GROUP, PREFIX_LEN = range(NUM_FIELDS)
RESULT_HEAD = 4
"""Before the tokens of a row of results: tokens emitted, drafts accepted, drafts verified, and 1 when a score was not finite."""


@dataclass(frozen=True)
class StepSizes:
    """Bounds of one step, the same at each replay of its graph."""

    batch: int
    rows: int
    max_tokens: int
    max_drafts: int
    table_width: int
    page_size: int
    scratch_page: int
    dummy_slot: int

    def to(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(
            [self.batch, self.rows, self.max_tokens, self.max_drafts, self.table_width, self.page_size, self.scratch_page, self.dummy_slot],
            dtype=torch.int32,
            device=device,
        )


def _kernel(like: torch.Tensor, name: str, types: str) -> Kernel:
    return load(like.device, "step", name, types)


def prepare_step(
    packed: torch.Tensor,
    cu_query_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    num_verified: torch.Tensor,
    fields: torch.Tensor,
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    page_table: torch.Tensor,
    sizes: StepSizes,
    sizes_on_device: torch.Tensor,
) -> None:
    """Writes packed [3, T] int64 (token ids, positions, KV slots), cu_query_lens [B + 1], seq_lens [B] and num_verified [B] int32.

    Each request's last token and its drafts: as many as its limit, its end, and T allow.
    """
    outputs = (packed, cu_query_lens, seq_lens, num_verified)
    inputs = (fields, tokens, num_tokens, drafts, num_drafts, page_table)
    if not packed.is_cuda:
        reference.prepare_step(*outputs, *inputs, sizes)
        return
    _kernel(packed, "prepare_step", "P" * 11)((1, 1), (256, 1, 1), *outputs, *inputs, sizes_on_device)


def prepare_drafter(
    packed: torch.Tensor,
    seq_lens: torch.Tensor,
    last_rows: torch.Tensor,
    fields: torch.Tensor,
    cu_query_lens: torch.Tensor,
    emitted: torch.Tensor,
    num_emitted: torch.Tensor,
    num_tokens: torch.Tensor,
    page_table: torch.Tensor,
    sizes: StepSizes,
    sizes_on_device: torch.Tensor,
) -> None:
    """Lays out the emitted tokens for the drafter, in the target's rows: packed [4, T] int64 (token ids, positions, KV slots, and slots of
    the tokens before), seq_lens [B] int32, last_rows [B] int64: the rows of the newest tokens.

    Rows of rejected drafts compute something that the next tokens overwrite.
    """
    outputs = (packed, seq_lens, last_rows)
    inputs = (fields, cu_query_lens, emitted, num_emitted, num_tokens, page_table)
    if not packed.is_cuda:
        reference.prepare_drafter(*outputs, *inputs, sizes)
        return
    _kernel(packed, "prepare_drafter", "P" * 10)((1, 1), (256, 1, 1), *outputs, *inputs, sizes_on_device)


def append_draft(
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    packed: torch.Tensor,
    seq_lens: torch.Tensor,
    fields: torch.Tensor,
    chosen: torch.Tensor,
    num_tokens: torch.Tensor,
    page_table: torch.Tensor,
    sizes: StepSizes,
    sizes_on_device: torch.Tensor,
    step: int,
) -> None:
    """Adds draft number `step`, chosen [B] int32, to the rows that want so many, and lays out the forward that makes the next one:
    packed [3, B] int64, seq_lens [B] int32."""
    outputs = (drafts, num_drafts, packed, seq_lens)
    inputs = (fields, chosen, num_tokens, page_table)
    if not packed.is_cuda:
        reference.append_draft(*outputs, *inputs, sizes, step)
        return
    _kernel(packed, "append_draft", "P" * 9 + "i")((1, 1), (256, 1, 1), *outputs, *inputs, sizes_on_device, step)


def pack_results(
    results: torch.Tensor,
    emitted: torch.Tensor,
    num_emitted: torch.Tensor,
    num_accepted: torch.Tensor,
    num_verified: torch.Tensor,
    is_broken: torch.Tensor,
    cu_query_lens: torch.Tensor,
) -> None:
    """Gathers what the host reads of a step in results [B, 4 + K + 1] int32; emitted [B, K + 1], is_broken [T] bool, the others [B]."""
    inputs = (emitted, num_emitted, num_accepted, num_verified, is_broken, cu_query_lens)
    if not results.is_cuda:
        reference.pack_results(results, *inputs)
        return
    _kernel(results, "pack_results", "P" * 7 + "i")((len(results), 1), (32, 1, 1), results, *inputs, results.shape[1])


def simulate_acceptance(
    chosen: torch.Tensor,
    fields: torch.Tensor,
    cu_query_lens: torch.Tensor,
    drafts: torch.Tensor,
    num_tokens: torch.Tensor,
    sizes: StepSizes,
    sizes_on_device: torch.Tensor,
    rate: float,
) -> None:
    """For benchmarks of models with random weights: the target's choice chosen [T] is the draft itself with probability `rate`,
    by a hash of the token's position."""
    inputs = (fields, cu_query_lens, drafts, num_tokens)
    if not chosen.is_cuda:
        reference.simulate_acceptance(chosen, *inputs, sizes, rate)
        return
    _kernel(chosen, "simulate_acceptance", "P" * 6 + "f")((1, 1), (256, 1, 1), chosen, *inputs, sizes_on_device, rate)


def write_values(target: torch.Tensor, updates: torch.Tensor, count: int) -> None:
    """target[index] = value, both flat int32, for the first `count` pairs (index, value) of updates; each index at most once."""
    if not target.is_cuda:
        reference.write_values(target, updates, count)
        return
    if count:
        _kernel(target, "write_values", "PPi")((-(-count // 128), 1), (128, 1, 1), target, updates, count)
