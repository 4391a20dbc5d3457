"""Paged memory: page-major planes, copies, leases, what drafters have seen of pages, and exchange with another store."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from backend.core import Delta, kv_slots
from backend.errors import KvStoreError
from backend.kv_store import ALIGNMENT, CacheSpec, KvStore, count_page_bytes
from backend.pages import PagePool, SeenPages
from backend.prefix_cache import ROOT
from tests.conftest import EVERY_METHOD, code_prompts, greedy
from tests.small import LLM

CPU = torch.device("cpu")
SPECS = (
    CacheSpec("attention", (2, 16), torch.float32, 4),
    CacheSpec("hidden", (24,), torch.float32),
    CacheSpec("drafter", (3,), torch.bfloat16, 2),
)
PAGE, PAGES = 8, 6


def make_store(specs: Sequence[CacheSpec] = SPECS, page_size: int = PAGE, num_pages: int = PAGES, identity: str = "a model") -> KvStore:
    return KvStore(specs, page_size, num_pages, CPU, {"model": identity})


def planes_of(store: KvStore) -> list[torch.Tensor]:
    return [plane for name in store.specs for plane in store.planes(name)]


def number_pages(store: KvStore) -> None:
    """Every value of page p of plane n is p + 10 (n + 1)."""
    for number, plane in enumerate(planes_of(store)):
        plane.copy_((torch.arange(len(plane)) + 10 * (number + 1)).view(-1, *[1] * (plane.dim() - 1)))


# -- the layout ---------------------------------------------------------------------------------------------------------


def test_planes_are_views_of_one_memory_page_by_page() -> None:
    store = make_store()
    planes = planes_of(store)
    begin, end = store.memory.data_ptr(), store.memory.data_ptr() + store.memory.numel()
    assert store.memory.shape == (PAGES + 1, store.page_bytes) and store.scratch_page == PAGES
    assert [p.shape for p in planes] == [(PAGES + 1, PAGE, 2, 16)] * 4 + [(PAGES + 1, PAGE, 24)] + [(PAGES + 1, PAGE, 3)] * 2
    for plane in planes:
        assert begin <= plane.data_ptr() < end and (plane.data_ptr() - begin) % ALIGNMENT == 0
        assert plane.stride(0) * plane.element_size() == store.page_bytes, "one page's parts lie between its begin and the next one's"
        assert plane[0].is_contiguous()
    number_pages(store)
    for number, plane in enumerate(planes):
        assert torch.equal(plane[3], torch.full_like(plane[3], 3 + 10 * (number + 1))), "planes overlap"
    store.memory[3] = 0
    assert all(not plane[3].any() and plane[2].all() and plane[4].all() for plane in planes), "a page is one piece"


@pytest.mark.parametrize("page_size", [1, 4, 8, 64])
def test_slots_are_pages_times_the_planes_stride(page_size: int) -> None:
    """In any plane, whatever lies between two of its pages."""
    store = make_store(page_size=page_size)
    assert store.page_bytes == count_page_bytes(SPECS, page_size) and store.page_bytes % ALIGNMENT == 0
    page_ids = [4, 0, 5, 2]
    for name, spec in store.specs.items():
        stride = store.stride(name)
        assert stride >= page_size and stride * spec.token_bytes == store.page_bytes
        for number, plane in enumerate(store.planes(name)):
            rows = store.rows(name, number)
            assert rows.is_contiguous() and rows.data_ptr() == plane.data_ptr()
            count = min(4 * page_size, 13)
            slots = kv_slots(page_ids, 0, count, page_size, stride)
            rows[slots] = torch.arange(1, count + 1).to(spec.dtype)[:, None]
            found = torch.cat([plane[page] for page in page_ids])[:count].flatten(1)
            assert torch.equal(found, torch.arange(1, count + 1).to(spec.dtype)[:, None].expand_as(found))
            plane.zero_()


def test_two_specs_of_one_name_are_refused() -> None:
    with pytest.raises(KvStoreError, match="have a name twice"):
        make_store([SPECS[1], SPECS[1]])


# -- copies -------------------------------------------------------------------------------------------------------------


def test_copied_pages_hold_what_was_there_before_the_step() -> None:
    """Sources are read first, fresh pages are cleared, and only the tokens that count are copied; a page may be all three."""
    store = make_store(num_pages=10)
    number_pages(store)
    store.copy([(0, 1, PAGE), (1, 2, 3), (5, 5, 2), (1, 3, PAGE)], [1, 2, 3, 5, 6])
    for number, plane in enumerate(planes_of(store)):
        first = 10 * (number + 1)
        flat = plane.flatten(2)
        values = [[first] * PAGE, [first] * PAGE, [first + 1] * 3 + [0] * 5, [first + 1] * PAGE, [first + 4] * PAGE]
        values += [[first + 5] * 2 + [0] * 6, [0] * PAGE, [first + 7] * PAGE]
        assert flat[:8, :, 0].tolist() == values
        assert torch.equal(flat.amin(dim=2), flat.amax(dim=2)), "tokens are copied whole"
    store.copy((), [7])
    assert all(not plane[7].any() and plane[4].all() for plane in planes_of(store))


def test_what_is_not_finite_goes_no_further_than_its_tokens() -> None:
    store = make_store()
    store.memory.fill_(255)  # not a number, in every dtype
    for plane in planes_of(store):
        plane[2, :3] = 1.0
    store.copy([(2, 4, 3)], [4])
    assert all(torch.equal(plane[4], torch.cat([torch.ones_like(plane[4, :3]), torch.zeros_like(plane[4, 3:])])) for plane in planes_of(store))


def test_pages_that_do_not_exist_are_refused() -> None:
    store = make_store()
    content = store.export_pages([0])
    for page in (-1, PAGES, PAGES + 1, 10**9):
        for action in (
            lambda page=page: store.copy([(page, 0, 1)]),
            lambda page=page: store.copy([(0, page, 1)]),
            lambda page=page: store.copy([], [page]),
            lambda page=page: store.export_pages([0, page]),
            lambda page=page: store.import_pages([page], content, store.fingerprint),
        ):
            with pytest.raises(KvStoreError, match=f"page {page} does not exist; there are pages 0 to {PAGES - 1}"):
                action()
    assert not store.memory.any(), "nothing was written"


# -- exchange with another store ----------------------------------------------------------------------------------------


def test_pages_go_to_other_places_of_another_store() -> None:
    one, other = make_store(), make_store(num_pages=9)
    number_pages(one)
    content = one.export_pages([4, 1])
    one.memory.zero_()  # a copy
    other.import_pages([0, 8], content, one.fingerprint)
    for number, plane in enumerate(planes_of(other)):
        assert [plane[page].flatten()[0].item() - 10 * (number + 1) for page in (0, 8)] == [4, 1]
        assert not plane[1:8].any()


@pytest.mark.parametrize(
    "change",
    [
        {"identity": "another model"},
        {"page_size": 16},
        {"specs": SPECS[:2]},
        {"specs": (SPECS[1], SPECS[0], SPECS[2])},
        {"specs": (CacheSpec("attention", (2, 16), torch.float16, 4), *SPECS[1:])},
        {"specs": (CacheSpec("attention", (4, 8), torch.float32, 4), *SPECS[1:])},
        {"specs": (CacheSpec("attention", (2, 16), torch.float32, 2), *SPECS[1:])},
        {"specs": (CacheSpec("keys", (2, 16), torch.float32, 4), *SPECS[1:])},
    ],
    ids=["identity", "page size", "specs", "order", "dtype", "shape", "planes", "name"],
)
def test_layouts_that_differ_exchange_nothing(change: dict) -> None:
    one, other = make_store(), make_store(**change)
    assert one.fingerprint == make_store(num_pages=3).fingerprint != other.fingerprint, "the number of pages is each store's own"
    with pytest.raises(KvStoreError, match=f"pages of layout {one.fingerprint} cannot be read: this store's is {other.fingerprint}"):
        other.import_pages([0], one.export_pages([0]), one.fingerprint)
    assert not other.memory.any()


def test_content_of_another_size_is_refused() -> None:
    store = make_store()
    for content in (store.export_pages([0, 1]), store.export_pages([0])[:, :-1], store.export_pages([0]).view(torch.int8)):
        with pytest.raises(KvStoreError, match=f"1 pages of {store.page_bytes} bytes came as"):
            store.import_pages([2], content, store.fingerprint)


def adopt(llm: LLM, ids: Sequence[int], content: torch.Tensor, fingerprint: str, num_seen: int) -> None:
    """Another engine's pages of these tokens, as those of a request that ended here. num_seen: tokens that the drafter's part of them is of."""
    engine, size = llm.engine, llm.engine.config.page_size
    pages = engine.scheduler.pool.allocate(len(content))
    assert pages is not None and engine.scheduler.prefix_cache is not None
    engine.worker.store.import_pages(pages, content, fingerprint)
    parent: bytes | None = ROOT
    for number, page in enumerate(pages):
        assert parent is not None
        parent = engine.scheduler.prefix_cache.insert(page, parent, ids[number * size : (number + 1) * size])
    engine.planner._seen.note(pages, 0, num_seen)
    for page in reversed(pages):
        engine.scheduler.pool.release(page)


def leave(llm: LLM, prompt: list[int], whole: Sequence[int], choice: dict) -> tuple[list[int], list[int]]:
    """Runs the request "moves" for 20 tokens of the answer `whole` and more -> tokens so far, and the pages of those that are computed."""
    deltas: list[Delta] = []
    llm.engine.submit(prompt, greedy(48), deltas.append, request_id="moves", speculative=choice)
    llm.engine.step()
    (request,) = llm.engine.scheduler.running
    while request.num_output_tokens < 20:
        llm.engine.step()
    known = list(request.token_ids)
    assert known == [*prompt, *whole[: len(known) - len(prompt)]]
    return known, request.page_ids[: -(-(len(known) - 1) // llm.engine.config.page_size)]


def go_on(llm: LLM, ids: list[int], choice: dict) -> tuple:
    result = llm.generate({"prompt_token_ids": ids}, greedy(24), speculative=choice, use_tqdm=False)[0]
    (output,) = result.outputs
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.pool.num_held == 0
    return output.token_ids, output.sources, output.stats, result.num_cached_tokens


@pytest.mark.parametrize("choice", [{"method": "mtp"}, {"method": "none"}], ids=["mtp", "none"])
@pytest.mark.parametrize("is_ahead", [False, True], ids=["waiting", "ahead"])
def test_a_request_goes_on_in_another_store(llm_plain, is_ahead, choice) -> None:
    """Its pages cross by export and import, and the other engine computes nothing anew: the tokens are those of one engine, and the drafts
    that are accepted too, which come of the drafter's part of the pages."""
    here, there = (LLM(speculative_config=EVERY_METHOD, async_scheduling=is_ahead) for _ in range(2))
    prompt = here.engine.tokenizer.encode(code_prompts(1, (600, 700), seed=23)[0])[:115]
    whole = llm_plain.generate({"prompt_token_ids": prompt}, greedy(48), use_tqdm=False)[0].outputs[0].token_ids
    known, pages = leave(here, prompt, whole, choice)
    computed = len(known) - 1
    num_seen = here.engine.planner._seen.count(pages, computed)
    assert num_seen == (computed if choice["method"] == "mtp" else 0)
    lease = here.engine.scheduler.pool.lease(pages)
    here.engine.cancel("moves")
    here.engine.step()
    one = here.engine.worker.store
    assert one.fingerprint == there.engine.worker.store.fingerprint
    taken = there.engine.scheduler.pool.allocate(3) or []  # so that they get other places than they had
    adopt(there, known[:computed], one.export_pages(pages), one.fingerprint, num_seen)
    for page in taken:
        there.engine.scheduler.pool.release(page)
    here.engine.scheduler.pool.end_lease(lease)
    expected, found = go_on(here, known, choice), go_on(there, known, choice)
    assert found == expected and found[0] == whole[len(known) - len(prompt) :][:24] and found[3] == computed


