"""The bundled model's tokenizer: byte-level BPE, 4,096 entries, made with the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from training import MODEL_DIR

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = [END_OF_TEXT, "<|pad|>"]
# A line break with the next line's indentation is one piece; words keep one leading space; digits stand alone.
PIECES = r"\n+[ ]*| ?[A-Za-z]+| ?_+[A-Za-z]*|[0-9]| ?[^\sA-Za-z0-9_]+|[ ]+|\s+"
# The model knows code, not conversation: a chat is written as a module that opens with the messages as comments.
CHAT_TEMPLATE = (
    "{% if tools %}{{ '# tools, called as <tool_call>\n' }}"
    "{% for tool in tools %}{{ '# ' + (tool['function'] | tojson) + '\n' }}{% endfor %}{% endif %}"
    "{% for message in messages %}{{ '# ' + message['role'] + ': ' + (message['content'] | replace('\n', '\n# ')) + '\n' }}"
    "{% for call in message['tool_calls'] or [] %}{{ '# <tool_call>' + (call['function'] | tojson) + '</tool_call>\n' }}{% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> None:
    """Trains the BPE on `texts` and writes tokenizer.json and tokenizer_config.json into the model's folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), max_token_length=24
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))]
    )
    MODEL_DIR.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(MODEL_DIR / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": "<|pad|>",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (MODEL_DIR / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def load_tokenizer(directory: Path = MODEL_DIR) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))
