"""How many tokens of prompts a step may have beside requests that decode."""

from __future__ import annotations

import pytest

from backend.chunk_limit import ChunkLimit


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