# -- leases -------------------------------------------------------------------------------------------------------------


def test_leased_pages_outlive_their_request() -> None:
    pool = PagePool(4, PAGE)
    pages = pool.allocate(3)
    assert pages is not None
    first, second = pool.lease(pages[:2]), pool.lease(pages[1:2])
    pool.check(dict.fromkeys(pages, 1))
    for page in pages:
        pool.release(page)
    pool.check({})
    assert pool.num_held == 2 and pool.num_available == 2
    assert set(pool.allocate(2) or ()).isdisjoint(pages[:2]) and pool.allocate(1) is None, "what is leased is nobody else's"
    pool.end_lease(first)
    assert pool.allocate(1) == pages[:1] and pool.allocate(1) is None
    pool.end_lease(second)
    assert pool.num_available == 1
    with pytest.raises(KeyError):
        pool.end_lease(first)


def test_a_lease_of_cached_pages_keeps_them_from_being_given_out() -> None:
    pool = PagePool(2, PAGE)
    pages = pool.allocate(2)
    assert pages is not None
    for page in pages:
        pool.keep(page)
        pool.release(page)
    lease = pool.lease([pages[1]])
    assert pool.allocate(2) is None and pool.allocate(1) == [pages[0]]
    pool.end_lease(lease)
    assert pool.allocate(1) == [pages[1]]


