"""How many tokens of prompts a step may have beside requests that decode."""

from __future__ import annotations

import pytest

from backend.chunk_limit import LONGEST_SECONDS, ChunkLimit, limit_chunks


def per_token(tokens: int) -> float:
    return 2e-3 + 0.1e-3 * tokens


@pytest.mark.parametrize("seen", [(100, 400), (64, 128, 256, 512), (1000, 2000), (4096,)], ids=str)
def test_prompts_are_cut_to_what_a_step_has_time_for(seen):
    """Whatever sizes come first, a few steps later they are right: 400 tokens take as long as a step may."""
    limit = ChunkLimit(max_seconds=per_token(400))
    for count in seen:
        limit.observe(count, per_token(count))
    for _ in range(12):
        chosen = limit.choose(num_decoding=8)
        assert chosen is not None
        limit.observe(chosen, per_token(chosen))
    assert 300 <= chosen <= 440


@pytest.mark.parametrize("seen", [[(512, 1.5)], [(32, 0.9), (4096, 1.5)], [(8000, 0.5)] * 3], ids=str)
def test_slow_first_steps_are_forgotten(seen):
    """They load what later ones use: what they took says nothing of these."""
    limit = ChunkLimit(max_seconds=per_token(400))
    for count, seconds in seen:
        limit.observe(count, seconds)
    chosen = []
    for _ in range(24):
        chosen.append(limit.choose(num_decoding=8))
        limit.observe(chosen[-1], per_token(chosen[-1]))
    assert all(300 <= count <= 440 for count in chosen[18:]) and sum(chosen) >= 24 * 200


@pytest.mark.parametrize("first", [40e-3, 2.0])
def test_steps_are_not_cut_where_that_saves_nothing(first):
    """Kernels that the host launches one by one take as long for 32 tokens as for 2,048, and the first time longer."""
    limit = ChunkLimit(max_seconds=20e-3)
    limit.observe(512, first)
    for _ in range(60):
        chosen = limit.choose(num_decoding=8)
        chosen = min(chosen or 8192, 8192)
        limit.observe(chosen, 40e-3 + max(0, chosen - 2048) * 20e-6)
    assert 700 <= chosen <= 6000


def test_a_prompt_goes_on_however_slow_steps_are():
    limit = ChunkLimit(max_seconds=1e-3)
    for count in (64, 128, 256):
        limit.observe(count, per_token(count))
    assert limit.choose(num_decoding=1) == ChunkLimit.LEAST


def test_chunks_are_not_cut_where_nobody_waits_or_nothing_is_known():
    limit = ChunkLimit(max_seconds=1e-3)
    assert limit.choose(num_decoding=5) is None
    limit.observe(0, 5.0)  # a step without prompts says nothing
    assert limit.choose(num_decoding=5) is None
    limit.observe(512, per_token(512))
    assert limit.choose(num_decoding=0) is None
    roomy = ChunkLimit(max_seconds=1e3)
    roomy.observe(128, per_token(128))
    roomy.observe(256, per_token(256))
    assert roomy.choose(num_decoding=5) is None


def test_on_cpu_no_step_is_long():
    """Whoever decodes or not: who asks whether the server lives waits for a step's end. The first one is cut by the model's size."""
    small, large = (limit_chunks(None, "cpu", *shape) for shape in ((4, 256), (16, 2048)))
    assert small is not None and large is not None
    assert small.choose(num_decoding=0) > 2000 and large.choose(num_decoding=0) == ChunkLimit.LEAST
    per_token, chosen = 20e-3, 0
    for num_decoding in (0, 0, 3, 0, 3, 3):
        chosen = large.choose(num_decoding)
        assert chosen is not None and 0.1 + per_token * chosen <= 1.1 * LONGEST_SECONDS
        large.observe(chosen, 0.1 + per_token * chosen)
    assert chosen >= 40


def test_what_steps_are_held_to():
    shape = (16, 2048)
    for device in ("cpu", "cuda"):
        assert limit_chunks(0, device, *shape) is None, "as it was asked for"
    on_gpu, asked = limit_chunks(None, "cuda", *shape), limit_chunks(5000, "cpu", *shape)
    assert on_gpu is not None and asked is not None
    assert on_gpu.choose(1) is None, "nothing is known"
    for limit, seconds in ((on_gpu, 50e-3), (asked, 5.0)):
        for count in (256, 512, 768):
            limit.observe(count, 1e-2 * seconds + seconds * count / 1000)
        assert 900 <= limit.choose(num_decoding=1) <= 1000
    assert on_gpu.choose(num_decoding=0) is None and 900 <= asked.choose(num_decoding=0) <= 1000


def test_steps_that_take_long_whatever_they_hold_are_cut_to_half_of_that():
    """Of a large model on CPU, whose weights alone take longer to read than a step should."""
    limit = limit_chunks(None, "cpu", 16, 4096)
    assert limit is not None
    counts = []
    for _ in range(5):
        counts.append(limit.choose(num_decoding=0))
        limit.observe(counts[-1], 1.5 + 10e-3 * counts[-1])
    assert counts[0] == ChunkLimit.LEAST and 120 <= counts[-1] <= 180
    assert limit.choose(num_decoding=2) < counts[-1], "others wait for their next token"
