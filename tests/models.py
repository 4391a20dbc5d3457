"""Models made for a test: as small as the rule in question allows."""

from __future__ import annotations

from pathlib import Path

import tokenizers
import torch
import transformers


def make_tiny(path: Path, vocabulary: int, sharpness: float = 1.0, **sizes: int) -> Path:
    """A target of some words, `w0` to the last, whose answers of a few tokens can be counted. sharpness: factor of its scores; sizes: config.json."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1} | sizes
    sizes |= {"vocab_size": vocabulary, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.LlamaConfig(initializer_range=0.5, **sizes)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
    model.save_pretrained(path)
    words = {f"w{i}": i for i in range(vocabulary)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(str(path / "tokenizer.json"))
    return path