def test_check_finds_a_lease_that_was_lost() -> None:
    pool = PagePool(2, PAGE)
    pages = pool.allocate(1)
    assert pages is not None
    number = pool.lease(pages)
    del pool._leases[number]
    with pytest.raises(AssertionError, match="counts 2 holders and has 1"):
        pool.check({pages[0]: 1})


# -- what a drafter has seen --------------------------------------------------------------------------------------------


def test_seen_pages_against_their_plainest_model() -> None:
    """A page is as many leading tokens of some text as were noted since it changed hands."""
    for seed in range(60):
        rng = random.Random(seed)
        seen, size = SeenPages(12, 4), 4
        right: list[int] = [0] * 12
        for _ in range(80):
            pages = rng.sample(range(12), 5)
            what = rng.random()
            if what < 0.2:
                seen.reset(pages[:2])
                for page in pages[:2]:
                    right[page] = 0
            elif what < 0.4:
                copies = [(a, b, rng.randint(0, size)) for a, b in pairwise(pages)][::2]
                known = [min(right[a], count) for a, _, count in copies]
                seen.copy(copies)
                for (_, target, _), count in zip(copies, known):
                    right[target] = count
            elif what < 0.42:
                seen.forget_all()
                right = [0] * 12
            else:
                # Everything before `begin` has been seen, as a drafter that goes on from there knows.
                begin = seen.count(pages, 20)
                end = rng.randint(begin, 22)
                seen.note(pages, begin, end)
                for number, page in enumerate(pages):
                    own = min(size, end - number * size)
                    if own > 0 and number >= begin // size:
                        right[page] = max(right[page], own)
            leading = 0
            for page in pages:
                leading += right[page]
                if right[page] < size:
                    break
            for limit in (0, 3, 8, 20):
                assert seen.count(pages, limit) == min(leading, limit)
