"""The twins that lay a step out, against a walk over its rows in plain Python."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.ops import Admission, RequestTable, SplitRows, StepSizes, append_draft, commit, pack_results, prepare_drafter, prepare_step, split_rows
from kernels.reference import step as reference
from kernels.structs import (
    COUNT,
    DRAFTER_COUNT,
    EMITS,
    END,
    FIRST,
    INDEX,
    MODEL_LIMIT,
    NUM_FIELDS,
    NUM_PAGES,
    RESULT_HEAD,
    VERIFY_LIMIT,
)

CPU = torch.device("cpu")
V, MAX_LEN, MAX_DRAFTS, PAGE = 1000, 200, 5, 16
POISON = -999


class Step:
    """Random requests: some are prompts, some rows are nobody's, some requests are at their end, past their pages, or new to the drafter."""

    def __init__(self, seed: int, batch: int, num_prompts: int) -> None:
        rng = self.rng = random.Random(seed)
        self.batch, size, width = batch, batch + 2, -(-MAX_LEN // PAGE)
        self.table = RequestTable(size, MAX_LEN, MAX_DRAFTS, V, CPU)
        self.table.tokens.fill_(POISON)
        self.table.drafts.fill_(POISON)
        self.page_table = torch.full((size + 1, width), POISON, dtype=torch.int32)
        free = rng.sample(range(size * width), size * width)
        self.rows: list[SimpleNamespace | None] = []
        for b, index in enumerate(rng.sample(range(size), batch)):
            if rng.random() < 0.1:
                self.rows.append(None)
                continue
            known = rng.randint(2, MAX_LEN - 30)
            token_ids = [rng.randrange(V) for _ in range(known)]
            end = known + rng.choice([0, 1, 2, 20])
            self.table.admit(
                [Admission(index, token_ids, 1, max(end, known), num_drafter_tokens=rng.choice([known, known - 1, rng.randint(0, known)]))]
            )
            drafts = [rng.randrange(V) for _ in range(rng.randint(0, MAX_DRAFTS))]
            self.table.drafts[index, : len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
            self.table.num_drafts[index] = len(drafts)
            first = rng.randint(0, known - 1) if b < num_prompts else -1
            count = rng.randint(1, known - first) if first >= 0 else 1
            num_pages = max(-(-(known + rng.randint(-20, 20)) // PAGE), 1)
            pages = free[:num_pages]
            free = free[num_pages:]
            self.page_table[index, :num_pages] = torch.tensor(pages, dtype=torch.int32)
            own = SimpleNamespace(index=index, tokens=token_ids, drafts=drafts, end=end, first=first, count=count, pages=pages)
            own.emits = first < 0 or (first + count == known and rng.random() < 0.8)
            own.verify_limit, own.model_limit = rng.randint(0, MAX_DRAFTS), rng.randint(0, MAX_DRAFTS)
            own.drafter_count = rng.choice([-1, -1, 0, 3])
            own.num_drafter_tokens = int(self.table.num_drafter_tokens[index])
            self.rows.append(own)
        self.sizes = StepSizes(
            batch=batch,
            num_prompts=num_prompts,
            prompt_rows=0,
            rows=10**6,
            max_tokens=self.table.max_len,
            max_drafts=MAX_DRAFTS,
            table_width=width,
            page_size=PAGE,
            page_stride=7 * PAGE,
            tap_stride=PAGE + 3,
            drafter_stride=2 * PAGE,
            scratch_page=size * width,
            dummy_index=size,
        )
        fields = self.fields = torch.zeros(NUM_FIELDS, batch, dtype=torch.int32)
        fields[INDEX] = size
        for b, row in enumerate(self.rows):
            if row is not None:
                values = {INDEX: row.index, NUM_PAGES: len(row.pages), END: row.end, FIRST: row.first, COUNT: row.count, EMITS: row.emits}
                values |= {VERIFY_LIMIT: row.verify_limit, MODEL_LIMIT: row.model_limit, DRAFTER_COUNT: row.drafter_count}
                for name, value in values.items():
                    fields[name, b] = int(value)

    def slot(self, row: Any, position: int, stride: int) -> int:
        page = row.pages[position // PAGE] if position // PAGE < len(row.pages) else self.sizes.scratch_page
        return int(page * stride + position % PAGE)


CASES = [(1, 0), (1, 1), (5, 2), (16, 0), (24, 6), (24, 24)]


@pytest.mark.parametrize("num_prompts", [0, 2, 5])
def test_rows_are_split_into_those_of_prompts_and_of_those_that_decode(num_prompts: int) -> None:
    counts, lens, indices = [30, 4, 0, 2, 1], [64, 4, 0, 90, 11], [7, 2, 9, 0, 4]
    cu_rows = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    split = SplitRows.make(8, torch.device("cpu"))
    for tensor in (split.cu_prompt_rows, split.cu_decoding_rows, split.seq_lens, split.indices, split.last_rows):
        tensor.fill_(-7)
    last_rows = torch.tensor([29, 33, 0, 35, 36])
    split_rows(split, cu_rows, torch.tensor(lens, dtype=torch.int32), torch.tensor(indices, dtype=torch.int32), num_prompts, last_rows)
    assert split.last_rows.tolist() == [29, 33, 0, 35, 36, 0, 0, 0]
    prompts, decoding = (cu.diff().tolist() for cu in (split.cu_prompt_rows, split.cu_decoding_rows))
    assert prompts == [*counts[:num_prompts], *[0] * (8 - num_prompts)]
    assert decoding == [*[0] * num_prompts, *counts[num_prompts:], 0, 0, 0]
    assert (int(split.cu_prompt_rows[0]), int(split.cu_decoding_rows[0])) == (0, sum(counts[:num_prompts]))
    assert (split.seq_lens.tolist(), split.indices.tolist()) == ([*lens, 0, 0, 0], [*indices, 4, 4, 4])
    with pytest.raises(ValueError, match="6 prompts of 5 requests are to be split in lists of 8"):
        split_rows(split, cu_rows, torch.tensor(lens), torch.tensor(indices), 6)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("batch", "num_prompts"), CASES)
def test_a_step_is_laid_out(batch: int, num_prompts: int, seed: int) -> None:
    step = Step(seed, batch, num_prompts)
    table, sizes = step.table, step.sizes
    packed, cu, lens, verified, cu_logits, logit_rows = [], [0], [], [], [0], []
    for row in step.rows:
        known = len(row.tokens) if row else 0
        drafts: list[int] = []
        if row is None or known >= row.end:
            cu.append(cu[-1])
            lens.append(0)
            verified.append(0)
            cu_logits.append(cu_logits[-1])
            continue
        first, count = (known - 1, 1) if row.first < 0 else (row.first, row.count)
        if row.first < 0:
            drafts = row.drafts[: max(min(row.verify_limit, row.end - known - 1), 0)]
        for position in range(first, first + count + len(drafts)):
            token = (row.tokens + drafts)[position]
            packed.append((token, position, step.slot(row, position, sizes.page_stride), step.slot(row, position, sizes.tap_stride)))
        cu.append(len(packed))
        lens.append(first + count + len(drafts))
        verified.append(len(drafts))
        if row.emits:
            logit_rows += range(len(packed) - 1 - len(drafts), len(packed))
        cu_logits.append(len(logit_rows))
    got = prepare_step(table, step.fields, step.page_table, sizes)
    assert got.packed.T.tolist() == [list(x) for x in packed] and got.packed.dtype == got.logit_rows.dtype == torch.int64
    assert (got.cu_query_lens.tolist(), got.seq_lens.tolist(), got.num_verified.tolist()) == (cu, lens, verified)
    assert (got.cu_logit_rows.tolist(), got.logit_rows.tolist()) == (cu_logits, logit_rows)
    assert {t.dtype for t in (got.cu_query_lens, got.seq_lens, got.num_verified, got.cu_logit_rows)} == {torch.int32}

    # With less room, the last rows are left out, first drafts and then known tokens.
    for most in (0, 1, len(packed) // 2, len(packed)):
        less = reference.prepare_step(table, step.fields, step.page_table, sizes._replace(rows=most), None)
        assert less.packed.T.tolist() == [list(x) for x in packed[:most]]
        for b, row in enumerate(step.rows):
            begin, end = less.cu_query_lens[b : b + 2].tolist()
            logits = less.logit_rows[int(less.cu_logit_rows[b]) : int(less.cu_logit_rows[b + 1])].tolist()
            named = 1 if row is None or row.first < 0 else row.count
            is_whole = row is not None and row.emits and end - begin >= named and end > begin
            assert logits == (list(range(begin + named - 1, end)) if is_whole else [])

    # What is emitted is committed, and the drafter computes all that it has not.
    emitted = torch.full((batch, MAX_DRAFTS + 1), -1, dtype=torch.int32)
    num_emitted = torch.zeros(batch, dtype=torch.int32)
    for b in range(batch):
        if cu_logits[b + 1] > cu_logits[b]:
            num_emitted[b] = step.rng.randint(1, verified[b] + 1)
            emitted[b, : num_emitted[b]] = torch.randint(0, V, (int(num_emitted[b]),), dtype=torch.int32)
    offered = num_emitted.clone()
    commit(emitted, num_emitted, table, step.fields[INDEX])
    for b, row in enumerate(step.rows):
        if row is not None:
            kept = min(int(offered[b]), max(row.end, len(row.tokens)) - len(row.tokens))
            assert int(num_emitted[b]) == kept and (emitted[b, kept:] == -1).all()
            row.tokens = row.tokens + emitted[b, :kept].tolist()
            assert table.tokens[row.index, : len(row.tokens)].tolist() == row.tokens and int(table.num_tokens[row.index]) == len(row.tokens)
            assert int(table.num_drafts[row.index]) == (0 if offered[b] else len(row.drafts))
    results = torch.full((batch, RESULT_HEAD + MAX_DRAFTS + 1), POISON, dtype=torch.int32)
    is_broken = torch.rand(len(logit_rows)) < 0.2
    pack_results(results, emitted, num_emitted, offered, got.num_verified, is_broken, got.cu_logit_rows)
    for b in range(batch):
        broken = bool(is_broken[cu_logits[b] : cu_logits[b + 1]].any())
        assert results[b].tolist() == [int(num_emitted[b]), int(offered[b]), verified[b], int(broken), *emitted[b].tolist()]

    rows, cu_rows, drafter_lens, last_rows = [], [0], [], []
    for b, row in enumerate(step.rows):
        count = 0
        if row is not None:
            count = row.drafter_count if row.drafter_count >= 0 else max(lens[b] + 1 - row.num_drafter_tokens, 0) * (lens[b] > 0)
            first = row.num_drafter_tokens
            for position in range(first, first + count):
                token, before = row.tokens[min(position, len(row.tokens) - 1)], max(position - 1, 0)
                slots = (step.slot(row, position, s) for s in (sizes.drafter_stride, sizes.tap_stride))
                rows.append((token, position, *slots, step.slot(row, before, sizes.tap_stride)))
            last_rows.append(cu_rows[-1] + min(max(len(row.tokens) - 1 - first, 0), max(count - 1, 0)))
            row.num_drafter_tokens = min(first + count, len(row.tokens)) if count else first
            drafter_lens.append(first + count if count else 0)
        else:
            last_rows.append(cu_rows[-1])
            drafter_lens.append(0)
        cu_rows.append(cu_rows[-1] + count)
    drafter = prepare_drafter(table, step.fields, got, step.page_table, sizes)
    assert drafter.packed.T.tolist() == [list(x) for x in rows]
    assert (drafter.cu_rows.tolist(), drafter.seq_lens.tolist()) == (cu_rows, drafter_lens)
    assert drafter.last_rows.tolist() == [min(x, max(len(rows) - 1, 0)) for x in last_rows]
    for row in step.rows:
        if row is not None:
            assert int(table.num_drafter_tokens[row.index]) == row.num_drafter_tokens


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("batch", "num_prompts"), CASES)
def test_drafts_are_appended(batch: int, num_prompts: int, seed: int) -> None:
    step = Step(seed, batch, num_prompts)
    table, sizes = step.table, step.sizes
    table.num_drafts.zero_()
    is_skipped = torch.tensor([step.rng.choice([0, 0, 3]) for _ in range(batch)], dtype=torch.int32)
    packed, lens = torch.full((3, batch), POISON), torch.full((batch,), POISON, dtype=torch.int32)
    expected: dict[int, list[int]] = {row.index: [] for row in step.rows if row}
    for number in range(MAX_DRAFTS):
        chosen = torch.randint(0, V, (batch,), dtype=torch.int32)
        append_draft(packed, lens, table, step.fields, chosen, step.page_table, sizes, number, is_skipped)
        for b, row in enumerate(step.rows):
            known = len(row.tokens) if row else 0
            if row and not is_skipped[b] and row.drafter_count and number < min(row.model_limit, row.end - known - 1):
                expected[row.index].append(int(chosen[b]))
                position, slot = known + number, step.slot(row, known + number, sizes.drafter_stride)
            else:
                position, slot = 0, sizes.scratch_page * sizes.drafter_stride
            assert packed[:, b].tolist() == [int(chosen[b]), position, slot] and int(lens[b]) == position + 1
    for index, drafts in expected.items():
        assert table.drafts[index, : int(table.num_drafts[index])].tolist() == drafts


def test_what_does_not_fit_the_table_is_refused() -> None:
    step = Step(0, 4, 1)
    with pytest.raises(ValueError, match=r"fields is torch.int32 \[14, 3\]; must be torch.int32 \[14, 4\]"):
        prepare_step(step.table, step.fields[:, :3], step.page_table, step.sizes)
    with pytest.raises(ValueError, match="sizes say max_tokens, max_drafts, dummy_index = "):
        prepare_step(step.table, step.fields, step.page_table, step.sizes._replace(dummy_index=3))
    with pytest.raises(ValueError, match="a step has 300 rows; the limit is 256"):
        prepare_step(step.table, torch.zeros(NUM_FIELDS, 300, dtype=torch.int32), step.page_table, step.sizes._replace(batch=300))
